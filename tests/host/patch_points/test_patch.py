# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The patch for MaxText: it applies, and with it MaxText finds our package by itself, hook or not."""

import collections
import importlib.metadata
import importlib.util
import pathlib
import re
import shutil
import subprocess
import types

import pytest

from maxtext_pp_ext.host.patch_points import table, version
from tests.host.common import HOOK, ROOT, TINY, write_package
from tests.marks import slow_but

PATCH = ROOT / "patches" / "maxtext-0.2.5" / "extension-points.patch"
# What setup.cfg declares, for a checkout that is not installed.
TARGETS = {
    "maxtext.config_class": "config_class:extend_config_class",
    "maxtext.pipeline_class": "factory:pipeline_class",
    "maxtext.decoder_call": "decoder_call:check",
    "maxtext.decoder_layers": "stage_modules:layer_classes",
    "maxtext.pipeline_stage": "stage_modules:build",
    "maxtext.abstract_model": "sharding_conflicts:judge",
    "maxtext.checkpoint_load": "checkpoint_load:refuse_other_layouts",
    "maxtext.pretrained_load": "checkpoint_load:refuse_other_layouts_of_pretrained",
}
REPLACEMENTS = "maxtext_pp_ext.host.replacements"
ENTRY_POINTS = {group: {"maxtext_pp_ext": f"{REPLACEMENTS}.{target}"} for group, target in TARGETS.items()}
RUN_TRAINER = ("-m", "maxtext.trainers.pre_train.train", *TINY, "steps=2", "base_output_directory=out")


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
  """A copy of the installed MaxText with the patch."""
  import maxtext.version

  if maxtext.version.__version__ != "0.2.5":
    pytest.skip(f"the patch is for MaxText 0.2.5, installed is {maxtext.version.__version__}")
  folder = tmp_path_factory.mktemp("patched")
  source = pathlib.Path(importlib.util.find_spec("maxtext").origin).parent
  shutil.copytree(source, folder / "maxtext", ignore=shutil.ignore_patterns("__pycache__"))
  program = ["git", "apply"] if shutil.which("git") else ["patch", "-p1", "-i"]
  subprocess.run([*program, str(PATCH)], cwd=folder, check=True, capture_output=True, timeout=60)
  assert "EXTENSION_GROUP" in (folder / "maxtext/configs/types.py").read_text()
  return folder


@pytest.fixture
def ours(tmp_path):
  """A folder that makes this checkout an installed package with the entry points of setup.cfg."""
  folder = tmp_path / "ours"
  folder.mkdir()
  write_package(folder, "maxtext_pp_ext", entry_points=ENTRY_POINTS)  # takes the place of an installed one
  return folder


def test_setup_cfg_declares_the_entry_points():
  text = (ROOT / "setup.cfg").read_text()
  for group, points in ENTRY_POINTS.items():
    assert group in text and all(value in text for value in points.values())


@pytest.mark.slow
def test_patched_maxtext_trains_through_an_installed_implementation_with_the_hook_off(
    run_python, patched, ours, fake_package
):
  keys = ("ici_pipeline_parallelism=2", "num_pipeline_microbatches=2", "pipeline_impl=fake")
  done = run_python(*RUN_TRAINER, *keys, path=[patched, ours, fake_package])
  text = done.stdout + done.stderr
  assert "FakePipeline was built" in text and "completed step: 1" in text
  assert "pipeline_impl=fake is active: 2 stages" in text


@pytest.mark.slow
def test_patched_maxtext_refuses_conflicting_shardings_with_the_hook_off(run_python, patched, ours):
  keys = ("ici_fsdp_parallelism=2", "base_emb_dim=15", "sharding_conflicts=error")
  done = run_python(*RUN_TRAINER, *keys, path=[patched, ours], check=False)
  assert done.returncode and "ShardingConflictError" in done.stderr and "'embed'" in done.stderr


@pytest.mark.slow
def test_patched_maxtext_refuses_a_window_which_it_would_not_run(run_python, patched, ours):
  done = run_python(*RUN_TRAINER, "pipeline_impl=circular_bsw", path=[patched, ours], check=False)
  assert done.returncode and "patch points that have pipelines only" in " ".join(done.stderr.split())


FROM_PRETRAINED = """
import sys
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils
model_creation_utils.from_pretrained(pyconfig.initialize(["", *sys.argv[1:]]))
"""


def test_patched_maxtext_refuses_pretrained_weights_of_another_layout_with_the_hook_off(
    run_python, patched, ours, tmp_path
):
  from tests.host.replacements.test_checkpoint_load import save, state

  save(tmp_path / "3", state()[1])
  keys = ("ici_pipeline_parallelism=2", "num_pipeline_microbatches=2", "pipeline_impl=circular_bsw")
  path = f"load_parameters_path={tmp_path / '3' / 'items'}"
  done = run_python("-c", FROM_PRETRAINED, *TINY, *keys, path, path=[patched, ours], check=False)
  assert done.returncode and "WrongLayoutError" in done.stderr and "maxtext-pp convert" in done.stderr


@pytest.mark.slow
def test_patched_maxtext_builds_stages_for_explicit_sharding_with_the_hook_off(run_python, patched, ours):
  keys = (
      "ici_pipeline_parallelism=2",
      "num_pipeline_microbatches=2",
      "pipeline_impl=circular_bsw",
      "shard_mode=explicit",
  )
  done = run_python(*RUN_TRAINER, *keys, path=[patched, ours])
  assert "completed step: 1" in done.stdout + done.stderr


CHECKS = """
import maxtext, sys
from maxtext.common import checkpointing
from maxtext.configs import pyconfig, types
from maxtext.layers import nnx_decoders, pipeline
from maxtext.utils import model_creation_utils
import maxtext_pp_ext, types as t
from maxtext_pp_ext.config import PipelineConfigError

import pytest  # pyconfig exits the interpreter without it
report = maxtext_pp_ext.install()
own = ("maxtext.configs.pyconfig._prepare_for_pydantic",)  # that a key is unknown is not in the patch
assert report.touched == own and len(report.pending) == 1 and len(report.skipped) == 5, report
assert not hasattr(pipeline.create_nnx_pipeline, "__wrapped__")
assert not hasattr(model_creation_utils.create_nnx_abstract_model, "__wrapped__")
assert not hasattr(model_creation_utils.from_pretrained, "__wrapped__")
assert not hasattr(checkpointing.load_state_if_possible, "__wrapped__")
with pytest.raises(PipelineConfigError, match="scan_layers=True"):
  pyconfig.initialize([""], run_name="x", pipeline_impl="circular", scan_layers=False)
decoder = object.__new__(nnx_decoders.NNXDecoder)
assert types.RLConfig.model_fields["pipeline_impl"].default == "host"
assert len(nnx_decoders.extensions.load("maxtext.decoder_call")) == 1
print(maxtext.__file__)
"""


def test_a_part_of_the_patch_is_refused(monkeypatch):
  def at(module, *groups):
    found = types.ModuleType(module)
    vars(found).update({f"{k}_EXTENSION_GROUP": group for k, group in enumerate(groups)})
    return table.official(found)

  ours = lambda group: [importlib.metadata.EntryPoint("maxtext_pp_ext", f"{REPLACEMENTS}.{TARGETS[group]}", group)]
  monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ours(group) if group in TARGETS else [])
  decoders = ["maxtext.decoder_call", "maxtext.decoder_layers", "maxtext.pipeline_stage"]
  assert at("maxtext.layers.nnx_decoders", *decoders) and at("maxtext.configs.types", "maxtext.config_class")
  assert not at("maxtext.layers.nnx_decoders") and not at("maxtext.configs.pyconfig", "somebody.elses")
  with pytest.raises(
      version.HostVersionError, match="of maxtext.decoder_call, but not of .*layers, maxtext.pipeline_stage"
  ):
    at("maxtext.layers.nnx_decoders", "maxtext.decoder_call")
  monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
  assert not at("maxtext.layers.nnx_decoders", "maxtext.decoder_call")


def test_the_patch_has_the_groups_of_each_module():
  named = collections.defaultdict(set)
  for line in PATCH.read_text().splitlines():
    if line.startswith("+++ b/"):
      module = line.removeprefix("+++ b/").removesuffix(".py").replace("/", ".")
    elif found := re.match(r'\+\w*EXTENSION_GROUP = "(.*)"', line):
      named[module].add(found[1])
  assert named == table.GROUPS and set().union(*named.values()) == set(ENTRY_POINTS)


@pytest.mark.parametrize("hooked", slow_but([True], [True, False]))
def test_the_hook_is_skipped_where_maxtext_is_patched(run_python, patched, ours, hooked):
  code = (HOOK + CHECKS) if hooked else CHECKS
  done = run_python("-c", code, path=[patched, ours], env={"MAXTEXT_PP_EXT": "" if hooked else "off"})
  assert done.stdout.strip().endswith(str(patched / "maxtext" / "__init__.py"))


def test_the_hook_does_its_work_in_a_patched_maxtext_that_does_not_find_our_entry_points(run_python, patched):
  code = f"""{HOOK}
import importlib.metadata
from maxtext.layers import nnx_decoders
import maxtext_pp_ext
if any(ep.value.startswith("maxtext_pp_ext.") for ep in importlib.metadata.entry_points(group="maxtext.config_class")):
  print("installed")
else:
  report = maxtext_pp_ext.install()
  print(len(report.skipped), "maxtext.layers.nnx_decoders.create_nnx_pipeline" in report.touched)
"""
  assert (
      run_python("-c", code, path=[patched], env={"MAXTEXT_PP_EXT": ""}).stdout.strip().endswith(("0 True", "installed"))
  )
