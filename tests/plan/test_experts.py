# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which devices can share experts, and what experts cost, by the keys of a run."""

import dataclasses
import types
from typing import Any

from jax.sharding import AbstractMesh
import pytest

from maxtext_pp_ext.plan.blocks import Again
from maxtext_pp_ext.plan.experts import experts, most_expert_parallelism

KEYS: dict[str, Any] = {
    "num_experts": 8,
    "sparse_matmul": True,
    "use_ring_of_experts": False,
    "capacity_factor": -1.0,
    "logical_axis_rules": [["activation_batch", ["data", "fsdp", "expert"]], ["exp", "expert"]],
    "shard_exp_on_fsdp": False,
    "use_2d_fsdp_sharding": False,
    "context_sharding": "context",
    "dcn_expert_parallelism": 1,
    "compile_xla_flags": "",
}


@pytest.mark.parametrize(
    "more, expert_parallelism",
    [({}, 8), ({"sparse_matmul": False, "capacity_factor": 1.25}, 8), ({"dcn_expert_parallelism": 2}, 4)],
)
def test_all_experts_can_be_on_devices_of_their_own(more, expert_parallelism):
  assert most_expert_parallelism(types.SimpleNamespace(**KEYS | more)) == expert_parallelism


@pytest.mark.parametrize(
    "more",
    [
        {"num_experts": 1},
        {"sparse_matmul": False},  # dense without a capacity
        {"use_ring_of_experts": True},
        {"dcn_expert_parallelism": 3},
        {"shard_exp_on_fsdp": True},
        {"use_2d_fsdp_sharding": True},
        {"context_sharding": "expert"},
        {"logical_axis_rules": [["exp", ["context", "expert"]]]},
        {"logical_axis_rules": [["embed", "fsdp"]]},
    ],
    ids=str,
)
def test_where_another_axis_shards_experts_or_formulas_are_missing_none_are_shared(more):
  assert most_expert_parallelism(types.SimpleNamespace(**KEYS | more)) == 1


def test_what_is_not_dispatched_again_is_not_sent_again_and_takes_as_much_memory():
  keys = {"dtype": "bfloat16", "emb_dim": 16, "moe_mlp_dim": 24, "mlp_dim": 24, "mlp_bias": False}
  keys |= {"num_experts_per_tok": 2, "ragged_buffer_factor": -1.0}
  config, mesh = types.SimpleNamespace(**KEYS | keys), AbstractMesh((4,), ("expert",))
  rows, token = 200, 256 * 2  # 16 values, padded
  none, dispatch, both = (
      experts(config, mesh, 100, dict.fromkeys(again, 1.0))
      for again in ((), (Again.DISPATCHES,), (Again.DISPATCHES, Again.COMBINES))
  )
  assert (dispatch.routed - none.routed, both.routed - dispatch.routed) == (rows * token, rows * token)
  # The buffers that receive tokens have room for all that may come.
  assert (dispatch.sent - none.sent, both.sent - dispatch.sent) == (4 * rows * token, rows * token)
  assert none.held == dispatch.held == both.held
  assert none.flops == 9 * 2 * rows * 16 * 24
  # Backward of both exchanges receives into zeros, whatever is computed again.
  assert none.filled == both.filled == (4 * rows + rows) * token
  assert experts(config, AbstractMesh((1,), ("expert",)), 100).filled == 0


def test_parts_of_a_microbatch_hold_less_than_all_of_it_and_more_than_their_share():
  keys = {"dtype": "bfloat16", "emb_dim": 16, "moe_mlp_dim": 24, "mlp_dim": 24, "mlp_bias": False}
  keys |= {"num_experts_per_tok": 2, "ragged_buffer_factor": -1.0, "remat_policy": "full"}
  mesh = AbstractMesh((4,), ("expert",))
  of = lambda **more: experts(types.SimpleNamespace(**KEYS | keys | more), mesh, 100)
  whole, one, two = (
      of(use_batch_split_schedule=split, batch_split_factor=parts) for split, parts in ((False, 2), (True, 1), (True, 2))
  )
  room, token, hidden = 800, 256 * 2, 24 * 2
  assert whole == one
  assert whole.held - two.held == room / 2 * (1 * token + 2 * hidden)  # of the part that waits
  assert dataclasses.replace(two, held=whole.held) == whole
  keys["compile_xla_flags"] = "--xla_tpu_enable_async_ragged_all_to_all=true"
  assert of().held - whole.held == room * token  # one buffer more, which arrives meanwhile
