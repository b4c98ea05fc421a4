# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's text: the language reference inside every CPython, as the record file that MaxText's Grain input reads."""

import pathlib


def write_language_reference(path: pathlib.Path) -> tuple[int, int]:
  """Writes one `tf.train.Example` per topic, with the one feature `text`. Returns (topics, characters)."""
  from array_record.python.array_record_module import ArrayRecordWriter  # pylint: disable=import-outside-toplevel
  from maxtext.input_pipeline.protos import example_pb2  # pylint: disable=import-outside-toplevel
  from pydoc_data.topics import topics  # pylint: disable=import-outside-toplevel

  path.parent.mkdir(parents=True, exist_ok=True)
  # Records in groups of one can be read in any order, which MaxText's shuffle needs.
  writer = ArrayRecordWriter(str(path), "group_size:1")
  for name in sorted(topics):
    example = example_pb2.Example()
    example.features.feature["text"].bytes_list.value.append(topics[name].encode())
    writer.write(example.SerializeToString())
  writer.close()
  return len(topics), sum(map(len, topics.values()))
