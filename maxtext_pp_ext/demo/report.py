# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the two loss curves: table, picture, and how far apart float32 lets them be."""

from collections.abc import Sequence
import math
import pathlib

# float32: the distance from 1 to the next number.
EPSILON = 2.0**-23
# Matrix products, normalisations and the softmax on the path through one layer, forward and backward.
ROUNDED_OPERATIONS_PER_LAYER = 16


def tolerance(loss: float, step: int, layers: int) -> float:
  """Returns how far the losses of two float32 runs of one computation may be apart at `step`, counted from 0.

  Another order of summation changes a result by about one rounding error per operation in the chain, relative to its
  size: `EPSILON` times the layers times the operations in a layer. Each optimizer step starts from the differences of all
  earlier steps and adds its own, so the bound grows with the number of steps.
  """
  return EPSILON * layers * ROUNDED_OPERATIONS_PER_LAYER * (step + 1) * abs(loss)


def excess_steps(pipelined: Sequence[float], sequential: Sequence[float], layers: int) -> list[int]:
  """Returns the steps at which the curves are further apart than `tolerance`, or one of them is not finite."""
  return [
      step
      for step, (ours, reference) in enumerate(zip(pipelined, sequential, strict=True))
      # Negated, so that a NaN counts as too far apart.
      if not abs(ours - reference) <= tolerance(reference, step, layers) or not math.isfinite(ours)
  ]


def write_picture(
    path: pathlib.Path, pipelined: Sequence[float], sequential: Sequence[float], layers: int, title: str
) -> None:
  """Writes a PNG: both curves, and below them, on a logarithmic scale, their difference and the allowed `tolerance`."""
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  figure = Figure(figsize=(8, 6), layout="constrained")
  curves, gap = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
  curves.plot(sequential, color="tab:orange", linewidth=4, alpha=0.5, label="without a pipeline")
  curves.plot(pipelined, color="tab:blue", linewidth=1.5, label="pipeline")
  curves.set(ylabel="loss", title=title)
  curves.legend()
  differences = [abs(ours - reference) for ours, reference in zip(pipelined, sequential, strict=True)]
  allowed = [tolerance(loss, step, layers) for step, loss in enumerate(sequential)]
  gap.plot(differences, color="tab:red", label="difference")
  gap.plot(allowed, color="tab:gray", linestyle="--", label="allowed")
  gap.set(xlabel="step", ylabel="loss")
  gap.set_yscale("symlog", linthresh=EPSILON)  # logarithmic but with a zero, since most steps have the same loss
  gap.legend()
  figure.savefig(path, dpi=120)
