# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A model whose arrays were converted to another layout computes what it computed before."""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from maxtext.trainers.pre_train import train
import numpy as np
import pytest

from maxtext_pp_ext.checkpoint.moves import converted
from maxtext_pp_ext.host.models import layouts
from maxtext_pp_ext.testing import parity
from tests.parity import windows
from tests.parity.blocks import DEEPSEEK4


def loss_of(model, arrays, data):
  """The loss with these arrays, by path, instead of the model's own."""
  state = nnx.State.merge(model.params, model.rest)
  variables = {tuple(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
  assert arrays.keys() == {path for path, x in variables.items() if not isinstance(x, nnx.RngState)}
  for path, array in arrays.items():
    variables[path].set_value(jnp.asarray(array))
  run = lambda state: train.loss_fn(nnx.merge(model.graphdef, state), model.config, dict(data), None, None)[0]
  with jax.set_mesh(model.mesh), nn.logical_axis_rules(model.config.logical_axis_rules):
    return jax.jit(run)(state)


@pytest.mark.slow
def test_scanned_layers_of_deepseek_4_compute_the_same_one_after_another():
  keys = {"layers": 5, "decoder_block": "deepseek4", **DEEPSEEK4}
  # MaxText adds updates to biases as if both were stacked along the first axis.
  make = lambda scan: windows.make_config(**keys, scan_layers=scan, param_scan_axis=0)
  scanned, single = (windows.build(make(scan), one_device=True) for scan in (True, False))
  state = nnx.State.merge(windows.moved(scanned.params), scanned.rest)
  flat = [(path, x) for path, x in nnx.to_flat_state(state) if not isinstance(x, nnx.RngState)]
  arrays = {tuple(map(str, path)): np.asarray(x[...]) for path, x in flat}
  moved = converted(arrays, *(layouts.of_config(model.config) for model in (scanned, single)))
  data = windows.batch(scanned.config)
  expected, found = loss_of(scanned, arrays, data), loss_of(single, moved, data)
  assert expected
  assert parity.relative_error(found, expected) < parity.tolerance(scanned.config)
