# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of Pallas kernels, of which the compiler estimates no cycles, from their names and operands.

Splash attention (jax.experimental.pallas.ops.tpu.splash_attention) multiplies matrices of a query's and a key's length,
in blocks; its mask says which blocks it leaves out. A mask that is not known is taken to be causal. Grouped matrix
multiplication (megablox) multiplies each row with one expert's matrix, and leaves out rows that hold no token. Any other
kernel is taken to read and write its operands and results once.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import math
import re

import numpy as np

from maxtext_pp_ext.compiled.program import hlo
from maxtext_pp_ext.hardware import kernels

_GROUPED = ("gmm", "megablox", "ragged_dot", "grouped_matmul")
_BUFFERS = 2  # of a pipeline's window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """One execution."""

  kind: str  # one of `hardware.kernels`
  flops: float  # two per multiply-add, of the blocks that are not masked
  bytes: float  # read and written


def kernel(
    instruction: hlo.Instruction,
    operands: Sequence[hlo.Array],
    blocks: Callable[[], np.ndarray | None] = lambda: None,
    filled: Mapping[int, int] | None = None,
) -> Kernel:
  """What a `tpu_custom_call` does.

  Args:
    instruction: the custom call.
    operands: the types of its operands.
    blocks: of an attention kernel the blocks that its mask leaves, bool [heads, blocks of queries, blocks of keys], or
      None if they are not known.
    filled: of buffers of tokens for experts, the number of rows -> of those that hold a token if routing is balanced.
  """
  moved = float(sum(array.bytes for array in (*operands, *instruction.arrays)))
  name = instruction.name + instruction.op_name
  if any(word in name for word in kernels.NAMES_OF_ATTENTION):
    phase = next((each for each in ("dkv", "dq") if f"_{each}" in name), "fwd")
    flops = _attention_flops(instruction.attributes, phase, operands, blocks())
    return Kernel(kind=kernels.ATTENTION, flops=flops, bytes=moved)
  if any(word in name for word in _GROUPED) or _has_groups(instruction, operands):
    filled, groups = filled or {}, _groups(operands)
    moved = sum(_filled_bytes(array, filled, groups) for array in (*operands, *instruction.arrays))
    return Kernel(kind=kernels.GROUPED_PRODUCT, flops=_grouped_flops(instruction, operands, filled), bytes=moved)
  return Kernel(kind=kernels.OTHER, flops=0.0, bytes=moved)


def _attention_flops(attributes: str, phase: str, operands: Sequence[hlo.Array], blocks: np.ndarray | None) -> float:
  wide = [array for array in operands if array.is_floating and len(array.dims) >= 3 and array.elements > 1]
  if len(wide) < 3:
    return 0.0
  query, key, value = (array.dims for array in wide[:3])
  pairs = query[-2] * key[-2] * _share_not_masked(operands)
  if blocks is not None and blocks.ndim == 3:
    block = dict(re.findall(r"(block_\w+)\\*\": (\d+)", attributes))
    suffix = "" if phase == "fwd" else f"_{phase}"
    rows = int(block.get(f"block_q{suffix}", query[-2] // blocks.shape[1]))
    columns = int(block.get(f"block_kv{suffix}", key[-2] // blocks.shape[2]))
    # Masks of several heads have a dimension for them; queries of a head are computed with that head's mask.
    pairs = blocks.sum() / blocks.shape[0] * rows * columns
  products = kernels.SPLASH[phase]
  if phase == "dkv" and re.search(r"use_fused_bwd_kernel\\*\": true", attributes):
    products = kernels.SPLASH_FUSED_BACKWARD
  return math.prod(query[:-2]) * products * (query[-1] + value[-1]) * pairs


def _share_not_masked(operands: Sequence[hlo.Array]) -> float:
  """Of blocks: the lower triangle with the diagonal, for a causal mask of so many blocks of queries and of keys."""
  mask = next((array for array in operands if array.dtype == "s8" and len(array.dims) >= 2), None)
  return 0.5 if mask is None else (1 + 1 / min(mask.dims[-2:])) / 2


def _groups(operands: Sequence[hlo.Array]) -> set[int]:
  """The numbers of groups that a kernel may have: one of its operands tells where each begins and the last one ends."""
  return {array.dims[0] - 1 for array in operands if array.dtype == "s32" and len(array.dims) == 1 and array.dims[0] > 1}


def _has_groups(instruction: hlo.Instruction, operands: Sequence[hlo.Array]) -> bool:
  """Whether the kernel gets where each group of rows begins, as megablox does, whose name may be lost."""
  vectors = [array for array in operands if array.dtype == "s32" and len(array.dims) == 1]
  matrices = {array.dims[0] for array in (*operands, *instruction.arrays) if len(array.dims) == 3}
  groups = _groups(operands)
  return len(vectors) >= 3 and any(each in groups or each / _BUFFERS in groups for each in matrices)


def _filled_bytes(array: hlo.Array, filled: Mapping[int, int], groups: Collection[int]) -> float:
  """The bytes that are read or written.

  Of a buffer [rows, columns] the rows that hold a token; of the matrices of a window, [buffers · groups, k, n], those of
  one buffer (`engine/programs/one_of.py`); of any other array all bytes.
  """
  if len(array.dims) == 3 and array.dims[0] not in groups and array.dims[0] / _BUFFERS in groups:
    return array.bytes / _BUFFERS
  rows = next((dim for dim in array.dims if dim in filled), 1) if len(array.dims) == 2 else 1
  return array.bytes * filled.get(rows, rows) / rows


def _grouped_flops(instruction: hlo.Instruction, operands: Sequence[hlo.Array], filled: Mapping[int, int]) -> float:
  """Rows × columns × contracted: [m, k] × [groups, k, n] → [m, n], or for the weights' gradient [k, m] × [m, n]."""
  indices = ("s32", "u32", "pred")
  matrices = [array for array in operands if len(array.dims) >= 2 and array.elements > 1 and array.dtype not in indices]
  if len(matrices) < 2:
    return 0.0
  result = max(instruction.arrays, key=lambda array: array.elements)
  if len(result.dims) == 3:  # [groups, k, n]: the rows are contracted
    _, k, n = result.dims
    rows = matrices[0].elements // k
    return 2.0 * filled.get(rows, rows) * k * n
  rows, columns = result.dims[-2:]
  weights = next((array for array in matrices if len(array.dims) == 3), matrices[1])
  return 2.0 * filled.get(rows, rows) * columns * (math.prod(weights.dims[-2:]) // columns)
