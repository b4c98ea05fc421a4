# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the demo's text, the language reference inside every CPython, as a record file for MaxText's Grain input."""

import pathlib
import textwrap

from maxtext_pp_ext.trainer_runs import records

_CHARACTERS = 400  # about the capacity of a row of the demo


def write_language_reference(path: pathlib.Path) -> tuple[int, int]:
  """Writes pieces of the topics, each a `tf.train.Example` with the one feature `text`. Returns (topics, characters).

  A piece is one row of a batch, for any number of processes. If MaxText packed several texts into a row, each process
  would pack those that it reads.
  """
  from pydoc_data.topics import topics  # pylint: disable=import-outside-toplevel

  pieces = (
      piece
      for name in sorted(topics)
      for piece in textwrap.wrap(topics[name], _CHARACTERS, expand_tabs=False, replace_whitespace=False)
  )
  records.write(path, ({"text": piece} for piece in pieces))
  return len(topics), sum(map(len, topics.values()))
