# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models without values."""

from maxtext_pp_ext.host.models import run_config
from tests.host.common import TINY
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import


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
