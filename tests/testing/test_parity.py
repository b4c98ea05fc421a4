# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison for users' own layers: its example runs, and it finds mistakes."""

import math
import pathlib
import re

from flax import nnx
import jax.numpy as jnp
from maxtext.models.simple_layer import SimpleDecoderLayer
import pytest

from maxtext_pp_ext.host.models import decoder_layers
from maxtext_pp_ext.pipelines.circular import CircularBswPipeline
from maxtext_pp_ext.testing import assert_pipeline_parity, parity
from tests.parity.common import make_config

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "parity.md"
SIZES = {"stages": 3, "repeats": 2, "microbatches": 3}


def test_the_example_in_the_documentation_runs(capsys):
  [code] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
  scope = {"__name__": "example"}
  exec(compile(code, str(DOCUMENT), "exec"), scope)  # pylint: disable=exec-used
  assert len(capsys.readouterr().out.splitlines()) == 3
  for result in scope["errors"].values():
    assert result.sown and len(result.gradients) == 3 and not result.without_gradient


class SwapsStages(CircularBswPipeline):
  """Runs the stages of each repeat in another order."""

  def __call__(self, *args, **kwargs):
    params = nnx.state(self.layers, nnx.Param)
    nnx.update(self.layers, nnx.State.map(params, lambda path, w: w.replace(jnp.roll(w[...], 1, axis=1))))
    return super().__call__(*args, **kwargs)


def test_layers_in_another_order_are_noticed_and_the_worst_array_is_named_first():
  with pytest.raises(AssertionError) as error:
    assert_pipeline_parity(SimpleDecoderLayer, make_config(**SIZES), implementations=SwapsStages)
  *lines, hint = str(error.value).splitlines()[1:]
  found = [float(line.rsplit(": ", 1)[1]) for line in lines]
  assert float(re.search(r"change by up to (\S+) ", hint)[1]) < 1e-5
  assert "SwapsStages" in str(error.value) and len(found) == 3  # outputs, the one parameter, inputs
  assert found == sorted(found, reverse=True) and found[0] > 0.1


class HasMore(SimpleDecoderLayer):
  """Has a parameter that it does not use."""

  def __init__(self, config, mesh, *args, **kwargs):
    super().__init__(config, mesh, *args, **kwargs)
    self.more = nnx.Param(jnp.ones(config.emb_dim), sharding_names=("norm",))


def test_a_parameter_without_a_gradient_is_named_unless_the_caller_knows():
  with pytest.raises(AssertionError, match=r"gradient of \['more'\] is 0 in the layers themselves"):
    assert_pipeline_parity(HasMore, make_config(**SIZES))
  [found] = assert_pipeline_parity(HasMore, make_config(**SIZES), unused=["more"]).values()
  assert found.without_gradient == ("['more']",)


class ReturnsNothing(SimpleDecoderLayer):

  def __call__(self, *args, **kwargs):
    outputs, more = super().__call__(*args, **kwargs)
    return 0 * outputs, more


def test_layers_whose_outputs_are_zero_are_not_compared():
  with pytest.raises(AssertionError, match="outputs of the layers themselves are 0"):
    assert_pipeline_parity(ReturnsNothing, make_config(**SIZES))


class Loss(nnx.Variable):
  """Neither a parameter nor an `nnx.Intermediate`."""


class KeepsItsLoss(SimpleDecoderLayer):

  def __call__(self, inputs, *args, **kwargs):
    outputs = super().__call__(inputs, *args, **kwargs)
    self.loss = Loss(jnp.mean(inputs))
    return outputs


def test_what_a_layer_leaves_in_a_variable_of_its_own_type_is_refused_instead_of_lost():
  with pytest.raises(NotImplementedError, match="state variable loss of type Loss when it is called"):
    assert_pipeline_parity(KeepsItsLoss, make_config(**SIZES))


class Tied(nnx.Module):
  """Multiplies twice by one matrix that has two names."""

  def __init__(self, config, mesh, model_mode, quant=None, *, rngs):
    del mesh, model_mode, quant
    init = nnx.initializers.lecun_normal()
    self.down = nnx.Param(init(rngs.params(), (config.emb_dim, config.emb_dim)), sharding_names=("embed", "mlp"))
    self.up = self.down

  def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
    hidden = jnp.tanh(jnp.dot(inputs, self.down[...], precision="highest"))
    return inputs + jnp.dot(hidden, self.up[...].T, precision="highest")


@pytest.mark.parametrize("scanned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_parameter_with_two_names_in_a_layer_has_one_gradient(scanned):
  config = make_config(stages=2, repeats=1, microbatches=2, layers_per_stage=2, scan_layers_per_stage=scanned)
  [result] = assert_pipeline_parity(Tied, config).values()
  assert not result.sown and len(result.gradients) == 1 + (1 if scanned else 2)  # inputs, and each layer's matrix


def test_a_custom_layer_that_is_not_alike_in_the_loop_is_noticed():
  class Drifts(SimpleDecoderLayer):
    """A layer that differs each time it is made."""

    made = 0

    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      type(self).made += 1
      self.factor = type(self).made

    def __call__(self, inputs, *args, **kwargs):
      return super().__call__(inputs * self.factor, *args, **kwargs)

  with pytest.raises(AssertionError, match="outputs"):
    assert_pipeline_parity(Drifts, make_config(**SIZES))


def test_nan_is_the_worst_error():
  result = parity.Parity(outputs=0.5, gradients={"a": math.nan, "b": 0.0})
  assert result.worst[0] == "a"
  with pytest.raises(AssertionError, match="above 1.0e\\+00 in 1 of 3 arrays:\n  a: nan"):
    result.check(1.0)


def test_arrays_without_a_gradient_are_an_error_of_the_comparison_unless_they_are_named():
  result = parity.Parity(outputs=0.0, gradients={"a": 0.0}, without_gradient=("a",))
  with pytest.raises(AssertionError, match="The gradient of a is 0 in the layers"):
    result.check(1.0)
  result.check(1.0, unused=["a"])


def test_the_tolerance_grows_with_depth_and_with_the_rounding_of_the_dtype():
  config = make_config(**SIZES)
  deeper = make_config(**{**SIZES, "repeats": 8})
  halves = make_config(**SIZES, dtype="bfloat16")
  assert 5e-6 < parity.tolerance(config) < 2e-5
  assert parity.tolerance(deeper) == pytest.approx(2 * parity.tolerance(config))
  assert 0.01 < parity.tolerance(halves) < 0.1


def test_gradients_that_are_zero_but_for_rounding_are_measured_against_the_others():
  assert parity.relative_error(jnp.array([1e-9]), jnp.array([0.0]), least=1e-2) < 1e-6
  assert parity.relative_error(jnp.array([1e-9]), jnp.array([0.0])) > 0


@pytest.mark.slow
def test_a_model_that_magnifies_rounding_is_off_by_less_than_one_unit_in_the_last_place_of_its_weights():
  from tests.parity.blocks import PIPELINED

  [case] = [case for case in PIPELINED if case.block == "gemma3" and case.cycle > 1]
  config = case.config(stages=3, repeats=2, microbatches=3)
  mesh, batch = parity.mesh_of(config), parity.Batch.random(config)
  pipeline = decoder_layers.pipeline(config, mesh, config.pipeline_impl, None, seed=0)
  expected = parity.reference(pipeline, None, config, batch)
  found = parity.compare(pipeline, expected, batch, mesh, config.logical_axis_rules)
  moves = parity.sensitivity(pipeline, expected, batch, config.dtype)
  assert moves.worst[1] > 2 * parity.tolerance(config)  # otherwise the formula would do
  assert found.outputs < moves.outputs and found.worst[1] < moves.worst[1]
