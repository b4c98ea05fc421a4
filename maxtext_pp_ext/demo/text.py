# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's text: the language reference inside every CPython, as the record file that MaxText's Grain input reads."""

import pathlib
import textwrap

from maxtext_pp_ext.trainer_runs import records

_CHARACTERS = 400  # about as many as a row of the demo has room for


def write_language_reference(path: pathlib.Path) -> tuple[int, int]:
  """Writes pieces of the topics, each a `tf.train.Example` with the one feature `text`. Returns (topics, characters).

  A piece is a row of a batch, however many processes read them. Where MaxText packs several texts into a row, each
  process packs those that it reads.
  """
  from pydoc_data.topics import topics  # pylint: disable=import-outside-toplevel

  pieces = (
      piece
      for name in sorted(topics)
      for piece in textwrap.wrap(topics[name], _CHARACTERS, expand_tabs=False, replace_whitespace=False)
  )
  records.write(path, ({"text": piece} for piece in pieces))
  return len(topics), sum(map(len, topics.values()))
