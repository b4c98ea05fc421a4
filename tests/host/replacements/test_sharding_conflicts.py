# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The config key `sharding_conflicts`, on MaxText's own set-up."""

import subprocess
import sys

import pytest

from maxtext_pp_ext.host.models import axes, run_config
from maxtext_pp_ext.sharding import Kind, ShardingConflictError, ShardingConflictWarning
from tests.sharding.common import mesh_of

PIPELINE = {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 2, "ici_fsdp_parallelism": 4}
# A mesh axis that two dimensions of every dense layer's weights want, and nothing behind it for one of them.
CONFLICT = {"logical_axis_rules": '[["embed", "fsdp"], ["mlp", ["fsdp", "tensor"]]]'}


def set_up(config):
  """The set-up with which MaxText's trainers begin."""
  from maxtext.utils import maxtext_utils, model_creation_utils

  return model_creation_utils.create_nnx_abstract_model(config, maxtext_utils.get_mesh_from_config(config))


@pytest.mark.parametrize("keys", [{}, PIPELINE, PIPELINE | {"pipeline_impl": "circular_bsw"}])
def test_base_yml_has_no_conflicts(make_config, keys):
  set_up(make_config(sharding_conflicts="error", **keys))


@pytest.mark.parametrize("keys", [{}, PIPELINE, PIPELINE | {"pipeline_impl": "circular_bsw"}])
def test_conflicts_stop_the_set_up_with_every_parameter(make_config, keys):
  config = make_config(sharding_conflicts="error", **CONFLICT, **keys)
  with pytest.raises(ShardingConflictError) as raised:
    set_up(config)
  found = raised.value.conflicts
  assert {conflict.kind for conflict in found} == {Kind.TAKEN}
  assert {conflict.path.split("/")[-2] for conflict in found} == {"wi_0", "wi_1", "wo"}
  assert "('mlp', ('fsdp', 'tensor')) was passed over" in str(raised.value)
  assert "sharding_conflicts=warn" in raised.value.__notes__[0]


def test_a_dimension_that_its_mesh_axis_does_not_divide_is_a_conflict(make_config):
  with pytest.raises(ShardingConflictError, match=r"its size 18 is not a multiple of 8") as raised:
    set_up(make_config(sharding_conflicts="error", base_emb_dim=18))
  assert "Make it 24" in str(raised.value)


def test_warn_warns_and_fallback_is_silent(make_config, recwarn):
  set_up(make_config(**CONFLICT))
  assert not [w for w in recwarn if w.category is ShardingConflictWarning]
  with pytest.warns(ShardingConflictWarning, match="was passed over"):
    set_up(make_config(sharding_conflicts="warn", **CONFLICT))


def test_another_value_is_refused(make_config):
  with pytest.raises(ValueError, match="sharding_conflicts='strict' must be one of 'fallback', 'warn', 'error'"):
    make_config(sharding_conflicts="strict")


@pytest.mark.slow
def test_the_trainer_stops_before_it_compiles(tmp_path):
  from tests.host.common import TINY

  keys = [*TINY, *(f"{k}={v}" for k, v in CONFLICT.items()), "sharding_conflicts=error", "steps=1"]
  done = subprocess.run(
      [sys.executable, "-m", "maxtext_pp_ext.train", run_config.base_yml(), *keys],
      cwd=tmp_path,
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
  )
  assert done.returncode and "ShardingConflictError" in done.stderr
  assert "create_nnx_abstract_model" in done.stderr and "completed step" not in done.stdout + done.stderr


def test_names_that_maxtext_knows_may_be_left_out_and_others_may_not():
  rules = axes.rules_in_play([("embed", "fsdp")])
  assert rules[0] == ("embed", "fsdp") and ("mlp", ()) in rules and "embed" not in dict(rules[1:])
  from maxtext_pp_ext.sharding import conflicts, resolution

  mesh = mesh_of(fsdp=8)
  assert not conflicts(resolution(("embed", "mlp"), mesh, rules))
  assert [c.kind for c in conflicts(resolution(("embed", "mpl"), mesh, rules))] == [Kind.UNKNOWN]
