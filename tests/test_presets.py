# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Presets are configs that MaxText accepts: configs of MaxText's own models, with stages added."""

import pathlib

import maxtext.configs
from maxtext.configs import pyconfig
import pytest
import yaml

import maxtext_pp_ext
from maxtext_pp_ext import presets
from maxtext_pp_ext.presets.__main__ import main

maxtext_pp_ext.install()
BATCH_SPLIT = "deepseek3-671b-batch-split"
THEIRS = pathlib.Path(maxtext.configs.__path__[0]) / "models" / "deepseek3-671b-batchsplit.yml"
# Rules for parameters that only their schedule has, and the one by which it places experts.
THEIR_OWN = {"embed_no_exp", "embed_no_exp_moe", "expert_only"}
OURS = {
    "activation_embed_and_logits_batch_sequence",
    "activation_exp",
    "activation_stage",
    "exp",
    "layers",
    "circular_repeats",
}


def test_each_is_printed_with_its_path(capsys, monkeypatch):
  assert BATCH_SPLIT in presets.names()
  monkeypatch.setattr("sys.argv", ["presets", BATCH_SPLIT])
  main()
  assert pathlib.Path(capsys.readouterr().out.strip()).is_file()
  with pytest.raises(ValueError, match="no preset 'none', only deepseek3-671b-batch-split"):
    presets.path("none")


def test_the_batch_split_preset_is_maxtexts_with_stages():
  ours, theirs = (
      yaml.safe_load(pathlib.Path(file).read_text(encoding="utf-8")) for file in (presets.path(BATCH_SPLIT), THEIRS)
  )
  assert ours["mesh_axes"] == ["data", "stage", *theirs["mesh_axes"][1:]]
  assert ours["data_sharding"] == [["data", "stage", *theirs["data_sharding"][0][1:]]]
  found, wanted = (dict(rules["logical_axis_rules"]) for rules in (ours, theirs))
  assert set(found) - set(wanted) == OURS
  # A name without a rule is replicated, as one whose rule names no axis.
  assert {name for name in set(wanted) - set(found) if wanted[name]} == THEIR_OWN
  outside = "activation_embed_and_logits_batch"
  assert found.pop(outside) == ["data", "stage", *wanted[outside][1:]]
  assert all(found[name] == wanted[name] for name in set(found) & set(wanted))


def test_the_batch_split_preset_is_a_pipeline_that_maxtext_takes():
  arguments = ["", presets.path(BATCH_SPLIT), "run_name=preset", "compile_topology=v5p-1024", "per_device_batch_size=4"]
  config = pyconfig.initialize(
      [*arguments, "ici_expert_parallelism=8", "dataset_type=synthetic", "enable_checkpointing=False"]
  )
  assert config.use_batch_split_schedule and config.sparse_matmul and config.megablox
  assert config.num_pipeline_repeats == 14 and config.pipeline_impl == "circular_bsw"
