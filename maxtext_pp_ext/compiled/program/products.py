# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a program's matrix multiplications and convolutions. Pallas kernels have none here."""

import math
import re

import numpy as np

from maxtext_pp_ext.compiled.program import hlo


def dot_flops(computation: hlo.Computation, instruction: hlo.Instruction, *, padding: bool = True) -> float:
  """FLOPs of a dot or convolution, two per multiply-add; 0 for anything else.

  The TPU compiler writes dots as convolutions, some with a window that lies mostly on padding. Without multiplications
  with padding, the result is the FLOPs that the program needs.
  """
  if instruction.opcode == "dot":
    dims = instruction.attribute(r"lhs_contracting_dims=\{([^}]*)\}")
    lhs = _operand(computation, instruction, 0)
    contracted = math.prod(lhs.dims[int(i)] for i in dims.split(",") if i) if dims and lhs else 1
    return 2.0 * instruction.arrays[0].elements * contracted
  if instruction.opcode != "convolution":
    return 0.0
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
  operand, kernel = _operand(computation, instruction, 0), _operand(computation, instruction, 1)
  result = instruction.arrays[0]
  if not (labels and operand and kernel):
    return 2.0 * result.elements
  # Every dimension of the kernel except its output features is summed over.
  flops = 2.0 * result.elements * math.prod(d for label, d in zip(labels[2], kernel.dims, strict=True) if label != "o")
  return flops if padding else flops * _share_inside(instruction, labels, operand, kernel, result)


def _share_inside(
    instruction: hlo.Instruction, labels: re.Match[str], operand: hlo.Array, kernel: hlo.Array, result: hlo.Array
) -> float:
  """Share of a convolution's multiplications whose operand is neither padding nor a hole of a dilation."""
  window = instruction.attribute(r"window=\{([^}]*)\}") or ""
  fields = dict(field.split("=") for field in window.split())
  spatial = sorted(label for label in labels[2] if label.isdigit())

  def values(name: str, default: int) -> list[int]:
    """A number for each spatial dimension; of a padding that before it."""
    return [int(text.split("_")[0]) for text in fields[name].split("x")] if name in fields else [default] * len(spatial)

  strides, pads, holes, spread = values("stride", 1), values("pad", 0), values("lhs_dilate", 1), values("rhs_dilate", 1)
  share = 1.0
  for i, label in enumerate(spatial):
    size = operand.dims[labels[1].index(label)]
    taps, positions = kernel.dims[labels[2].index(label)], result.dims[labels[3].index(label)]
    at = np.arange(positions)[:, None] * strides[i] + np.arange(taps) * spread[i] - pads[i]
    inside = (at % holes[i] == 0) & (0 <= at) & (at < size * holes[i])
    share *= int(inside.sum()) / (positions * taps)
  return share


def _operand(computation: hlo.Computation, instruction: hlo.Instruction, index: int) -> hlo.Array | None:
  """The type of an operand, from the operand's text or from the instruction of its name."""
  if len(written := hlo.arrays_in(instruction.operands)) > index:
    return written[index]
  names = instruction.operand_names
  source = computation.by_name.get(names[index]) if len(names) > index else None
  return source.arrays[0] if source and source.arrays else None
