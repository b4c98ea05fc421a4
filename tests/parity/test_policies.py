# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a remat policy keeps, offloads or computes again changes no gradient, in pipelines and windows.

Each named policy of MaxText, and `custom` with each activation of Llama's layer on the device and on the host. Pipelines
are compared with a loop over their layers, windows with MaxText's scan over the layers, both in float32.
"""

import math

import jax
import jax.numpy as jnp
import pytest

from maxtext_pp_ext.engine import buffers
from maxtext_pp_ext.engine.programs import offloaded, operands, stage
from maxtext_pp_ext.host.models import decoder_layers
from maxtext_pp_ext.pipelines.circular import CircularBswPipeline
from maxtext_pp_ext.testing import parity
from tests.engine.common import build, Built, dot_flops, gradient_program
from tests.engine.test_remat import BOUND, OFFLOADED, ON_DEVICE
from tests.marks import slow_but
from tests.parity import windows
from tests.parity.blocks import PIPELINED
from tests.parity.common import LAYERS

NAMES = (
    *("decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "out_proj"),
    *("mlpwi_0", "mlpwi_1", "mlpwo"),
)
# Fused projections have names of their own.
FUSED = {"qkv_proj": {"fused_qkv": True}, "mlpwi": {"fused_mlp": True}}
CUSTOM = {
    "nothing": {"decoder_layer_input": "remat"},
    **{f"{name} on the {place}": {name: place} for name in (*NAMES, *FUSED) for place in ("device", "offload")},
    "what Llama 3 70B keeps": dict.fromkeys(("query_proj", "key_proj", "value_proj", "context", "mlpwi_0"), "device"),
    "all on the device": dict.fromkeys(NAMES, "device"),
    "all offloaded": dict.fromkeys(NAMES, "offload"),
}
POLICIES = {
    **{policy: {"remat_policy": policy} for policy in (*ON_DEVICE, *OFFLOADED)},
    **{
        f"custom, {name}": {"remat_policy": "custom"} | places | FUSED.get(next(iter(places)), {})
        for name, places in CUSTOM.items()
    },
}
LAYOUTS = {
    "2 stages": {"stages": 2, "repeats": 3, "microbatches": 4},
    "2 stages, D = 2": {"stages": 2, "repeats": 2, "microbatches": 4, "pipeline_delay_activation_forwarding": True},
    "3 stages": {"stages": 3, "repeats": 2, "microbatches": 3, "microbatch_size": 2},
    "4 stages": {"stages": 4, "repeats": 2, "microbatches": 4},
    # As many layers as stages: residuals of a scan over layers have the layers' axis first.
    "3 stages of 3 scanned layers": {
        **{"stages": 3, "repeats": 2, "microbatches": 3, "microbatch_size": 2},
        **{"layers_per_stage": 3, "scan_layers_per_stage": True},
    },
    "2 stages of 2 layers": {"stages": 2, "repeats": 2, "microbatches": 2, "layers_per_stage": 2},
}
CASES = {f"{policy}, {layout}": (policy, layout) for policy in POLICIES for layout in LAYOUTS}


def check(**keys):
  """Compares a pipeline of Llama's layers with a loop over them."""
  built = build(pipeline_impl="circular_bsw", **keys)
  reference = parity.reference(built.module, LAYERS["llama"], built.config, built.batch)
  result = parity.compare(built.module, reference, built.batch, built.mesh, built.config.logical_axis_rules)
  result.check(BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("policy, layout", CASES.values(), ids=CASES.keys())
def test_a_pipeline_equals_a_loop_over_its_layers(policy, layout):
  check(**LAYOUTS[layout], **POLICIES[policy])


@pytest.mark.parametrize("layout", slow_but(["2 stages, D = 2"], ["2 stages", "2 stages, D = 2", "4 stages"]))
def test_what_is_offloaded_may_have_any_order_in_the_hosts_memory(layout, monkeypatch):
  """Attention on CPUs reads nothing in another order than an array's own, as kernels on TPUs do."""
  last_first = lambda jaxpr, first, count: tuple(
      (0, v.aval.ndim - 1, *range(1, v.aval.ndim - 1)) if v.aval.ndim > 1 else (0,)
      for v in jaxpr.invars[first : first + count]
  )
  moved = []
  own = offloaded.in_orders
  monkeypatch.setattr(operands, "residual_orders", last_first)
  monkeypatch.setattr(offloaded, "in_orders", lambda *args: moved.append((args[0], own(*args))) or moved[-1][1])
  check(**LAYOUTS[layout], **POLICIES["custom, all offloaded"])
  assert any([v.shape for v in before.out_avals] != [v.shape for v in after.out_avals] for before, (after, *_) in moved)


# Quick ones are those that keep or offload less in their first layers, below.
@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [-1, 2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_window_equals_the_scan(policy, microbatches):
  if POLICIES[policy].get("fused_qkv"):
    microbatches = min(microbatches, 2)  # fused_qkv needs a row of each microbatch on each of the devices
  windows.compare(["circular_bsw"], num_pipeline_microbatches=microbatches, **POLICIES[policy])


# Layouts with one phase and with several, N at the borders of phases and within them.
IN_PARTS = {
    "2 stages, 5 of 13": ("2 stages", 5, "mlpwi_0,context"),
    "2 stages, 12 of 13": ("2 stages", 12, ""),
    "2 stages, all 13": ("2 stages", 13, "mlpwi_0"),
    "2 stages, D = 2, 4 of 10": ("2 stages, D = 2", 4, ""),
    "3 stages, 1 of 8": ("3 stages", 1, "query_proj"),
    "4 stages, 8 of 11": ("4 stages", 8, ""),
    "one repeat, 2 of 5": ("one repeat", 2, "mlpwi_0"),
    "3 stages of 3 scanned layers, 4 of 8": ("3 stages of 3 scanned layers", 4, ""),
    "2 stages of 2 layers, 3 of 5": ("2 stages of 2 layers", 3, "mlpwi_1"),
    "unrolled, 3 of 5": ("unrolled", 3, "mlpwi_1"),
}
ONE_REPEAT = {"stages": 2, "repeats": 1, "microbatches": 4}
UNROLLED = LAYOUTS["2 stages of 2 layers"] | {"scan_pipeline_iterations": False, "scan_pipeline_repeats": False}


@pytest.mark.parametrize(
    "policy",
    slow_but(
        ["custom, all on the device"], ["minimal_with_context", "custom, all on the device", "custom, all offloaded"]
    ),
)
@pytest.mark.parametrize("layout, count, names", slow_but(["2 stages, 5 of 13"], IN_PARTS, spread=True))
def test_a_pipeline_that_keeps_less_in_its_first_iterations_equals_a_loop_over_its_layers(
    layout, count, names, policy, monkeypatch
):
  """What is kept of a bubble is NaN."""
  monkeypatch.setattr(CircularBswPipeline, "bubble_fill", math.nan)
  keys = LAYOUTS | {"one repeat": ONE_REPEAT, "unrolled": UNROLLED}
  remat = {"pipeline_remat_iterations": count, "pipeline_remat_tensors": names}
  check(**keys[layout], **POLICIES[policy], **remat)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["mlpwi_0", ""])
@pytest.mark.parametrize("microbatches, count", [(-1, 1), (-1, 2), (-1, 3), (2, 3), (4, 5)])
def test_a_window_that_keeps_less_of_its_first_layers_equals_the_scan(microbatches, count, names):
  remat = {"pipeline_remat_iterations": count, "pipeline_remat_tensors": names}
  windows.compare(
      ["circular_bsw"], num_pipeline_microbatches=microbatches, **POLICIES["custom, all on the device"], **remat
  )


@pytest.mark.parametrize("microbatches, count", slow_but([(-1, 3)], [(-1, 1), (-1, 3), (-1, 5), (2, 5)], spread=True))
def test_a_window_that_offloads_less_of_its_first_layers_equals_the_scan(microbatches, count, monkeypatch):
  """What is sent before there is anything to send is NaN."""
  nothing = lambda shape, dtype: jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)
  monkeypatch.setattr(buffers, "_empty", nothing)
  windows.compare(
      ["circular_bsw"],
      layers=6,
      num_pipeline_microbatches=microbatches,
      **POLICIES["custom, all offloaded"] | {"query_proj": "device", "mlpwi_1": "device"},
      pipeline_remat_iterations=count,
      pipeline_remat_tensors="mlpwi_0,mlpwi_1",
  )


@pytest.mark.parametrize("keys", [{}, {"decoder_layer_input": "offload"}, {"remat_policy": "minimal_offloaded"}])
def test_all_that_a_policy_offloads_waits_for_the_next_iteration(keys, monkeypatch):
  traced = []
  own = stage.StageProgram.trace
  monkeypatch.setattr(
      stage.StageProgram, "trace", lambda *args, **given: traced.append(own(*args, **given)) or traced[-1]
  )
  given = {"remat_policy": "custom", "query_proj": "offload", "mlpwi_0": "device"} | keys
  windows.program(windows.build(windows.make_config(pipeline_impl="circular_bsw", **given)))
  program, *_ = traced
  on_host = tuple(aval.memory_space == jax.memory.Space.Host for aval in program.saved_avals)
  assert any(on_host) and program.saved_to_send == on_host


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2 stages", "2 stages, D = 2", "3 stages", "4 stages"])
@pytest.mark.parametrize("policy", ["minimal_offloaded", "custom, all on the device"])
def test_what_is_kept_of_a_bubble_reaches_nothing(policy, layout, monkeypatch):
  """It is NaN."""
  monkeypatch.setattr(CircularBswPipeline, "bubble_fill", math.nan)
  check(**LAYOUTS[layout], **POLICIES[policy])


OF_BLOCKS = ("minimal", "save_qkv_proj", "custom, what Llama 3 70B keeps", "custom, all on the device")


@pytest.mark.parametrize("policy", slow_but(["custom, all on the device"], OF_BLOCKS))
@pytest.mark.parametrize("case", slow_but(["llama2"], {case.name: case for case in PIPELINED if not case.experts}))
def test_backward_recomputes_of_each_block_what_jax_does_with_a_checkpoint_around_its_stage(case, policy):
  """MaxText's plain pipeline is a scan over `jax.checkpoint`: JAX itself decides what it keeps and computes again."""
  flops = []
  for implementation in ("circular_bsw", "host"):
    config = case.config(
        stages=2, repeats=case.repeats(2), microbatches=4, pipeline_impl=implementation, **POLICIES[policy]
    )
    mesh = parity.mesh_of(config)
    module = decoder_layers.pipeline(config, mesh, implementation)
    flops.append(dot_flops(gradient_program(Built(config, mesh, module, parity.Batch.random(config)))))
  assert flops[0] == flops[1] > 0
