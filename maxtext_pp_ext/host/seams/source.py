# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's modules out of their source text: enough of each for the checks of its seam, without importing MaxText.

A module gets its functions and classes, with their parameters, bodies and bases of the same module. Nothing of it is
called. Decorators, annotations and defaults that are no literals are left out. All else that the module defines or
imports is a name without a value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
import pathlib
import re
from types import ModuleType
from typing import Any
import warnings

import pydantic

from maxtext_pp_ext.errors import SetupError

# Decorators that checks look for, or without which a class cannot be made.
_KEPT = ("model_validator", "classmethod", "staticmethod", "property")
_UNREAD = "__unread__"


class Source:
  """A folder with MaxText's source: of its repository, or of the package."""

  def __init__(self, folder: str | pathlib.Path):
    """Raises SetupError if there is no MaxText in the folder."""
    folder = pathlib.Path(folder)
    candidates = (folder / "src" / "maxtext", folder / "maxtext", folder)
    found = [each for each in candidates if (each / "configs" / "types.py").is_file()]
    if not found:
      raise SetupError(f"{folder}: no source of MaxText is there. Give a folder with src/maxtext or maxtext in it.")
    self.folder = found[0]

  def version(self) -> str:
    """Returns the version that the source gives, "unknown" if it gives none."""
    for file in (self.folder / "version.py", self.folder / "__init__.py"):
      match = re.search(r"^__version__\s*=\s*[\"']([^\"']+)", file.read_text("utf-8"), re.M) if file.is_file() else None
      if match:
        return match.group(1)
    return "unknown"

  def file(self, name: str) -> pathlib.Path | None:
    """Returns the file of a module `maxtext.…`, None if there is none."""
    path = self.folder.joinpath(*name.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)

  def names(self, name: str) -> set[str]:
    """Returns what a module defines or imports, and the modules below it. Raises SetupError if it is not there."""
    file = self._existing(name)
    below = {path.stem for path in file.parent.glob("*.py")} if file.name == "__init__.py" else set()
    below |= {path.parent.name for path in file.parent.glob("*/__init__.py")} if below else set()
    return below | {found for statement in _statements(self._tree(file)) for found in _defined(statement)}

  def module(self, name: str) -> ModuleType:
    """Returns a module that looks like MaxText's; raises SetupError if it is not there."""
    file = self._existing(name)
    module = ModuleType(name)
    names = {"BaseModel": pydantic.BaseModel, "model_validator": pydantic.model_validator, "Any": Any, _UNREAD: None}
    vars(module).update(names)
    bare = ast.Module(body=list(_bare_module(self._tree(file))), type_ignores=[])
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # pydantic's, about names of fields
      exec(compile(ast.fix_missing_locations(bare), str(file), "exec"), vars(module))  # pylint: disable=exec-used
    return module

  def _existing(self, name: str) -> pathlib.Path:
    file = self.file(name)
    if file is None:
      raise SetupError(f"expected {name}, found no such module in {self.folder}.")
    return file

  def _tree(self, file: pathlib.Path) -> ast.Module:
    try:
      return ast.parse(file.read_text("utf-8"), str(file))
    except SyntaxError as error:
      raise SetupError(f"{file} cannot be read by this Python: {error}") from None


def _statements(tree: Any) -> Iterator[ast.stmt]:
  """The statements of a module, with those under its `if`, `try` and `with`."""
  for statement in tree.body:
    if isinstance(statement, ast.If | ast.Try | ast.With):
      yield from _statements(statement)
      for part in (*getattr(statement, "handlers", ()), *getattr(statement, "orelse", ())):
        yield from _statements(part) if hasattr(part, "body") else (part,)
    else:
      yield statement


def _defined(statement: ast.stmt) -> Iterator[str]:
  """The names that a statement binds."""
  if isinstance(statement, ast.Import | ast.ImportFrom):
    for alias in statement.names:
      yield alias.asname or alias.name.split(".")[0]
  elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
    yield statement.name
  else:
    stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    yield from (node.id for node in stored)


def _bare_module(tree: ast.Module) -> Iterator[ast.stmt]:
  classes = {"BaseModel"}
  for statement in _statements(tree):
    if isinstance(statement, ast.ClassDef):
      yield _bare_class(statement, classes)
      classes.add(statement.name)
    elif isinstance(statement, ast.FunctionDef):
      yield _bare_function(statement)
    else:
      for name in _defined(statement):
        if name not in ("BaseModel", "model_validator"):
          yield ast.parse(f"{name} = {_UNREAD}").body[0]


def _bare_class(statement: ast.ClassDef, classes: Iterable[str]) -> ast.ClassDef:
  body: list[ast.stmt] = []
  for part in statement.body:
    if isinstance(part, ast.FunctionDef):
      body.append(_bare_function(part))
    elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
      body += ast.parse(f"{part.target.id}: Any = None").body
  bases: list[ast.expr] = [base for base in statement.bases if isinstance(base, ast.Name) and base.id in classes]
  return ast.ClassDef(
      name=statement.name, bases=bases, keywords=[], body=body or [ast.Pass()], decorator_list=[], type_params=[]
  )


def _bare_function(function: ast.FunctionDef) -> ast.FunctionDef:
  function.decorator_list = [each for each in function.decorator_list if _name(each) in _KEPT]
  function.returns = None
  parameters = function.args
  for each in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, parameters.vararg, parameters.kwarg):
    if each is not None:
      each.annotation = None
  parameters.defaults = [_bare_default(default) for default in parameters.defaults]
  parameters.kw_defaults = [default and _bare_default(default) for default in parameters.kw_defaults]
  return function


def _bare_default(default: ast.expr) -> ast.expr:
  return default if isinstance(default, ast.Constant) else ast.Constant(value=...)


def _name(decorator: ast.expr) -> str:
  decorator = decorator.func if isinstance(decorator, ast.Call) else decorator
  return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
