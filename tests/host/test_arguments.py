# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is said about arguments before MaxText is imported."""

import subprocess
import sys

import pytest

from maxtext_pp_ext.host import arguments, postponed
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import

WRONG = {
    "a mistyped key": ("ici_pipeline_paralelism=4", "did you mean 'ici_pipeline_parallelism'?"),
    "a mistyped key of ours": ("pipeline_imp=host", "did you mean 'pipeline_impl'?"),
    "a key like none": ("zzqqxx=4", "'zzqqxx' is no key of MaxText's config."),
    "a topology of no such size": ("compile_topology=v5p-999", "such as v5p-1024, v5p-896, "),
    "a topology of no such kind": ("compile_topology=abacus", "Set another one, such as "),
    "a mistyped model": ("model_name=lama3-8b", "did you mean 'llama3-8b' or "),
    "a mistyped implementation": ("pipeline_impl=circular_bws", "did you mean 'circular_bsw'?"),
    "a mistyped policy": ("remat_policy=ful", "remat_policy=ful is no policy of MaxText; did you mean 'full'?"),
    "a policy like none": ("remat_policy=zzqqxx", "which has custom, full, "),
    "no implementation": ("pipeline_impl=none", "for no pipeline set ici_pipeline_parallelism=1. Leave out "),
}


@pytest.mark.parametrize("argument, message", WRONG.values(), ids=WRONG.keys())
def test_a_key_or_topology_that_does_not_exist_is_told_with_what_is_alike(argument, message):
  (problem,) = arguments.problems(["run_name=a", argument])
  assert message in problem and len(problem) < 400


def test_sound_arguments_have_no_problem():
  assert (
      arguments.problems(["run_name=a=b", "compile_topology=v5p-8", "pipeline_impl=host", "debug.rl=true", "steps=3"])
      == []
  )


def write(folder, name, text):
  (folder / name).write_text(text, encoding="utf-8")
  return str(folder / name)


def test_keys_of_a_yml_file_and_of_the_files_it_is_based_on_are_judged_too(tmp_path):
  write(tmp_path, "base.yml", "stepps: 3\nmodel_name: lama3-8b\n")
  file = write(tmp_path, "my.yml", "base_config: base.yml\nici_pipeline_paralelism: 4\n")
  said = arguments.problems([file, "run_name=a"])
  assert len(said) == 3 and "'steps'" in said[1] and "'ici_pipeline_parallelism'" in said[0] and "model_name=" in said[2]
  assert len(arguments.problems([file, "model_name=default"])) == 2  # the command line comes last


@pytest.mark.parametrize("text", ["Dear MaxText, please train.", "- a\n- b\n", "Dear MaxText: please train.\n"])
def test_a_file_of_prose_is_no_config(tmp_path, text):
  (problem,) = arguments.problems([write(tmp_path, "my.yml", text)])
  assert problem.endswith("of the form key: value.")


@pytest.mark.parametrize("text", ["a: [", "base_config: my.yml\nsteps: 3\n", "", "\x00"])
def test_what_cannot_be_read_is_left_to_maxtext(tmp_path, text):
  assert arguments.problems([write(tmp_path, "my.yml", text)]) == []


@pytest.mark.parametrize("base", ["nothing.yml", "/no/such/folder/base.yml"])
def test_a_base_that_is_not_there_is_named_with_the_file_that_asks_for_it(tmp_path, base):
  (problem,) = arguments.problems([write(tmp_path, "my.yml", f"base_config: {base}\n")])
  assert f"my.yml has base_config: {base}, and there is no such file beside it" in problem


def test_a_file_is_looked_for_where_maxtext_looks_for_it(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  write(tmp_path, "here.yml", "")
  assert arguments.yml_file("here.yml").is_file() and not arguments.yml_file("nowhere.yml").is_file()
  own = [arguments.yml_file(f"src/maxtext/configs/{name}.yml").is_file() for name in ("base", "nothing")]
  assert own == [True, False]


def test_values_of_files_and_arguments_are_merged_as_maxtext_merges_them(tmp_path):
  write(tmp_path, "a.yml", "base_config: base.yml\nsteps: 1\ncompile_topology: v5p-8\nrun_name: a\n")
  file = write(tmp_path, "b.yml", "base_config: a.yml\nrun_name: b\n")
  found = arguments.given([file, "run_name=c"])
  assert (found["steps"], found["compile_topology"], found["run_name"]) == (1, "v5p-8", "c")
  assert arguments.given([write(tmp_path, "c.yml", "a: [")]) is None


def test_maxtexts_own_configs_and_models_have_no_problem(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  from maxtext.configs import types

  files = ("base.yml", "pyconfig_deprecated.yml", "post_train/sft.yml")
  assert [arguments.problems([f"src/maxtext/configs/{file}"]) for file in files] == [[]] * 3
  assert arguments.model_names() == list(types.ModelName.__args__)
  policies = {"none", "minimal_with_context", *(policy.value for policy in types.RematPolicy)}
  assert policies - {"none"} < arguments.remat_policies()
  assert [arguments.problems([f"remat_policy={policy}"]) for policy in policies] == [[]] * len(policies)


def test_every_key_of_maxtext_is_known(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  from maxtext.configs import types

  known = arguments.keys()
  for config in (types.MaxTextConfig, types.RLConfig):
    assert set(config.model_fields) <= known


def test_a_mistyped_key_is_told_before_anything_heavy_is_imported():
  program = (
      "import sys; from maxtext_pp_ext import cli; status = cli.main(['check', 'stepps=3'])\n"
      "print(status, 'jax' in sys.modules, 'maxtext.configs' in sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert "error: 'stepps' is no key of MaxText's config; did you mean 'steps'?" in done.stdout
  assert done.stdout.endswith("2 False False\n")


COMMANDS = {
    "a mistyped key in a file": (["check", "{}/my.yml"], "'steps'?"),
    "all of them": (["check", "stepps=3", "base_emb_dmi=8", "model_name=lama3-8b"], "3 errors"),
    "a mistyped model": (["plan", "--devices", "8", "model_name=lama3-8b"], "'llama3-8b'"),
    "a mistyped implementation": (["sharding", "pipeline_impl=circulr"], "did you mean 'circular'?"),
    "no devices": (["plan", "model_name=llama3-8b"], "Which devices?"),
    "devices twice": (["plan", "--devices", "8", "compile_topology=v5p-8"], "give one of them"),
}


@pytest.mark.parametrize("argv, words", COMMANDS.values(), ids=COMMANDS.keys())
def test_what_needs_no_maxtext_is_said_before_it_is_imported(tmp_path, argv, words):
  write(tmp_path, "my.yml", "base_config: base.yml\nstepps: 3\n")
  argv = [argument.format(tmp_path) for argument in argv]
  program = (
      f"import sys; from maxtext_pp_ext import cli; status = cli.main({argv!r})\n"
      "print(status, 'jax' in sys.modules, 'maxtext.configs' in sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert done.stdout.endswith("2 False False\n") and words in done.stdout + done.stderr


@pytest.mark.slow
def test_modules_wait_while_maxtext_is_imported():
  program = (
      "import sys; from maxtext_pp_ext.cli import maxtext; maxtext.prepare()\n"
      "from maxtext_pp_ext import lazy_imports; from maxtext_pp_ext.host import postponed; postponed.import_maxtext()\n"
      "print([name for name in postponed.MODULES if not isinstance(sys.modules.get(name), lazy_imports._Waiting)])\n"
      "import sympy, transformers; print(sympy.isprime(7), transformers.AutoTokenizer.__name__)\n"
      "from maxtext.checkpoint_conversion.utils import load_dynamic\n"
      "print(len(load_dynamic.HF_MODEL_CONFIGS) > 20)"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-3:] == ["[]", "True AutoTokenizer", "True"] and postponed.MODULES
