# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is said about arguments before MaxText is imported."""

import subprocess
import sys

import pytest

from maxtext_pp_ext.config import PipelineKeys
from maxtext_pp_ext.host import arguments, postponed
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import

WRONG = {
    "a mistyped key": ("ici_pipeline_paralelism=4", "did you mean 'ici_pipeline_parallelism'?"),
    "a mistyped key of ours": ("pipeline_imp=host", "did you mean 'pipeline_impl'?"),
    "a key like none": ("zzqqxx=4", "'zzqqxx' is no key of MaxText's config."),
    "a topology of no such size": ("compile_topology=v5p-999", "such as v5p-1024, v5p-896, "),
    "a topology of no such kind": ("compile_topology=abacus", "Set another one, such as "),
}


@pytest.mark.parametrize("argument, message", WRONG.values(), ids=WRONG.keys())
def test_a_key_or_topology_that_does_not_exist_is_told_with_what_is_alike(argument, message):
  (problem,) = arguments.problems(["run_name=a", argument])
  assert message in problem and len(problem) < 200


def test_sound_arguments_have_no_problem():
  assert (
      arguments.problems(["run_name=a=b", "compile_topology=v5p-8", "pipeline_impl=host", "debug.rl=true", "steps=3"])
      == []
  )


def test_every_key_of_maxtext_is_known(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  from maxtext.configs import types

  known = {*PipelineKeys.model_fields, *arguments._fields()}
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


@pytest.mark.slow
def test_modules_wait_while_maxtext_is_imported():
  program = (
      "from maxtext_pp_ext.cli import maxtext; maxtext.prepare()\n"
      "from maxtext_pp_ext import lazy_imports; from maxtext_pp_ext.host import postponed; postponed.import_maxtext()\n"
      "print([name for name in postponed.MODULES if not lazy_imports.is_postponed(name)])\n"
      "import sympy, transformers; print(sympy.isprime(7), transformers.AutoTokenizer.__name__)\n"
      "from maxtext.checkpoint_conversion.utils import load_dynamic\n"
      "print(len(load_dynamic.HF_MODEL_CONFIGS) > 20)"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-3:] == ["[]", "True AutoTokenizer", "True"] and postponed.MODULES
