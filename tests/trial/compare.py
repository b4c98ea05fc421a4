# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares what two trainings left, beside what controls left whose weights began a unit in the last place apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import math

import ml_dtypes
import numpy as np

from maxtext_pp_ext.checkpoint.moves import converted
from tests.trial.trainer import Arrays, Trained

# The controls are samples of what rounding does. An array, or a metric, may be this many times as far off.
SAMPLES = 16.0
# How far any two sums in another order may be apart.
ROUNDING = 2.0**-20
# The same of parameters behind Adam, which divides small gradients by their size. Its moments are compared, too.
DIVIDED = 2.0**-14
# Half a unit in the last place in each of two steps, of either training.
STEPS_ROUND = 2.0
# An array that changes less than this part of what others of its kind do is compared with that part instead.
LEAST = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """How far an array or a metric is off.

  Attributes:
    name: its path, or the metric's name.
    error: relative to the expected change of the array, or to the metric.
    control: the same of the control that is furthest off.
    least: the control counts as this much at least.
  """

  name: str
  error: float
  control: float
  least: float = ROUNDING

  @property
  def ratio(self) -> float:
    """The error, by what is allowed."""
    return self.error / (SAMPLES * max(self.control, self.least))


def in_layout_of(found: Trained, like: Trained) -> Trained:
  """The same with its arrays in the layout of another."""
  move = lambda arrays: converted(arrays, found.layout, like.layout)
  return dataclasses.replace(found, start=move(found.start), end=move(found.end), layout=like.layout)


def differences(found: Trained, expected: Trained, controls: Sequence[Trained]) -> list[Difference]:
  """All differences, the worst first. `found` is in the layout of `expected`."""
  return sorted([*_metrics(found, expected, controls), *_arrays(found, expected, controls)], key=lambda d: -d.ratio)


def _metrics(found: Trained, expected: Trained, controls: Sequence[Trained]) -> Iterator[Difference]:
  if found.metrics.keys() != expected.metrics.keys():
    only = sorted(found.metrics.keys() ^ expected.metrics.keys())
    yield Difference(name=f"metrics of one of both: {', '.join(only[:5])}", error=math.inf, control=0.0)
  for name, value in expected.metrics.items():
    if name in found.metrics:
      off = lambda other, value=value: _relative(np.float64(other) - value, value, max(abs(value), 1e-3), other)
      yield Difference(name=name, error=off(found.metrics[name]), control=max(off(c.metrics[name]) for c in controls))


def _arrays(found: Trained, expected: Trained, controls: Sequence[Trained]) -> Iterator[Difference]:
  if found.end.keys() != expected.end.keys():
    only = sorted("/".join(path) for path in found.end.keys() ^ expected.end.keys())
    yield Difference(name=f"arrays of one of both: {', '.join(only[:5])}", error=math.inf, control=0.0)
  changes = {path: _change(expected, path) for path in expected.end if path in found.end}
  mean, has_moments = _means(changes), any("mu" in path for path in changes)
  for path, wanted in changes.items():
    least = LEAST * mean[_kind(path)] * math.sqrt(wanted.size)
    # An array is rounded at each step: a change is known no better.
    unknown = STEPS_ROUND * _unit(expected.end[path]) * _norm(expected.end[path])
    off = lambda other, path=path, wanted=wanted, least=least, unknown=unknown: _relative(
        _change(other, path) - wanted, wanted, max(_norm(wanted), least), _change(other, path), unknown
    )
    least = DIVIDED if has_moments and _kind(path)[-1:] in _OF_PARAMETERS else ROUNDING
    yield Difference(name="/".join(path), error=off(found), control=max(map(off, controls)), least=least)


def _kind(path: tuple[str, ...]) -> tuple[str, ...]:
  """The part of a path before the model's: arrays of one kind are compared with each other."""
  at = next((i for i, name in enumerate(path) if name in ("decoder", "token_embedder", "mtp_block")), len(path))
  return path[:at]


def _means(changes: Arrays) -> dict[tuple[str, ...], float]:
  of_kind: dict[tuple[str, ...], list[np.ndarray]] = {}
  for path, value in changes.items():
    of_kind.setdefault(_kind(path), []).append(value)
  return {
      kind: math.sqrt(sum(_norm(v) ** 2 for v in values) / max(sum(v.size for v in values), 1))
      for kind, values in of_kind.items()
  }


_OF_PARAMETERS = (("model",), ("params",))


def _change(of: Trained, path: tuple[str, ...]) -> np.ndarray:
  """What training changed: of parameters the difference to the beginning; moments begin with zero."""
  end = np.asarray(of.end[path], np.float64)
  before = next((of.start[path[i:]] for i in range(1, min(4, len(path))) if path[i:] in of.start), None)
  return end if before is None or _kind(path)[-1:] not in _OF_PARAMETERS else end - np.asarray(before, np.float64)


def _norm(x: np.ndarray) -> float:
  return float(np.linalg.norm(np.nan_to_num(np.asarray(x, np.float64), nan=0.0, posinf=0.0, neginf=0.0)))


def _unit(array: np.ndarray) -> float:
  return float(ml_dtypes.finfo(array.dtype).eps) if _is_floating(array) else 0.0


def _is_floating(array: np.ndarray) -> bool:
  return array.dtype.kind == "f" or array.dtype.name.startswith(("bfloat", "float"))


def _relative(
    difference: np.ndarray, expected: np.ndarray, scale: float, found: np.ndarray, unknown: float = 0.0
) -> float:
  """What of the difference is known, by the scale; infinite if one has a NaN where the other has none."""
  if not np.array_equal(np.isnan(found), np.isnan(expected)):
    return math.inf
  norm = max(_norm(difference) - unknown, 0.0)
  scale = scale if math.isfinite(scale) else 1.0
  return norm / scale if scale else norm and math.inf
