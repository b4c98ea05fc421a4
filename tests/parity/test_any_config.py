# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Any configuration of a pipeline computes what its layers compute, or is refused before anything is compiled.

Configurations are drawn from all keys that say something about the pipeline, sensible or not, with layers of several
kinds. There is no third outcome: an error that is not ours, or another result, fails. Another seed draws others:
`PARITY_SEED=7 PARITY_EXAMPLES=300 pytest -m slow tests/parity/test_any_config.py`.
"""

import math
import os

from hypothesis import example, given, HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from maxtext.configs.types import RematLocation, RematPolicy
import pytest

from maxtext_pp_ext.config import PipelineConfigError
from maxtext_pp_ext.testing import parity
from tests.parity.blocks import INDEXER, PIPELINED

DEVICES = 8
# Sizes of mesh axes beside `stage`; FSDP takes the devices that are left.
MESHES = [{}, {"ici_tensor_parallelism": 2}, {"ici_data_parallelism": 2}, {"ici_context_parallelism": 2}]
MESHES += [{"ici_expert_parallelism": 2}, {"ici_fsdp_transpose_parallelism": 2}]
MESHES += [{"ici_data_parallelism": 2, "ici_tensor_parallelism": 2}]
# Without those that move activations to the host's memory, which a CPU does not tell from its own.
REMAT = [policy.value for policy in RematPolicy if "offload" not in policy.value] + ["none"]
NAMES = ("decoder_layer_input", "query_proj", "mlpwi", "out_proj")  # of activations, for remat_policy=custom
# How much rounding is magnified depends on sizes, which vary here (`parity.sensitivity`). Faults are of the order of 1.
ROOM = 10
SMALL = {"stages": 2, "repeats": 1, "microbatches": 2, "layers_per_stage": 2, "scan_layers_per_stage": True}
CASES = {case.name: case for case in PIPELINED if case.name in ("simple", "llama2", "mixtral", "deepseek")}


@st.composite
def keys(draw):
  """A block's name, and arguments of `Case.config`. Most stages, microbatches and repeats fit together, some do not."""
  stages = draw(st.integers(2, 4))
  fits = st.integers(1, 3).map(lambda rounds: rounds * stages)
  drawn = {
      "stages": stages,
      "repeats": draw(st.integers(1, 3)),
      "layers_per_stage": draw(st.sampled_from([1, 1, 2])),
      "microbatches": draw(st.one_of(fits, fits, fits, st.integers(1, 9))),
      "microbatch_size": draw(st.sampled_from([1, 2, 3, 4, 8])),
      "pipeline_impl": draw(st.sampled_from(["circular_bsw", "circular_bsw", "circular", "circular_ag_once"])),
      "remat_policy": draw(st.sampled_from(REMAT)),
      "pipeline_grad_accum_dtype": draw(st.sampled_from(["auto", "float32", "bfloat16"])),
      "pipeline_gather_dtype": draw(st.sampled_from(["auto", "weight", "compute"])),
      "dtype": draw(st.sampled_from(["float32", "float32", "bfloat16"])),
      "weight_dtype": draw(st.sampled_from(["float32", "float32", "bfloat16"])),
      "shard_mode": draw(st.sampled_from(["auto", "auto", "explicit"])),
      **draw(st.sampled_from([mesh for mesh in MESHES if math.prod(mesh.values()) <= DEVICES // stages])),
  }
  flags = ("pipeline_delay_activation_forwarding", "scan_layers_per_stage", "scan_pipeline_repeats")
  flags += ("set_remat_policy_on_layers_per_stage",)
  on_by_default = ("scan_layers", "scan_pipeline_iterations", "set_remat_policy_on_pipeline_iterations")
  for flag in flags + on_by_default:
    if draw(st.integers(0, 3)) == 0:
      drawn[flag] = flag not in on_by_default
  if draw(st.integers(0, 7)) == 0:
    drawn["num_pipeline_repeats"] = draw(st.integers(1, 4))
  if draw(st.integers(0, 7)) == 0:
    drawn["pipeline_parallel_layers"] = draw(st.integers(1, 12))
  if drawn["remat_policy"] == "custom":
    drawn |= {name: draw(st.sampled_from([RematLocation.DEVICE, RematLocation.REMAT])).value for name in NAMES}
  if drawn["remat_policy"] not in ("full", "none") and draw(st.integers(0, 2)) == 0:
    drawn["pipeline_remat_iterations"] = draw(st.integers(1, 12))
  name = draw(st.sampled_from(["simple", "simple", "llama2", "mixtral", "deepseek"]))
  if CASES[name].experts:
    drawn["dtype"] = "float32"  # rounded to bfloat16, tokens would go to other experts
  return name, drawn


def check(drawn):
  name, values = drawn
  try:
    config = CASES[name].config(**values)
  except PipelineConfigError:
    return
  parity.assert_pipeline_parity(None, config, tolerance=ROOM * parity.tolerance(config))


def search(examples, found=()):
  """A test of that many configurations, and of `found`. Shrinking would compile hundreds more."""
  options = {"deadline": None, "database": None, "print_blob": False}
  phases = [Phase.explicit, Phase.generate]
  options = settings(max_examples=examples, phases=phases, suppress_health_check=list(HealthCheck), **options)

  @options
  @seed(int(os.environ.get("PARITY_SEED", "0")))
  @given(drawn=keys())
  def run(drawn):
    check(drawn)

  for drawn in found:
    run = example(drawn=drawn)(run)
  return run


def test_any_configuration_is_right_or_refused():
  search(examples=3)()


@pytest.mark.slow
def test_many_configurations_are_right_or_refused():
  # Found by reading: updates that were added to other layers' biases, a loss that was not reported.
  of_one_expert = SMALL | {"num_experts": 2, "num_experts_per_tok": 1}
  without_updates = SMALL | INDEXER | {"routed_bias_update_rate": 0.0}
  found = [("deepseek", keys) for keys in (of_one_expert, without_updates)]
  search(int(os.environ.get("PARITY_EXAMPLES", "150")), found)()
