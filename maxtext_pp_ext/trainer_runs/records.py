# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes record files that MaxText's Grain input reads."""

from collections.abc import Iterable, Mapping, Sequence
import pathlib


def write(path: pathlib.Path, examples: Iterable[Mapping[str, str | Sequence[int]]]) -> None:
  """Writes one `tf.train.Example` per example; a feature is text or token ids."""
  from array_record.python.array_record_module import ArrayRecordWriter  # pylint: disable=import-outside-toplevel
  from maxtext.input_pipeline.protos import example_pb2  # pylint: disable=import-outside-toplevel

  path.parent.mkdir(parents=True, exist_ok=True)
  # Records in groups of one can be read in any order, which MaxText's shuffle needs.
  writer = ArrayRecordWriter(str(path), "group_size:1")
  for features in examples:
    example = example_pb2.Example()
    for name, value in features.items():
      if isinstance(value, str):
        example.features.feature[name].bytes_list.value.append(value.encode())
      else:
        example.features.feature[name].int64_list.value.extend(value)
    writer.write(example.SerializeToString())
  writer.close()
