# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of Pallas kernels, from the lines that the TPU compiler prints for them."""

import numpy as np
import pytest

from maxtext_pp_ext.compiled.program import hlo
from maxtext_pp_ext.compiled.projection import kernels

BATCH, HEADS, LENGTH, WIDTH = 2, 16, 1024, 128
PAIRS = BATCH * HEADS * LENGTH * LENGTH * WIDTH


def splash(name, blocks):
  heads = f"bf16[{BATCH},{HEADS},{LENGTH},{WIDTH}]"
  call = hlo.Instruction(name=name, type=heads, opcode="custom-call", operands="", attributes="")
  mask = hlo.Array("s8", (1, blocks, blocks))
  wide = hlo.arrays_in(heads)[0]
  return kernels.kernel(call, [mask, mask, wide, wide, wide, hlo.Array("s32", (BATCH, LENGTH))])


@pytest.mark.parametrize(
    "name, products",
    [
        ("splash_mha_fwd_segmented_residuals.68", 2),
        ("splash_mha_dkv_segmented_no_residuals.3", 4),
        ("splash_mha_dq_segmented_no_residuals.3", 3),
    ],
)
def test_attention_multiplies_queries_with_keys_below_the_diagonal(name, products):
  found = splash(name, blocks=2)
  assert found.kind == "attention"
  assert found.flops == pytest.approx(products * 2 * PAIRS * 3 / 4)  # three of four blocks


def test_a_mask_of_one_block_masks_no_block():
  assert splash("splash_mha_fwd_residuals", blocks=1).flops == 2 * 2 * PAIRS


@pytest.mark.parametrize(
    "result, left, right",
    [
        ("bf16[512,256]", "bf16[512,64]", "bf16[8,64,256]"),
        ("bf16[512,64]", "bf16[512,256]", "bf16[8,64,256]"),
        ("bf16[8,64,256]", "bf16[64,512]", "bf16[512,256]"),
    ],
)
def test_a_grouped_product_multiplies_each_row_with_one_matrix(result, left, right):
  call = hlo.Instruction(name="gmm.1", type=result, opcode="custom-call", operands="", attributes="")
  operands = [hlo.Array("s32", (8,)), hlo.arrays_in(left)[0], hlo.arrays_in(right)[0]]
  found = kernels.kernel(call, operands)
  assert (found.kind, found.flops) == ("grouped product", 2 * 512 * 64 * 256)


def test_a_grouped_product_is_known_by_its_groups_and_computes_rows_that_hold_tokens_only():
  """As megablox in a re-traced program, which has lost its name; of 512 rows, 128 hold a token if routing is balanced."""
  matrices = hlo.arrays_in("bf16[512,64]")[0], hlo.arrays_in("bf16[2,64,256]")[0]
  vectors = [hlo.Array("s32", dims) for dims in ((), (3,), (65,), (65,), (1,))]
  call = hlo.Instruction(name="shard_map.4", type="bf16[512,256]", opcode="custom-call", operands="", attributes="")
  found = kernels.kernel(call, [*vectors, *matrices], filled={512: 128})
  assert (found.kind, found.flops) == ("grouped product", 2 * 128 * 64 * 256)
  assert found.bytes == 2 * (128 * 64 + 128 * 256 + 2 * 64 * 256) + 4 * (1 + 3 + 65 + 65 + 1)
  assert kernels.kernel(call, [*vectors[2:], *matrices]).kind == "other"


def test_any_other_kernel_moves_its_operands_and_results():
  call = hlo.Instruction(name="mine", type="f32[1024]", opcode="custom-call", operands="", attributes="")
  assert kernels.kernel(call, [hlo.Array("f32", (1024,))]) == kernels.Kernel(kind="other", flops=0.0, bytes=8192.0)


def test_a_mask_that_is_known_counts_its_blocks():
  """A sliding window: of 8 × 8 blocks of 128, each row has two, in a mask of [heads, 8, 2]."""
  heads = f"bf16[{BATCH},{HEADS},{LENGTH},{WIDTH}]"
  sizes = 'kernel_metadata={"xprof_metadata":"{\\"block_q\\": 128, \\"block_kv\\": 128}"}'
  call = hlo.Instruction(name="splash_mha_fwd_x", type=heads, opcode="custom-call", operands="", attributes=sizes)
  mask = np.ones((1, 8, 2), bool)
  mask[0, 0, 1] = False
  wide = hlo.arrays_in(heads)[0]
  assert kernels.kernel(call, [wide] * 3, lambda: mask).flops == 2 * 2 * PAIRS * 15 / 64


def test_a_causal_mask_of_wide_and_narrow_blocks_leaves_little_more_than_half():
  call = hlo.Instruction(name="splash_mha_fwd_x", type="bf16[1]", opcode="custom-call", operands="", attributes="")
  wide = hlo.arrays_in(f"bf16[{BATCH},{HEADS},{LENGTH},{WIDTH}]")[0]
  found = kernels.kernel(call, [hlo.Array("s8", (1, 64, 16)), wide, wide, wide])
  assert found.flops == pytest.approx(2 * 2 * PAIRS * 17 / 32)


def test_the_fused_backward_kernel_computes_all_five_products():
  heads = f"bf16[{BATCH},{HEADS},{LENGTH},{WIDTH}]"
  fused = '"xprof_metadata":"{\\"use_fused_bwd_kernel\\": true}"'
  of = lambda text: hlo.Instruction(
      name="splash_mha_dkv_x", type=heads, opcode="custom-call", operands="", attributes=text
  )
  wide = [hlo.arrays_in(heads)[0]] * 3
  assert kernels.kernel(of(fused), wide).flops == 5 / 4 * kernels.kernel(of(""), wide).flops
