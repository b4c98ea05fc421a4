# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Under every remat policy, our pipelines keep the same values as MaxText's plain pipeline, and recompute as much.

Both are read from the programs before compilation. Both pipelines run T iterations of all stages, so their matrix
products, and the types [T, S, …] of the kept values, can be compared directly.
"""

import jax
from maxtext.configs import types
import pytest

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
@pytest.mark.parametrize("policy", ON_DEVICE)
def test_a_policy_keeps_and_recomputes_what_it_does_in_the_hosts_plain_pipeline(policy):
  check_same(remat_policy=policy)


@pytest.mark.parametrize("locations", CUSTOM.values(), ids=CUSTOM.keys())
def test_custom_locations_mean_what_they_do_in_the_hosts_plain_pipeline(locations):
  check_same(remat_policy="custom", **locations)


@pytest.mark.parametrize(
    "keys",
    [
        {"layers_per_stage": 2},
        {"layers_per_stage": 2, "scan_layers_per_stage": True},
        {"pipeline_delay_activation_forwarding": True},
        {"dtype": "bfloat16"},
    ],
    ids=", ".join,
)
def test_a_policy_keeps_and_recomputes_as_in_the_hosts_plain_pipeline_with(keys):
  check_same(remat_policy="save_qkv_proj", **keys)


@pytest.mark.parametrize("policy", OFFLOADED)
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


@pytest.mark.parametrize("policy", slow_but(["custom"], POLICIES.keys()))
def test_gradients_under_a_policy_equal_those_of_a_loop_over_the_layers(policy):
  built = build(pipeline_impl="circular_bsw", remat_policy=policy, **SHAPE, **POLICIES[policy])
  reference = parity.reference(built.module, LAYERS["llama"], built.config, built.batch)
  result = parity.compare(built.module, reference, built.batch, built.mesh, built.config.logical_axis_rules)
  result.check(BOUND)
