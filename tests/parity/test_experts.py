# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every block with experts on a mesh with two devices for the experts, by each way in which tokens get to their experts.

XLA has no ragged all-to-all on CPUs, which MaxText's default dispatch needs. Here it gathers all that devices send.
Left out is the ring of experts.
"""

import jax
from jax.interpreters import mlir
import jax.numpy as jnp
import pytest

from maxtext_pp_ext.engine.programs.partial import GradientProgram
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity import test_windows
from tests.parity.blocks import PIPELINED
from tests.trainer.cases import IMPLEMENTATIONS

CASES = {case.name: case for case in PIPELINED if case.experts}
EXPERT_AXIS = {"ici_expert_parallelism": 2}
# MaxText counts tokens against an expert's capacity in each sequence, so a microbatch drops those that the batch drops.
CAPACITY = {"capacity_factor": 1.0}


def check(case, stages, *, implementations=IMPLEMENTATIONS, layers_on_the_mesh=False, **keys):
  config = case.config(stages=stages, repeats=case.repeats(stages), microbatches=2 * stages, **EXPERT_AXIS, **keys)
  mesh = parity.mesh_of(config)
  found = parity.assert_pipeline_parity(
      None,
      config,
      implementations=implementations,
      mesh=mesh,
      reference_mesh=mesh if layers_on_the_mesh else None,
      tolerance=case.amplification * parity.tolerance(config),
  )
  for result in found.values():
    assert any("moe_lb_loss" in name for name in result.sown)
    assert any("moe_bias_updates" in name for name in result.sown) == ("updates of biases" in case.experts)


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, axis_index_groups
):
  """As `jax.lax.ragged_all_to_all` specifies, by gathers."""
  gathered = [jax.lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets, recv_sizes)]
  operands, *numbers = gathered
  starts, sizes, places = (x[:, jax.lax.axis_index(axis_name)] for x in numbers[:3])
  rows = jnp.arange(output.shape[0])
  from_sender = (rows[:, None] >= places) & (rows[:, None] < places + sizes)
  sender, arrives = jnp.argmax(from_sender, axis=1), from_sender.any(axis=1)
  values = operands[sender, jnp.where(arrives, starts[sender] + rows - places[sender], 0)]
  return jnp.where(arrives.reshape(-1, *(1,) * (output.ndim - 1)), values, output)


def primitive():
  """The primitive of `jax.lax.ragged_all_to_all`."""
  exchange = lambda x: jax.lax.ragged_all_to_all(x, x, *[jnp.zeros((1,), jnp.int32)] * 4, axis_name="x")
  jaxpr = jax.make_jaxpr(exchange, axis_env=[("x", 1)])(jnp.zeros((1,)))
  return next(eqn.primitive for eqn in jaxpr.eqns if eqn.primitive.name == "ragged_all_to_all")


mlir.register_lowering(primitive(), mlir.lower_fun(ragged_all_to_all, multiple_results=False), platform="cpu")


TILED = ("batch_seq", "embed_dim", "mlp_dim")
# Of the kernel of grouped products, which is interpreted on CPUs.
TILES = {f"{w}_tile_{kind}_{dim}": 8 for w in ("wi", "wo") for kind in ("fwd", "dlhs", "drhs") for dim in TILED}
DISPATCH = {"sparse_matmul": True, "megablox": True, **TILES}
# With both, weights are transferred while experts compute.
FLAGS = ("xla_tpu_enable_async_ragged_all_to_all", "xla_tpu_enable_sparse_core_collective_offload_all_gather")
DISPATCH["compile_xla_flags"] = " ".join(f"--{flag}=true" for flag in FLAGS)


# Each with all implementations, and the quick one with one.
QUICK = "mixtral-3-circular_bsw"
DISPATCHED = {QUICK: ("mixtral", 3, ["circular_bsw"])} | {
    f"{name}-{stages}": (name, stages, IMPLEMENTATIONS) for name in CASES for stages in (2, 3, 4)
}


@pytest.mark.parametrize("name, stages, implementations", slow_but([QUICK], DISPATCHED, spread=True))
def test_maxtexts_default_dispatch_and_its_kernels_compute_what_they_do_without_a_pipeline(name, stages, implementations):
  check(CASES[name], stages, implementations=implementations, layers_on_the_mesh=True, **DISPATCH)


# Each part of the tokens has a load-balance loss, and two microbatches have other parts than the batch.
@pytest.mark.slow
@pytest.mark.parametrize("microbatches, loss", [(-1, {}), (2, {"load_balance_loss_weight": 0.0})])
@pytest.mark.parametrize("name", CASES)
def test_maxtexts_default_dispatch_and_its_kernels_compute_in_a_window_what_they_do_in_its_scan(name, microbatches, loss):
  keys = {"num_pipeline_microbatches": microbatches, **EXPERT_AXIS, **DISPATCH, **loss}
  test_windows.check(CASES[name], IMPLEMENTATIONS, scan_on_the_mesh=True, **keys)


# Qwen3-Next's layers of a stage can be scanned over. Then their exchanges are within the scan.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("qwen3_next: scan_layers")])
def test_weights_that_are_gathered_in_steps_behind_an_exchange_are_those_of_the_scan(monkeypatch, name):
  test_windows.gather_in_steps(monkeypatch, ("fsdp", (2, 2)), ("expert", (2,)))
  programs, plan = [], GradientProgram.plan
  monkeypatch.setattr(
      GradientProgram, "plan", lambda *args, **given: programs.append(plan(*args, **given)) or programs[-1]
  )
  keys = {"num_pipeline_microbatches": -1, **EXPERT_AXIS, **DISPATCH}
  test_windows.check(CASES[name], ["circular_bsw"], scan_on_the_mesh=True, **keys)
  assert any(each.gathers_after is not None and each.exchanges_in is not None for each in programs)


# A quick one, a window, is in test_windows.py.
@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_no_token_is_dropped_and_all_is_as_without_a_pipeline(name, stages):
  check(CASES[name], stages)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens_are_dropped_as_without_a_pipeline(name, stages):
  check(CASES[name], stages, **CAPACITY)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, CAPACITY], ids=["dropless", "capacity"])
@pytest.mark.parametrize("name", CASES)
def test_a_window_over_the_layers_equals_the_scan_over_them(name, keys):
  test_windows.check(CASES[name], IMPLEMENTATIONS, num_pipeline_microbatches=2, **EXPERT_AXIS, **keys)
