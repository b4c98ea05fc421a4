# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's modules out of their source text: enough for the checks of its patch point, without importing MaxText.

A module gets its classes, with their fields and their bases of the same module, and its functions, with their parameters
and the names that they use. None of them can be called. All else that the module defines or imports is None.
"""

import ast
from collections.abc import Iterator
import inspect
import pathlib
import re
import types
from types import ModuleType
from typing import Any
import warnings

import pydantic

from maxtext_pp_ext.errors import SetupError


class Source:
  """A folder with MaxText's source: of its repository, or of the package."""

  def __init__(self, folder: str | pathlib.Path):
    """Raises SetupError if there is no MaxText in the folder."""
    folder = pathlib.Path(folder)
    candidates = (folder / "src" / "maxtext", folder / "maxtext", folder)
    if not (found := [each for each in candidates if (each / "configs" / "types.py").is_file()]):
      raise SetupError(f"{folder}: no source of MaxText is there. Give a folder with src/maxtext or maxtext in it.")
    self.folder = found[0]

  def version(self) -> str:
    """The version that the source gives, "unknown" if it gives none."""
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
    found = {each for statement in _statements(self._tree(name)) for each in _defined(statement)}
    file = self.file(name)
    if file is not None and file.name == "__init__.py":
      found |= {path.stem for path in file.parent.glob("*.py")}
      found |= {path.parent.name for path in file.parent.glob("*/__init__.py")}
    return found

  def module(self, name: str) -> ModuleType:
    """Returns a module that looks like MaxText's; raises SetupError if it is not there."""
    module = ModuleType(name)
    for statement in _statements(self._tree(name)):
      if isinstance(statement, ast.ClassDef):
        setattr(module, statement.name, _class(statement, module))
      elif isinstance(statement, ast.FunctionDef):
        setattr(module, statement.name, _function(statement))
      else:
        for each in _defined(statement):
          setattr(module, each, None)
    return module

  def _tree(self, name: str) -> ast.Module:
    if (file := self.file(name)) is None:
      raise SetupError(f"expected {name}, found no such module in {self.folder}.")
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


def _class(statement: ast.ClassDef, module: ModuleType) -> type:
  """A class with the methods and the annotated fields of a class statement, below its bases of the same module."""
  namespace: dict[str, Any] = {"__module__": module.__name__, "__annotations__": {}}
  for part in statement.body:
    if isinstance(part, ast.FunctionDef):
      namespace[part.name] = _function(part)
    elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
      namespace["__annotations__"][part.target.id] = Any
      namespace[part.target.id] = None
  names = [base.id for base in statement.bases if isinstance(base, ast.Name)]
  known = [pydantic.BaseModel if name == "BaseModel" else getattr(module, name, None) for name in names]
  bases = tuple(base for base in known if isinstance(base, type))
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # pydantic's, about names of fields
    return types.new_class(statement.name, bases, exec_body=lambda body: body.update(namespace))


def _function(statement: ast.FunctionDef) -> Any:
  """A function with the parameters of a function statement, and the names that it uses; it cannot be called."""

  def function(self):
    raise NotImplementedError

  names = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
  function.__code__ = function.__code__.replace(co_names=tuple(dict.fromkeys(names)))
  function.__name__ = function.__qualname__ = statement.name
  function.__signature__ = _signature(statement.args)  # type: ignore[attr-defined]
  decorators = {_name(decorator) for decorator in statement.decorator_list}
  if "model_validator" in decorators and "classmethod" not in decorators:
    return pydantic.model_validator(mode="after")(function)
  return function


def _signature(parameters: ast.arguments) -> inspect.Signature:
  """The signature of a function. A default that is no literal becomes `...`."""
  kinds = inspect.Parameter
  none: list[ast.expr | None] = [None] * (len(parameters.posonlyargs) + len(parameters.args) - len(parameters.defaults))
  defaults = iter([*none, *parameters.defaults, *parameters.kw_defaults])
  of_kinds = [
      *((each, kinds.POSITIONAL_ONLY) for each in parameters.posonlyargs),
      *((each, kinds.POSITIONAL_OR_KEYWORD) for each in parameters.args),
      *((each, kinds.VAR_POSITIONAL) for each in (parameters.vararg,) if each),
      *((each, kinds.KEYWORD_ONLY) for each in parameters.kwonlyargs),
      *((each, kinds.VAR_KEYWORD) for each in (parameters.kwarg,) if each),
  ]
  found = []
  for parameter, kind in of_kinds:
    default = None if kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) else next(defaults)
    value = default.value if isinstance(default, ast.Constant) else ...
    found.append(kinds(parameter.arg, kind, default=kinds.empty if default is None else value))
  return inspect.Signature(found)


def _name(decorator: ast.expr) -> str:
  decorator = decorator.func if isinstance(decorator, ast.Call) else decorator
  return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
