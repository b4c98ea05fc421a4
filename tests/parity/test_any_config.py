# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Any configuration of a pipeline computes what its layers compute, or is refused before anything is compiled.

Configurations are drawn from all keys that say something about the pipeline, sensible or not. There is no third outcome:
an error that is not ours, or another result, fails.
"""

from hypothesis import HealthCheck, Phase, given, settings, strategies as st
import pytest

from maxtext_pp_ext.config import PipelineConfigError
from maxtext_pp_ext.testing import parity
from tests.parity.common import LAYERS, make_config

# Sizes of mesh axes beside `stage`; FSDP takes the devices that are left.
MESHES = [{}, {"ici_tensor_parallelism": 2}, {"ici_data_parallelism": 2}, {"ici_context_parallelism": 2}]
MESHES += [{"ici_expert_parallelism": 2}, {"ici_fsdp_transpose_parallelism": 2}]
REMAT = ["full", "minimal", "save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "custom", "none"]


@st.composite
def keys(draw):
  """Keyword arguments of `make_config`. Most stages, microbatches and repeats fit together, some do not."""
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
      "shard_mode": draw(st.sampled_from(["auto", "auto", "explicit"])),
      **draw(st.sampled_from(MESHES)),
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
  return drawn


def check(drawn):
  try:
    config = make_config(**drawn)
  except PipelineConfigError:
    return
  parity.assert_pipeline_parity(LAYERS["simple"], config)


def search(examples):
  """A test of that many configurations, the same ones each time. Shrinking would compile hundreds more."""
  options = {"deadline": None, "derandomize": True, "database": None, "print_blob": False}
  phases = [Phase.explicit, Phase.generate]
  options = settings(max_examples=examples, phases=phases, suppress_health_check=list(HealthCheck), **options)

  @options
  @given(drawn=keys())
  def run(drawn):
    check(drawn)

  return run


def test_any_configuration_is_right_or_refused():
  search(examples=8)()


@pytest.mark.slow
def test_many_configurations_are_right_or_refused():
  search(examples=150)()
