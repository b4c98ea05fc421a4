# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`plan` builds a model for one number of stages, and takes its parameters for other numbers, too."""

from flax import nnx
import jax
import pytest

from maxtext_pp_ext.host.models import abstract_model
from tests.parity.blocks import PIPELINED


def explanation(config, parameters):
  return abstract_model.explained(config, lambda *_: parameters)[0].to_dict()


@pytest.mark.parametrize("case", PIPELINED, ids=lambda case: case.name)
def test_parameters_stacked_anew_are_sharded_as_those_of_a_model_that_is_built_so(case):
  configs = [case.config(stages=4 // repeats, repeats=repeats, microbatches=4) for repeats in (2, 1)]
  built = [(config, abstract_model.parameters(config, abstract_model.abstract_mesh(config))) for config in configs]
  assert len({config.pipeline_parallel_layers for config in configs}) == 1
  for (config, parameters), (other, expected) in (built, reversed(built)):
    restacked = abstract_model.restacked(parameters, config, other)
    assert explanation(other, restacked) == explanation(other, expected)


def test_arrays_that_are_stacked_in_another_way_are_left_alone():
  several, one = (PIPELINED[0].config(stages=4 // repeats, repeats=repeats, microbatches=4) for repeats in (2, 1))
  weight = nnx.Param(jax.ShapeDtypeStruct((2, 3), "float32"), out_sharding=("circular_repeats", "embed"))
  found = nnx.State({"decoder": {"pipeline_module": {"layers": {"kernel": weight}}}})
  assert abstract_model.restacked(found, several, one) is None
