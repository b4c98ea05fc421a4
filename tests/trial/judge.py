# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a configuration with a pipeline and without, and says whether it is the same."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import gc
import io
import math
import traceback

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_pp_ext.checkpoint.moves import converted
from maxtext_pp_ext.config import PipelineConfigError
from maxtext_pp_ext.errors import Refusal
from maxtext_pp_ext.host.models import layouts
from tests.trial import compare, trainer
from tests.trial.configuration import Configuration
from tests.trial.trainer import Arrays, Trained, Training

EQUAL, REFUSED, HOST_REFUSES, HOST_FAILS = "equal", "refused", "refused by MaxText", "MaxText fails"
DIFFERENT, CRASH = "DIFFERENT", "CRASH"
FAULTS = (DIFFERENT, CRASH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """The result of a configuration.

  Attributes:
    verdict: one of the constants of this module.
    said: what is most different, or the error.
    ratio: the largest difference, by what is allowed.
    details: the largest differences, or where the error was raised.
  """

  verdict: str
  said: str
  ratio: float = 0.0
  details: tuple[str, ...] = ()


def judge(configuration: Configuration) -> Outcome:
  """Trains a configuration in this process, and compares."""
  try:
    with contextlib.redirect_stdout(io.StringIO()):  # MaxText prints what it counts
      return _judge(configuration)
  finally:
    jax.clear_caches()
    gc.collect()


def _judge(configuration: Configuration) -> Outcome:
  try:
    pipelined = trainer.read(configuration.arguments(True))
  except PipelineConfigError as error:
    return Outcome(verdict=REFUSED, said=_first_problem(error))
  except ValueError as error:
    return Outcome(verdict=HOST_REFUSES, said=_line(error))
  try:
    alone, unit = trainer.read(configuration.arguments(False)), _unit(pipelined)
    devices = jax.devices()[:1] if configuration.on_one_device else None
    # Numbers of `unsafe_rbg`, which trainers draw, recur in other layers and steps.
    prng = "threefry2x32" if configuration.dropout else jax.config.jax_default_prng_impl
    with jax.default_prng_impl(prng):
      reference = Training(alone, _drawn(configuration), devices=devices, nan_row=configuration.nan_row)
    expected = reference.trained
    controls = [] if configuration.dropout else [reference.again(_moved(unit, seed)) for seed in range(2)]
  except (Exception, SystemExit) as error:  # pylint: disable=broad-exception-caught
    return Outcome(verdict=HOST_FAILS, said=_line(error), details=_where())
  try:
    layout = layouts.of_config(pipelined)
    found = Training(
        pipelined, lambda _: converted(expected.start, expected.layout, layout), nan_row=configuration.nan_row
    ).trained
  except Refusal as error:
    return Outcome(verdict=REFUSED, said=f"later: {_first_problem(error)}", details=_where())
  except (Exception, SystemExit) as error:  # pylint: disable=broad-exception-caught
    return Outcome(verdict=CRASH, said=_line(error), details=_where())
  if configuration.dropout:
    return _of_means(found, expected)
  found = compare.in_layout_of(found, expected)
  differences = compare.differences(found, expected, controls)
  if 1 < differences[0].ratio < math.inf:  # a token may have gone to another expert, as it does in few controls
    controls += [reference.again(_moved(_CHAIN * unit, seed)) for seed in range(2, 10)]
    differences = compare.differences(found, expected, controls)
  details = [f"{d.name}: {d.error:.1e}, control {d.control:.1e}" for d in differences[:12]]
  worst = differences[0]
  verdict = EQUAL if worst.ratio <= 1 else DIFFERENT
  return Outcome(verdict=verdict, said=details[0], ratio=worst.ratio, details=tuple(details))


_CHAIN = 4  # units that a layer's chain of rounded operations adds up to, as in `tests.trainer.cases`


def _unit(config) -> float:
  """By which part of itself a weight of the control is moved: a unit in the last place, more where values are few."""
  if config.quantization:
    return 2.0**-14  # values that are rounded to few bits move by a whole step or not at all
  dtypes = (config.dtype, config.weight_dtype, config.grad_dtype, config.pipeline_grad_accum_dtype)
  return max(float(jnp.finfo(dtype).eps) for dtype in dtypes if dtype != "auto")


def _drawn(configuration: Configuration) -> Callable[[Arrays], Arrays]:
  """Moves weights at random, so that no bias is zero and no two scales are equal."""

  def draw(arrays: Arrays) -> Arrays:
    numbers = np.random.default_rng(0)
    found = {
        path: (value + 0.1 * numbers.standard_normal(value.shape)).astype(value.dtype)
        for path, value in sorted(arrays.items())
    }
    if configuration.nan_row is not None:
      found["token_embedder", "embedding"][-1] = np.nan
    return found

  return draw


def _moved(unit: float, seed: int) -> Callable[[Arrays], Arrays]:
  def move(arrays: Arrays) -> Arrays:
    numbers = np.random.default_rng([1, seed])
    return {
        path: (value * (1 + unit * numbers.choice([-1.0, 1.0], value.shape))).astype(value.dtype)
        for path, value in sorted(arrays.items())
    }

  return move


def _of_means(found: Trained, expected: Trained) -> Outcome:
  """Compares means and deviations over steps, which dropout makes different."""
  said, worst = [], 0.0
  for name in ("learning/loss", "learning/raw_grad_norm"):
    ours, theirs = (np.array([v for key, v in each.metrics.items() if key.endswith(name)]) for each in (found, expected))
    off = abs(ours.mean() - theirs.mean()) / math.sqrt(ours.var() / len(ours) + theirs.var() / len(theirs) + 1e-30)
    ratio = abs(math.log(ours.std() / theirs.std())) * math.sqrt(len(ours)) if theirs.std() and ours.std() else math.inf
    said.append(
        f"{name}: {ours.mean():.4f} ± {ours.std():.4f}, without {theirs.mean():.4f} ± {theirs.std():.4f}"
        f" ({off:.1f} and {ratio:.1f} standard errors)"
    )
    worst = max(worst, off / 4, ratio / 4)
  return Outcome(verdict=EQUAL if worst <= 1 else DIFFERENT, said=said[0], ratio=worst, details=tuple(said))


def _first_problem(error: BaseException) -> str:
  lines = str(error).splitlines()
  return lines[1].removeprefix("  - ") if isinstance(error, PipelineConfigError) and len(lines) > 1 else _line(error)


def _line(error: BaseException) -> str:
  text = str(error).strip().splitlines()
  return f"{type(error).__name__}: {text[0] if text else ''}"


def _where() -> tuple[str, ...]:
  return tuple(traceback.format_exc().splitlines()[-60:])
