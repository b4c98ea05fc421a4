# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.demo.prepare OUTPUT STEPS PIPELINE_IMPL KEY=VALUE…`: text and initial weights of both runs.

It runs in a separate process, so MaxText's log at import goes to a file instead of the demo's output.
"""

import json
import pathlib
from pydoc_data.topics import topics
import sys
import textwrap

import jax

from examples.demo import settings as demo_settings
from examples.demo import weights
import maxtext_pp_ext
from maxtext_pp_ext.trainer_runs import trainer

_CHARACTERS = 400  # about the capacity of a row of the demo


def main(output: str, steps: str, pipeline_impl: str, *extra_keys: str) -> None:
  maxtext_pp_ext.install()
  settings = demo_settings.Settings(
      output=pathlib.Path(output), steps=int(steps), pipeline_impl=pipeline_impl, extra_keys=extra_keys
  )
  # A piece is a row of a batch. If MaxText packed several texts into a row, each process would pack those that it reads.
  wrapper = textwrap.TextWrapper(_CHARACTERS, expand_tabs=False, replace_whitespace=False)
  pieces = (piece for text in topics.values() for piece in wrapper.wrap(text))
  trainer.write_records(settings.data_file, ({"text": piece} for piece in pieces))
  tree, layout = weights.draw(_arguments(settings, settings.sequential_keys()))
  for name, keys in {"sequential": settings.sequential_keys(), "pipelined": settings.pipelined_keys()}.items():
    weights.save(settings.weights(name), weights.in_layout_of(tree, layout, _arguments(settings, keys)))
  parameters = sum(leaf.size for leaf in jax.tree.leaves(tree))
  summary = {"topics": len(topics), "characters": sum(map(len, topics.values())), "parameters": parameters}
  settings.summary_file.write_text(json.dumps(summary), encoding="utf-8")


def _arguments(settings: demo_settings.Settings, keys: list[str]) -> list[str]:
  return ["", "run_name=initial-weights", *settings.shared_keys(), *keys]


if __name__ == "__main__":
  main(*sys.argv[1:])
