# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Does this package fit a MaxText that is not installed? Judged by its source, which is read and not run.

It looks at what the patch points replace, with their own checks, and at every module and name of MaxText that this
package imports. It cannot see what a function of MaxText does, so a MaxText that passes is not yet a tested one.
"""

import ast
from collections.abc import Iterator
import functools
import pathlib

import maxtext_pp_ext
from maxtext_pp_ext.errors import SetupError
from maxtext_pp_ext.host.doctor import Finding, looked, NOTE, WRONG
from maxtext_pp_ext.host.patch_points import source, table, version


def findings(folder: str | pathlib.Path) -> list[Finding]:
  """Returns what was found of MaxText's source in a folder. Raises SetupError if there is none."""
  found = source.Source(folder)
  parts = {"source": _version, "patch points": _patch_points, "imports": _imports}
  return [each for subject, look in parts.items() for each in looked(subject, functools.partial(look, found))]


def _version(found: source.Source) -> Iterator[Finding]:
  text = f"{found.version()} ({version.SUPPORTED}), {found.folder}"
  try:
    version.check_version(found.version())
    yield Finding("maxtext", text)
  except version.HostVersionError as error:
    yield Finding("maxtext", text, WRONG, error.difference)


def _patch_points(found: source.Source) -> Iterator[Finding]:
  for name, parts in table.PATCH_POINTS.items():
    try:
      module = found.module(name)
    except SetupError as error:
      yield Finding(name, f"missing: {table.purpose(parts)}", WRONG if parts[0].required else NOTE, str(error))
      continue
    for part in parts:
      try:
        part.check(module)
        yield Finding(name, f"fits: {part.name}")
      except version.HostVersionError as error:
        yield Finding(name, f"differs: {part.name}", WRONG if part.required else NOTE, error.difference)


def _imports(found: source.Source) -> Iterator[Finding]:
  """What this package imports of MaxText, and the attributes of imported modules that it reads."""
  readers: dict[tuple[str, str], str] = {}
  package = pathlib.Path(maxtext_pp_ext.__path__[0])
  for path in sorted(package.rglob("*.py")):
    for read in _read(ast.parse(path.read_text("utf-8")), found):
      readers.setdefault(read, path.relative_to(package).as_posix())
  missing = []
  for (module, name), reader in sorted(readers.items()):
    try:
      known = not name or name in found.names(module)
    except SetupError:
      known = False
    if not known:
      missing.append(Finding(f"{module}.{name}", "not there", WRONG, f"{reader} reads it."))
  yield Finding("maxtext", f"{len(readers) - len(missing)} of {len(readers)} names are there")
  yield from missing


def _read(tree: ast.Module, found: source.Source) -> Iterator[tuple[str, str]]:
  """(module, name) of what a file of ours reads of MaxText; name "" for a module alone."""
  modules = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((alias.name, "") for alias in node.names if alias.name.startswith("maxtext."))
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "maxtext" and not node.level:
      for alias in node.names:
        path = f"{node.module}.{alias.name}"
        if found.file(path) is not None:
          modules[alias.asname or alias.name] = path
          yield path, ""
        else:
          yield str(node.module), alias.name
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
      # Python gives each module names with underscores, and protobuf makes those of generated modules when it runs.
      if not node.attr.startswith("__") and not modules[node.value.id].endswith("_pb2"):
        yield modules[node.value.id], node.attr
