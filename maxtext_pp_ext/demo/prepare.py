# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m maxtext_pp_ext.demo.prepare OUTPUT STEPS`: the text and the initial weights of both runs.

A process of its own, so that what MaxText logs while it is imported goes to a file instead of over the demo's output.
"""

import json
import pathlib
import sys

from maxtext_pp_ext.demo import settings as demo_settings, text, weights


def main(output: str, steps: str) -> None:
  settings = demo_settings.Settings(output=pathlib.Path(output), steps=int(steps))
  topics, characters = text.write_language_reference(settings.data_file)
  parameters = weights.write_initial_weights(settings)
  summary = {"topics": topics, "characters": characters, "parameters": parameters}
  settings.summary_file.write_text(json.dumps(summary), encoding="utf-8")


if __name__ == "__main__":
  main(*sys.argv[1:])
