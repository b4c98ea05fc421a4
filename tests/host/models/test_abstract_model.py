# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models without values."""

import jax
import numpy as np
import pytest

from maxtext_pp_ext.host.models import run_config
from tests.host.common import TINY
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import
from tests.marks import slow_but


def test_copies_of_a_stages_layers_are_sharded_as_the_layers_that_maxtext_makes(installed, monkeypatch):  # noqa: F811  pylint: disable=redefined-outer-name
  from maxtext_pp_ext.host.models import abstract_model
  from maxtext_pp_ext.host.replacements import stage_modules

  layout = ("num_layers_per_pipeline_stage=3", "ici_pipeline_parallelism=2", "pipeline_impl=circular")
  config = run_config.read_without_run(
      [*TINY, *layout, "base_num_decoder_layers=6"], internal_compile=True, internal_compile_num_devices=8
  )
  copied, _ = abstract_model.explained(config)
  monkeypatch.setattr(stage_modules, "_copying", lambda layer_class: layer_class)
  made, _ = abstract_model.explained(config)
  assert copied.to_dict() == made.to_dict() and any("layers_2" in row.layout.path for row in made.rows)


# Those of docs/quantization.md.
QWIX = ("int8", "int4", "fp4", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_full", "fp8_gpu", "fp8_nanoo")
PIPELINE = ("pipeline_impl=circular_bsw", "ici_pipeline_parallelism=2")


@pytest.mark.parametrize(
    "kind, keys",
    slow_but(
        [("int4", ()), ("fp8", ()), ("int8", PIPELINE), ("fp8_full", PIPELINE)],
        [*((kind, ()) for kind in QWIX), ("int8", PIPELINE), ("fp8_full", PIPELINE)],
        spread=True,
    ),
)
def test_without_devices_a_model_that_qwix_quantizes_has_the_parameters_it_has_on_devices(installed, kind, keys):  # noqa: F811  pylint: disable=redefined-outer-name
  from flax import nnx

  from maxtext_pp_ext.host.models import abstract_model

  quantized = (f"quantization={kind}", "use_qwix_quantization=true", "base_num_decoder_layers=2")
  config = run_config.read_without_run([*TINY, *quantized, *keys])
  found, mesh = abstract_model.explained(config)
  devices = jax.sharding.Mesh(np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes), mesh.axis_names)
  with jax.set_mesh(devices):
    made = nnx.state(abstract_model.abstract_model(config, devices), nnx.Param)
  shapes = {"/".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(made)}
  assert shapes == {row.layout.path: tuple(row.layout.shape) for row in found.rows}
