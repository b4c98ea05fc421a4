# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's text: the language reference inside every CPython, as the record file that MaxText's Grain input reads."""

import pathlib

from maxtext_pp_ext.testing import records


def write_language_reference(path: pathlib.Path) -> tuple[int, int]:
  """Writes one `tf.train.Example` per topic, with the one feature `text`. Returns (topics, characters)."""
  from pydoc_data.topics import topics  # pylint: disable=import-outside-toplevel

  records.write(path, ({"text": topics[name]} for name in sorted(topics)))
  return len(topics), sum(map(len, topics.values()))
