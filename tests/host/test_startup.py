# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the start-up hook: its cost for an interpreter, when it acts, and that it hides no errors."""

import importlib.util
import sys
import textwrap

import pytest

from maxtext_pp_ext.host import activate, startup
from maxtext_pp_ext.host.patch_points import install, table
from tests.host.common import write_package

HOOK = activate.PTH_LINE.strip()


# That of a file which an older version of this package wrote.
OLDER_HOOK = "import maxtext_pp_ext.host.startup as s; s.at_startup()"


def _run(run_python, code, hooked=True, **kwargs):
  env = {"MAXTEXT_PP_EXT": ""} | dict(kwargs.pop("env", {}))
  code = textwrap.dedent(code)
  return run_python("-c", f"{HOOK}\n{code}" if hooked else code, env=env, **kwargs)


@pytest.mark.parametrize("hook", [HOOK, OLDER_HOOK], ids=["line", "older line"])
def test_starting_an_interpreter_adds_a_finder_and_imports_nothing_but_three_modules_of_ours(hook, run_python):
  # -S: neither this environment's own hooks nor `site` decide what is imported.
  code = f"""
  import sys, os
  before = set(sys.modules)
  {hook}
  print(sorted(set(sys.modules) - before), type(sys.meta_path[0]).__name__)
  """
  done = run_python("-S", "-c", textwrap.dedent(code), env={"MAXTEXT_PP_EXT": ""})
  assert (
      done.stdout.strip() == "['maxtext_pp_ext', 'maxtext_pp_ext.host', 'maxtext_pp_ext.host.startup'] PatchPointFinder"
  )


def test_an_interpreter_that_never_imports_maxtext_imports_neither_jax_nor_pydantic(run_python):
  done = _run(
      run_python,
      """
      import sys, json, email.message, xml.dom, concurrent.futures
      print([m for m in ("jax", "flax", "pydantic", "maxtext", "omegaconf", "maxtext_pp_ext.config") if m in sys.modules])
      """,
  )
  assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "value, hooked", [("", True), ("on", True), ("off", False), ("OFF", False), (" 0 ", False), ("false", False)]
)
def test_the_environment_variable_switches_the_hook_off(run_python, value, hooked):
  code = "import sys; print(any(type(f).__name__ == 'PatchPointFinder' for f in sys.meta_path))"
  done = _run(run_python, code, env={"MAXTEXT_PP_EXT": value})
  assert done.stdout.strip() == str(hooked)


def test_hooking_twice_adds_one_finder_and_unhooking_removes_it():
  had = startup.unhook()
  try:
    assert startup.hook(install.apply) and not startup.hook(install.apply)
    assert sum(isinstance(finder, startup.PatchPointFinder) for finder in sys.meta_path) == 1
    assert startup.unhook() and not startup.unhook()
    assert not startup.hooked()
  finally:
    if had:
      startup.hook(install.apply)


def test_the_finder_leaves_all_other_modules_to_the_other_finders():
  finder = startup.PatchPointFinder(install.apply)
  for name in ("json", "maxtext", "maxtext.configs", "maxtext.configs.pyconfig", "maxtext.layers", "pipeline"):
    assert finder.find_spec(name) is None


def test_the_finder_names_the_modules_that_have_patch_points():
  assert tuple(table.PATCH_POINTS) == startup.PATCH_POINT_MODULES


def test_a_module_of_a_maxtext_that_is_not_installed_is_not_found_and_nothing_else_happens(run_python):
  code = """
  try:
    import maxtext.configs.types
  except ModuleNotFoundError as error:
    print(error.name)
  """
  done = run_python("-S", "-c", f"import sys, os\n{HOOK}\n{textwrap.dedent(code)}", env={"MAXTEXT_PP_EXT": ""})
  assert done.stdout.strip() == "maxtext"


FAKE_MAXTEXT = {
    "maxtext/__init__.py": "",
    "maxtext/version.py": "__version__ = '0.9.1'",
    "maxtext/configs/__init__.py": "",
    "maxtext/configs/types.py": "executed = True",
}


@pytest.fixture
def other_maxtext(tmp_path):
  """A MaxText of another version, on a separate path."""
  folder = tmp_path / "other"
  for name, source in FAKE_MAXTEXT.items():
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
  return folder


def test_importing_a_maxtext_of_another_version_fails_with_both_versions_and_the_ways_out(run_python, other_maxtext):
  done = _run(run_python, "import maxtext.configs.types", path=[other_maxtext], check=False)
  assert done.returncode == 1
  last = done.stderr.strip().splitlines()[-1]
  assert "HostVersionError" in last and ">=0.2.5,<0.3" in last and "found MaxText 0.9.1" in last
  assert "MAXTEXT_PP_EXT=off" in last


def test_switched_off_a_maxtext_of_another_version_imports_as_ever(run_python, other_maxtext):
  code = "import maxtext.configs.types as t; print(t.executed)"
  assert _run(run_python, code, path=[other_maxtext], env={"MAXTEXT_PP_EXT": "off"}).stdout.strip() == "True"


def test_pytest_does_not_warn_that_the_package_was_imported_at_start_up(run_python, tmp_path):
  site = tmp_path / "site"
  site.mkdir()
  write_package(site, "a_plugin", "# empty", entry_points={"pytest11": {"a_plugin": "a_plugin"}})
  # pytest rewrites the modules that a plugin's distribution lists.
  (site / "a_plugin-1.2.dist-info" / "RECORD").write_text("maxtext_pp_ext/__init__.py,,\n")
  (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
  code = "import pytest; raise SystemExit(pytest.main(['-W', 'error', '-p', 'no:cacheprovider', 'test_nothing.py']))"
  assert "1 passed" in _run(run_python, code, path=[site]).stdout


def test_a_patch_point_module_that_was_found_through_the_hook_keeps_its_own_loader():
  real = importlib.util.find_spec("json.decoder")
  connected = []
  wrapped = startup.PatchPointLoader(real.loader, connected.append)
  module = importlib.util.module_from_spec(real)
  module.__spec__.loader = module.__loader__ = wrapped
  wrapped.exec_module(module)
  assert connected == [module] and module.JSONDecoder.__module__ == "json.decoder"
  assert module.__loader__ is real.loader and module.__spec__.loader is real.loader
  assert wrapped.get_source("json.decoder") == real.loader.get_source("json.decoder")


@pytest.mark.parametrize("value, said", [("offf", True), ("off", False), ("", False), ("on", False)])
def test_a_value_of_the_variable_that_is_neither_on_nor_off_is_told(value, said, run_python):
  done = run_python("-c", "pass", env={"MAXTEXT_PP_EXT": value})
  assert ("none of off" in done.stderr) == said
