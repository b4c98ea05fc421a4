# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which numbers a key of MaxText's can have, read off its field: type, bounds and default.

MaxText 0.2.5 bounds a part of its fields only. A key may have its default, whatever that is. Else:

- No number is NaN or infinite.
- A whole number is at least 1 if its default is, so a size, a count or a degree is. If the default is 0 or -1, which
  stand for "none" and "not set", it is at least that. It is at most what JAX's integers of 32 bits can hold.
- A number with a fraction is not negative, unless its default is.

The tables have the keys of which MaxText says something else.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import re
import types
import typing
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo

_MOST = 2**31 - 1  # positions, tokens, steps and dimensions are counted in 32 bits
_MOST_LISTED = 1 << 16  # each has a place in a list
_LISTED = re.compile(
    r"(base_num_decoder|pipeline_parallel|first_num_dense|mtp_num)_layers|num_layers_per_\w+|num_pipeline_\w+"
    r"|(compile_topology_)?num_slices"
)
_PARALLELISM = re.compile(r"(ici|dcn)_\w+_parallelism")
# Neither sizes nor counts: any number has a meaning.
_ANY = re.compile(r"\w*seed\w*|packing_max_segments_per_sample|target_eval_loss|compressed_rope_max_timescale")
# Of these MaxText takes 0, though the default is positive: none of it, from the first step on, without waiting.
_FROM_0 = re.compile(
    r"(grain|elastic|profiler|checkpoint_storage|prefix_caching|tpu_num)_\w+|skip_first_n_steps_for_profiler|param_scan_axis"
    r"|\w+_(port|core_id|timeout|start_step|timescale|interval_in_seconds|interval_seconds)|max_prefill_predict_length"
    r"|prefill_chunk_size|max_inflight_computations|max_corpus_chars|beta_(fast|slow)|rope_factor|position_id_per_seconds"
)
# Of these it takes -1, too: as many as there is room for; every layer.
_FROM_MINUS_1 = re.compile(rf"{_PARALLELISM.pattern}|grain_worker_count(_eval)?|interleave_moe_layer_step")
# 0 is no size, though the default is -1.
_NOT_0 = re.compile(
    rf"{_PARALLELISM.pattern}|base_moe_mlp_dim|moe_expert_input_dim|(compile_topology_)?num_slices|pipeline_parallel_layers"
    "|interleave_moe_layer_step|num_pipeline_(repeats|microbatches)|quantization_local_shard_count|internal_compile_num_devices"
)
_POSITIVE = re.compile(
    r"per_device_batch_size(_start|_increment)?|rope_linear_scaling_factor|normalization_layer_epsilon"
)
_SIZES = re.compile(r"\w*(batch_size|factor)\w*")  # of numbers with a fraction, those that sizes are computed from
_LARGE = re.compile(r"\w*(byte|bytes|bytes_accessed|flops|flops_fwd|flops_bwd)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """The numbers from `least` to `most`, without 0 or `least` itself where these say so. `default` is always one."""

  default: float | None
  least: float = -math.inf
  most: float = math.inf
  above: bool = False
  without_0: bool = False

  def why_not(self, number: float) -> str | None:
    """What a number has to be and is not; None if it can be had."""
    if number == self.default:
      return None
    if not math.isfinite(number):
      return "has to be finite"
    if number > self.most:
      return f"can be at most {_text(self.most)}"
    if self.without_0 and number <= 0 and number != self.least:
      return f"has to be at least 1{', or -1' if self.least == -1 else ''}"
    if number < self.least or (self.above and number == self.least):
      return f"has to be {'more than' if self.above else 'at least'} {_text(self.least)}"
    return None


def problems(fields: Mapping[str, FieldInfo], values: Mapping[str, Any]) -> list[str]:
  """A sentence for each number that its key cannot have.

  `fields` are those of MaxText's config class. Numbers may be text; what is no number is for pydantic to judge.
  """
  found = []
  for key, value in values.items():
    number = _number(value) if key in fields else None
    if number is None or number == fields[key].default:
      continue
    allowed = range_of(key, fields[key])
    if allowed is None or (why_not := allowed.why_not(number)) is None:
      continue
    default = None if allowed.default is None else _text(allowed.default)
    remedy = f"Set another number, such as MaxText's default, {key}={default}" if default else "Leave it out"
    found.append(f"{key}={value} {why_not}. {remedy}.")
  return found


def range_of(key: str, field: FieldInfo) -> Range | None:
  """The numbers that a key can have; None if it has none, or MaxText gives any number a meaning."""
  if not (kinds := [part for part in _parts(field.annotation) if part in (int, float)]):
    return None
  default = _number(field.default)
  if _ANY.fullmatch(key):
    return Range(default=default)
  least, above, most = _bounds(field)
  if float not in kinds:
    large = _LARGE.fullmatch(key) or (default is not None and default > _MOST)
    most = min(most, math.inf if large else _MOST_LISTED if _LISTED.fullmatch(key) else _MOST)
  elif _SIZES.fullmatch(key):
    most = min(most, _MOST)
  without_0 = least == -math.inf and bool(_NOT_0.fullmatch(key))
  if least == -math.inf:
    if _FROM_MINUS_1.fullmatch(key):
      least = -1
    elif _POSITIVE.fullmatch(key):
      least, above = 0, True
    elif float in kinds:
      least = 0 if default is not None and default >= 0 else least
    else:
      least = 0 if default is None else min(default, 0 if _FROM_0.fullmatch(key) else 1)
  elif float not in kinds and above:
    least, above = math.floor(least) + 1, False
  return Range(default=default, least=least, most=most, above=above, without_0=without_0)


def _parts(annotation: Any) -> Iterator[Any]:
  """Yields the types that a value can have, and pydantic's bounds of them; elements of lists are no values."""
  if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
    for each in typing.get_args(annotation):
      yield from _parts(each)
  else:
    yield annotation


def _bounds(field: FieldInfo) -> tuple[float, bool, float]:
  """Pydantic's own (least, whether it must be more than that, most) of a field."""
  least, above, most = -math.inf, False, math.inf
  for bound in (*field.metadata, *_parts(field.annotation)):
    if isinstance(bound, annotated_types.Gt):
      least, above = bound.gt, True  # type: ignore[assignment]  # a number's bound is a number
    elif isinstance(bound, annotated_types.Ge):
      least = bound.ge  # type: ignore[assignment]
    elif isinstance(bound, annotated_types.Le):
      most = bound.le  # type: ignore[assignment]
  return least, above, most


def _number(value: Any) -> float | None:
  """The number that pydantic would make of a value; None if it makes none."""
  if isinstance(value, bool) or not isinstance(value, int | float | str):
    return None
  try:
    return value if isinstance(value, int | float) else float(value)
  except ValueError:
    return None


def _text(number: float) -> str:
  return str(int(number)) if number == int(number) else f"{number:g}"
