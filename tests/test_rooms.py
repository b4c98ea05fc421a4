# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The structure in docs/extending.md: which folder may import which, and how large files and folders may be."""

import ast
import configparser
import graphlib
import pathlib
import re
import sys

import pytest

import maxtext_pp_ext

PACKAGE = pathlib.Path(maxtext_pp_ext.__file__).resolve().parent
NAME = PACKAGE.name
FILES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}
MOST_LINES, MOST_LINES_OF_FUNCTION, MOST_FILES = 400, 70, 13  # a dozen modules, and __init__.py


def _imported(module: str) -> set[str]:
  """Modules of the package that a module imports, at its top or within a function."""
  found = set()
  for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
    if isinstance(node, ast.ImportFrom) and node.module:
      found |= {name if (name := f"{node.module}.{each.name}") in FILES else node.module for each in node.names}
    elif isinstance(node, ast.Import):
      found |= {each.name for each in node.names}
  # A package's __init__ is run before any of its modules, whoever imports them.
  return {name for name in found & FILES.keys() if name not in (module, NAME)}


def _room(module: str) -> str:
  """The room of a module: its folder, within host/ the folder below it. A file beside the folders is its own room."""
  _, folder, *rest = module.split(".")
  return f"{folder}/{rest[0]}" if folder == "host" and rest else folder


def _order(arrows: dict[str, set[str]]) -> None:
  try:
    tuple(graphlib.TopologicalSorter(arrows).static_order())
  except graphlib.CycleError as error:
    pytest.fail(" → ".join(reversed(error.args[1])))


def test_no_module_imports_itself_through_others():
  _order({module: _imported(module) for module in FILES if module != NAME})


def test_no_folder_imports_itself_through_others():
  arrows: dict[str, set[str]] = {}
  for module in FILES:
    if module != NAME:
      rooms = {_room(other) for other in _imported(module)} - {_room(module)}
      arrows[_room(module)] = arrows.get(_room(module), set()) | rooms
  _order(arrows)


def test_only_host_and_what_runs_it_import_maxtext():
  at_home = {"host", "testing", "trainer_runs", "train"}
  imports = re.compile(r"^\s*(from|import) maxtext\b", re.MULTILINE)
  others = [module for module in FILES if module != NAME and module.split(".")[1] not in at_home]
  assert [module for module in others if imports.search(FILES[module].read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES.values()}), ids=lambda folder: folder.name)
def test_no_file_and_no_folder_is_too_large_to_read(folder):
  files = list(folder.glob("*.py"))
  assert len(files) <= MOST_FILES
  assert {file.name: lines for file in files if (lines := len(file.read_text("utf-8").splitlines())) > MOST_LINES} == {}


def test_no_function_is_too_long_to_read():
  found = set()
  for module, file in FILES.items():
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
      if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MOST_LINES_OF_FUNCTION:
        found.add(f"{module.removeprefix(f'{NAME}.')}.{node.name}")
  assert found == set()


def test_what_a_train_step_imports_beside_maxtext_is_a_dependency_of_the_package():
  settings = configparser.ConfigParser()
  settings.read(PACKAGE.parent / "setup.cfg")
  required = {re.split(r"[<>=]", line)[0] for line in settings["options"]["install_requires"].splitlines()}
  imported = set()
  for module, file in FILES.items():
    if module != NAME and _room(module) in ("config", "engine", "pipelines", "schedule", "sharding"):
      for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
          imported.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
          imported |= {each.name.partition(".")[0] for each in node.names}
  others = {NAME, "numpy", "annotated_types"}  # numpy comes with JAX, annotated_types with pydantic
  assert "jax" in imported and imported - sys.stdlib_module_names - others <= required
