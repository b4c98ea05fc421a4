# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/how-it-works.md, whose formulas are computed again, and pages whose figures are constants of code."""

from collections.abc import Iterator
import inspect
import re

import jax

from benchmarks import scaling
from maxtext_pp_ext.plan.costs import Part, Phase, Sent
from maxtext_pp_ext.schedule import CircularSchedule
from maxtext_pp_ext.schedule.moves import transfers
from tests import tables
from tests.docs import pages
from tests.docs.figures.results import CHECKOUT, compiled, percent, predicted, scaled, text_of


def how_it_works() -> Iterator[str]:
  stages, fsdp, microbatches, repeats = 4, 32, 8, 20
  iterations = microbatches * repeats + stages - 1
  costs, _ = predicted("llama3-70b", "circular_bsw")
  held = costs.phases[Phase.BACKWARD]
  weights, activations = held[Part.DOUBLE_BUFFER] / 2, held[Part.WAITING] / 2 / microbatches
  ring = activations * 2 * iterations
  gathers = weights * (fsdp - 1) / fsdp * (2 * repeats - 1 + 2 * (stages - 1) / microbatches)
  reductions = weights * (fsdp - 1) / fsdp * (repeats + (stages - 1) / microbatches)
  schedule = CircularSchedule(stages=stages, microbatches=microbatches, repeats=repeats)
  ends = 2 * transfers(schedule) * activations
  outside = costs.traffic[Sent.OUTSIDE]
  ours, plain = (compiled("llama3-70b", impl) for impl in ("circular_bsw", "host plain"))
  gb = lambda size: f"{size / 1e9:.1f} GB"
  yield f"""(S = {stages}, F = {fsdp}, M = {microbatches}, R = {repeats};
      [table](../benchmarks/results/compiler_figures.md)): W = {weights / 1e9:.2f} GB, so gathers {gb(gathers)}, gradients
      {gb(reductions)}; T = {iterations} and A = {activations / 1e6:.0f} MB, so {gb(ring + ends)} of activations;
      {gb(outside)} outside. That is {gb(gathers + reductions + ring + ends + outside)}. The compiler's figure is
      {ours.sent:.1f} GB (`python -m benchmarks.compiler_figures --shape llama3-70b`)."""
  yield f"""it and MaxText's plain pipeline need about the same (`circular_bsw` {ours.peak:.1f} GB at the peak, plain
      {plain.peak:.1f})."""
  ratio = lambda **point: scaled("circular_bsw", **point).peak / scaled("host plain", **point).peak
  others = [ratio(**point) for _, points in scaling.SERIES.values() for point in points if ratio(**point) != ratio()]
  yield f"""`circular_bsw` needs {ratio():.2f} times plain's peak where the series meet, and {min(others):.2f} to
      {max(others):.2f} times elsewhere."""


def parity() -> Iterator[str]:
  from maxtext_pp_ext.testing import parity as comparison  # pylint: disable=import-outside-toplevel

  yield f"are taken relative to {percent(comparison.LEAST_GRADIENT)} of the mean of the others."


def quantization() -> Iterator[str]:
  from qwix._src.core import numerics  # pylint: disable=import-outside-toplevel  # takes a second

  eight, four = map(numerics.get_symmetric_bound, ("int8", "int4"))
  yield f"Qwix scales the largest value of a channel to {eight} (`int8`) or {four} (`int4`)."


def reliability() -> Iterator[str]:
  from tests.reliability import test_death  # pylint: disable=import-outside-toplevel  # imports MaxText's trainer

  default = inspect.signature(jax.distributed.initialize).parameters["heartbeat_timeout_seconds"].default
  yield f"""after {test_death.HEARTBEAT_S} s in the test, and after JAX's default of {default} s in MaxText."""


def trainer_parity() -> Iterator[str]:
  results = tables.read(CHECKOUT / pages.GENERATED["trainer-table.md"]).values()
  loss, norm, evaluation = (max(each) for each in zip(*(result["differences"] for result in results), strict=True))
  allowed = min(min(result["allowed"]) for result in results)
  yield f"""Losses differ by {max(loss, evaluation):.1e} of themselves at most, gradient norms by {norm:.1e};
      {allowed:.1e} or more is allowed"""


def first_hour() -> Iterator[str]:
  first, last = re.findall(r"^completed step: .* loss: ([\d.]+)", text_of("docs/first-hour.md"), re.MULTILINE)[:2]
  yield f"The loss falls from {float(first):.1f} to {float(last):.1f}:"
