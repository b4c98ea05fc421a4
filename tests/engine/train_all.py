# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs MaxText's trainer several times; run as a script by tests, since importing it takes longer than a tiny run.

The argument is a JSON object {name: [key=value, ...]}. Each run leaves NAME.jsonl, the trainer's metrics, or NAME.error.
"""

import json
import pathlib
import sys
import traceback

import maxtext_pp_ext

maxtext_pp_ext.install()

from maxtext.trainers.pre_train import train  # noqa: E402


def main(runs: dict[str, list[str]]) -> None:
  for name, keys in runs.items():
    try:
      train.main(["", *keys, f"run_name={name}", f"metrics_file={name}.jsonl", "base_output_directory=out"])
    except Exception:  # pylint: disable=broad-exception-caught
      pathlib.Path(f"{name}.error").write_text(traceback.format_exc(), encoding="utf-8")


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
