# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`plan` builds a model for one number of stages, and takes its parameters for other numbers, too."""

from flax import nnx
import jax
import pytest

from maxtext_pp_ext.host.models import abstract_model
from tests.marks import slow_but
from tests.parity.blocks import PIPELINED


def explanation(config, parameters):
  return abstract_model.explained(config, lambda *_: parameters)[0].to_dict()


# A layer by itself, experts, layers before the pipeline, and cycles of layers.
QUICK = ("llama2", "mixtral", "deepseek: with an indexer", "gemma3: scan_layers, a multiple of 6 layers in a stage")
QUICK += ("qwen3_5: scan_layers, whole cycles of inhomogeneous_layer_cycle_interval in a stage",)


@pytest.mark.parametrize("case", slow_but(QUICK, {case.name: case for case in PIPELINED}))
def test_parameters_stacked_anew_are_sharded_as_those_of_a_model_that_is_built_so(case):
  configs = [case.config(stages=4 // repeats, repeats=repeats, microbatches=4) for repeats in (2, 1)]
  built = [(config, abstract_model.parameters(config, abstract_model.abstract_mesh(config))) for config in configs]
  assert len({config.pipeline_parallel_layers for config in configs}) == 1
  for (config, parameters), (other, expected) in (built, reversed(built)):
    restacked = abstract_model.restacked(parameters, config, other)
    assert explanation(other, restacked) == explanation(other, expected)


@pytest.mark.parametrize(
    "case", [case for case in PIPELINED if case.block in ("gemma2", "mixtral", "llama4")], ids=lambda case: case.name
)
def test_parameters_of_a_stage_with_fewer_layers_are_those_of_the_first_layers(case):
  several, fewer = (
      case.config(stages=2, repeats=repeats, microbatches=4, layers_per_stage=layers)
      for repeats, layers in ((1, 3), (2, 2))
  )
  built = abstract_model.parameters(several, abstract_model.abstract_mesh(several))
  expected = abstract_model.parameters(fewer, abstract_model.abstract_mesh(fewer))
  assert explanation(fewer, abstract_model.restacked(built, several, fewer)) == explanation(fewer, expected)
  assert abstract_model.restacked(expected, fewer, several) is None


def test_a_stage_with_one_layer_is_built_anew():
  case = PIPELINED[0]
  several, one = (case.config(stages=2, repeats=1, microbatches=4, layers_per_stage=layers) for layers in (2, 1))
  built = abstract_model.parameters(several, abstract_model.abstract_mesh(several))
  assert abstract_model.restacked(built, several, one) is None


def test_arrays_that_are_stacked_in_another_way_are_left_alone():
  several, one = (PIPELINED[0].config(stages=4 // repeats, repeats=repeats, microbatches=4) for repeats in (2, 1))
  weight = nnx.Param(jax.ShapeDtypeStruct((2, 3), "float32"), out_sharding=("circular_repeats", "embed"))
  found = nnx.State({"decoder": {"pipeline_module": {"layers": {"kernel": weight}}}})
  assert abstract_model.restacked(found, several, one) is None
