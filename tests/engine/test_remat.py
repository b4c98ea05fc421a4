# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Under every remat policy, our pipelines keep the same values as MaxText's plain pipeline, and recompute as much.

Both are read from the programs before compilation. Both pipelines run T iterations of all stages, so their matrix
products, and the types [T, S, …] of the kept values, can be compared directly.
"""

from flax import linen as nn
from flax import nnx
import jax
from maxtext.configs import types
from maxtext.layers import nnx_decoders
import numpy as np
import pytest

from maxtext_pp_ext.engine.programs import operands
from maxtext_pp_ext.testing import parity
from tests.engine.common import build, dot_flops, gradient_program, residuals
from tests.marks import slow_but
from tests.parity.common import LAYERS

SHAPE = {"stages": 2, "repeats": 3, "microbatches": 4}
HOST = jax.memory.Space.Host
# RematPolicy, and what `get_remat_policy` knows beyond it.
ON_DEVICE = [
    *(policy.value for policy in types.RematPolicy if "offload" not in policy.value),
    "none",
    "minimal_flash",
    "minimal_with_context",
    "minimal_with_context_and_quantization",
    "minimal_with_quantization",
]
# In MaxText 0.2.5 its own pipelines fail with these: `save_from_both_policies` refuses policies that offload. The
# policy that saves the same names on the device, and how many of them Llama's layer has.
OFFLOADED = {"qkv_proj_offloaded": ("save_qkv_proj", 3), "minimal_offloaded": ("minimal", 6)}
CUSTOM = {
    "on the device": {"query_proj": "device", "context": "device", "mlpwo": "device"},
    "layer inputs offloaded": {"decoder_layer_input": "offload"},
    "mixed": {"decoder_layer_input": "offload", "query_proj": "device", "out_proj": "offload", "mlpwi_0": "device"},
}


def kept(built):
  """Shape, dtype and memory space of the values kept per iteration, sorted."""
  return sorted((aval.shape, aval.dtype.name, aval.memory_space.name) for aval in residuals(built))


def check_same(**keys):
  ours, plain = build(pipeline_impl="circular_bsw", **SHAPE, **keys), build(pipeline_impl="host", **SHAPE, **keys)
  assert kept(ours) == kept(plain)
  assert dot_flops(gradient_program(ours)) == dot_flops(gradient_program(plain)) > 0


@pytest.mark.filterwarnings("ignore:Scan layers can introduce overhead")
def test_what_products_of_a_layer_compute_is_kept_where_they_write_it(monkeypatch):
  found = []
  own = operands.of_products
  monkeypatch.setattr(operands, "of_products", lambda *args: found.append(own(*args)) or found[-1])
  kept(build(pipeline_impl="circular_bsw", remat_policy="minimal", **SHAPE))
  assert found and all(sum(of_stage) >= 3 for of_stage in found), "two of the MLP, and the values"


@pytest.mark.parametrize("policy", slow_but(["full", "minimal_with_context"], ON_DEVICE))
def test_a_policy_keeps_and_recomputes_what_it_does_in_the_hosts_plain_pipeline(policy):
  check_same(remat_policy=policy)


@pytest.mark.parametrize("locations", slow_but(["mixed"], CUSTOM))
def test_custom_locations_mean_what_they_do_in_the_hosts_plain_pipeline(locations):
  check_same(remat_policy="custom", **locations)


VARIATIONS = (
    {"layers_per_stage": 2},
    {"layers_per_stage": 2, "scan_layers_per_stage": True},
    {"pipeline_delay_activation_forwarding": True},
    {"dtype": "bfloat16"},
)


@pytest.mark.parametrize(
    "keys", slow_but(["layers_per_stage, scan_layers_per_stage"], {", ".join(keys): keys for keys in VARIATIONS})
)
def test_a_policy_keeps_and_recomputes_as_in_the_hosts_plain_pipeline_with(keys):
  check_same(remat_policy="save_qkv_proj", **keys)


@pytest.mark.parametrize("policy", slow_but(["minimal_offloaded"], list(OFFLOADED)))
def test_an_offloading_policy_keeps_in_host_memory_what_its_counterpart_keeps_on_the_device(policy):
  counterpart, names = OFFLOADED[policy]
  ours = build(pipeline_impl="circular_bsw", remat_policy=policy, **SHAPE)
  plain = build(pipeline_impl="host", remat_policy=counterpart, **SHAPE)
  assert sorted(key[:2] for key in kept(ours)) == sorted(key[:2] for key in kept(plain))
  assert sum(aval.memory_space == HOST for aval in residuals(ours)) == names
  assert dot_flops(gradient_program(ours)) == dot_flops(gradient_program(plain))


def test_without_a_policy_for_layer_inputs_nothing_but_the_stages_inputs_is_kept():
  """In this case MaxText's plain pipeline keeps its buffers of all microbatches at each iteration."""
  ours = build(pipeline_impl="circular_bsw", remat_policy="custom", decoder_layer_input="remat", **SHAPE)
  full = build(pipeline_impl="circular_bsw", remat_policy="full", **SHAPE)
  assert kept(ours) == kept(full)


@pytest.mark.slow
def test_saving_more_recomputes_less():
  flops = [
      dot_flops(gradient_program(build(pipeline_impl="circular_bsw", remat_policy=policy, **SHAPE)))
      for policy in ("full", "save_qkv_proj", "minimal")
  ]
  assert flops[0] > flops[1] > flops[2]


def test_without_remat_of_iterations_no_matrix_product_is_recomputed():
  keys = {"set_remat_policy_on_pipeline_iterations": False, **SHAPE}
  ours, plain = build(pipeline_impl="circular_bsw", **keys), build(pipeline_impl="host", **keys)
  assert dot_flops(gradient_program(ours)) == dot_flops(gradient_program(plain))


# As in tests/parity/test_layers.py.
BOUND = 1e-5


POLICIES = {
    "minimal": {},
    "minimal_offloaded": {},
    "custom": {"decoder_layer_input": "offload", "query_proj": "device", "layers_per_stage": 2},
}


# Quick ones are in tests/parity/test_policies.py.
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_under_a_policy_equal_those_of_a_loop_over_the_layers(policy):
  built = build(pipeline_impl="circular_bsw", remat_policy=policy, **SHAPE, **POLICIES[policy])
  reference = parity.reference(built.module, LAYERS["llama"], built.config, built.batch)
  result = parity.compare(built.module, reference, built.batch, built.mesh, built.config.logical_axis_rules)
  result.check(BOUND)


def flops_and_results(layer, **keys):
  """FLOPs of matrix products, and all results and gradients, of a pipeline with two layers in a stage."""
  built = build(layer, pipeline_impl="circular_bsw", **SHAPE, **{"layers_per_stage": 2, **keys})
  run, params = parity.function_of(built.module)
  with jax.set_mesh(built.mesh), nn.logical_axis_rules(built.config.logical_axis_rules):
    found = parity.with_gradients(run, built.batch)(params, built.batch.inputs)
  return dot_flops(gradient_program(built)), found


def with_remat(cls, times=1):
  """A class of layers or stages that are rematerialised as a whole."""
  call = cls.__call__
  for _ in range(times):
    call = nnx.remat(call, static_argnums=(4, 5), graph=True, graph_updates=True)
  return type(cls)(cls.__name__, (cls,), {"__call__": call})


# Where a policy keeps the inputs of layers, JAX itself makes one of two checkpoints. This one keeps nothing of them.
NO_INPUTS = {"remat_policy": "custom", "decoder_layer_input": "remat"}
OF_RUNS = {"no inputs": NO_INPUTS, "save_qkv_proj": {"remat_policy": "save_qkv_proj"}}
# What is rematerialised already, how often, and whether a stage scans over its layers.
ALREADY = {
    "each layer": ("layer", 1, False),
    "each layer twice": ("layer", 2, False),
    "each layer of a scan": ("layer", 1, True),
    "the stage": ("NNXSequentialPipelineStage", 1, False),
    "the stage that scans": ("NNXScannedPipelineStage", 1, True),
}


@pytest.mark.parametrize("what, times, scanned", slow_but(["each layer of a scan"], ALREADY, spread=True))
@pytest.mark.parametrize("policy", slow_but(["no inputs"], OF_RUNS))
def test_what_is_rematerialised_already_is_recomputed_once_under_the_runs_policy(
    monkeypatch, what, times, scanned, policy
):
  keys = {"scan_layers_per_stage": scanned, **policy}
  expected, results = flops_and_results("llama", **keys)
  if what == "layer":
    monkeypatch.setitem(LAYERS, "llama", with_remat(LAYERS["llama"], times))
  else:
    monkeypatch.setattr(nnx_decoders, what, with_remat(getattr(nnx_decoders, what), times))
  flops, found = flops_and_results("llama", **keys)
  assert flops == expected
  jax.tree.map(np.testing.assert_array_equal, found, results)


@pytest.mark.slow
def test_a_run_that_asks_for_it_recomputes_each_layer_for_itself_once(monkeypatch):
  keys = {"set_remat_policy_on_layers_per_stage": True, "layers_per_stage": 2, **NO_INPUTS}
  flops = []
  for times in (0, 1, 2):
    monkeypatch.setitem(LAYERS, "with remat", with_remat(LAYERS["llama"], times))
    flops.append(dot_flops(gradient_program(build("with remat", pipeline_impl="circular_bsw", **SHAPE, **keys))))
  assert flops[0] < flops[1] == flops[2]
