# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The patches for MaxText: they apply, and with them MaxText finds our package by itself, hook or not."""

import collections
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import pytest

from maxtext_pp_ext.host import extension_groups
from maxtext_pp_ext.host.patch_points import table, version
from tests.host.common import HOOK, ROOT, TINY, write_package
from tests.marks import slow_but

PATCHES = sorted((ROOT / "patches" / "maxtext-0.2.5").glob("*.patch"))
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


def apply(folder, patches):
  """Puts a copy of the installed MaxText with these patches into a folder, as src/maxtext of its repository."""
  import maxtext.version

  if maxtext.version.__version__ != "0.2.5":
    pytest.skip(f"the patches are for MaxText 0.2.5, installed is {maxtext.version.__version__}")
  source = pathlib.Path(importlib.util.find_spec("maxtext").origin).parent
  shutil.copytree(source, folder / "src" / "maxtext")  # with its bytecode, of which patched files get their own
  for patch in patches:
    program = ["git", "apply"] if shutil.which("git") else ["patch", "-p1", "-i"]
    subprocess.run([*program, str(patch)], cwd=folder, check=True, capture_output=True, timeout=60)
  return folder / "src"


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
  """A folder with MaxText and all patches."""
  return apply(tmp_path_factory.mktemp("patched"), PATCHES)


# Each beginning of the series, and one that leaves out a patch.
@pytest.fixture(scope="module", params=slow_but(["1 2"], ["1", "1 2", "1 3"]))
def partly_patched(request, tmp_path_factory):
  """A folder with MaxText and a part of the patches."""
  return apply(tmp_path_factory.mktemp("partly"), [PATCHES[int(number) - 1] for number in request.param.split()])


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


def test_a_part_of_a_patch_is_refused(monkeypatch):
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


def test_the_patches_have_the_groups_of_each_module():
  named, changed_by = collections.defaultdict(set), collections.defaultdict(list)
  for patch in PATCHES:
    for line in patch.read_text().splitlines():
      if line.startswith("+++ b/"):
        module = line.removeprefix("+++ b/src/").removesuffix(".py").replace("/", ".")
        changed_by[module].append(patch)
      elif found := re.match(r'\+\w*EXTENSION_GROUP = "(.*)"', line):
        named[module].add(found[1])
  assert named == extension_groups.GROUPS and set().union(*named.values()) == set(ENTRY_POINTS)
  assert max(map(len, changed_by.values())) == 1  # so that a module has all of its groups or none


@pytest.mark.slow
def test_the_patches_tests_pass_in_patched_maxtext(patched):
  environment = os.environ | {"PYTHONPATH": str(patched), "MAXTEXT_PP_EXT": "off", "JAX_PLATFORMS": "cpu"}
  environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "DECOUPLE_GCLOUD": "TRUE"}
  (patched.parent / "pytest.ini").write_text("[pytest]\nmarkers =\n  cpu_only\n")
  program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit"]
  options = {"capture_output": True, "text": True, "timeout": 600, "check": False}
  done = subprocess.run(program, cwd=patched.parent, env=environment, **options)
  assert done.returncode == 0 and re.search(r"^11 passed", done.stdout, re.MULTILINE), done.stdout[-4000:]


PIPELINED = ("ici_pipeline_parallelism=2", "num_pipeline_microbatches=2", "pipeline_impl=circular_bsw")


def test_with_a_part_of_the_patches_and_the_hook_off_a_run_that_needs_us_is_refused(run_python, partly_patched, ours):
  code = f"""
from maxtext.configs import pyconfig
pyconfig.initialize(["", *{TINY}])  # pipeline_impl=host
for keys in ({PIPELINED}, ("sharding_conflicts=error",)):
  try:
    pyconfig.initialize(["", *{TINY}, *keys])
  except ValueError as error:
    print("refused:", error)
"""
  done = run_python("-c", code, path=[partly_patched, ours])
  assert done.stdout.count("refused:") == 2 and done.stdout.count("the start-up hook is off. Apply all of them") == 2


@pytest.mark.slow
def test_with_a_part_of_the_patches_and_the_hook_a_pipeline_trains(run_python, partly_patched, ours):
  train = "from maxtext.trainers.pre_train import train; from absl import app; app.run(train.main)"
  code = f"{HOOK}\nimport sys; sys.argv[0] = 'train'\n{train}"
  done = run_python("-c", code, *RUN_TRAINER[2:], *PIPELINED, path=[partly_patched, ours], env={"MAXTEXT_PP_EXT": ""})
  text = done.stdout + done.stderr
  assert "completed step: 1" in text and "pipeline_impl=circular_bsw is active: 2 stages" in text


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
