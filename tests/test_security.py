# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a security reviewer: on all sources of the package, and on the behaviour of its start-up hook."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

from maxtext_pp_ext.host import activate, build

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "maxtext_pp_ext"
SOURCES = sorted(PACKAGE.rglob("*.py"))
HOOK = ("__init__.py", "host/__init__.py", "host/startup.py")

# What joins processes on one machine, for tests and demonstrations, asks which of its ports are free, and each process
# runs the module that it is told by name, as `python -m` does. Orbax's handlers of arrays are coroutines; one of ours
# waits for a thread.
EXCEPTIONS = {
    "checkpoint/files.py": ["imports asyncio"],
    "testing/joined.py": ["imports runpy"],
    "testing/launch.py": ["imports socket"],
}

# What runs text or bytes as code, by the names with which it is called or imported.
RUNS_CODE = {"eval", "exec", "compile", "__import__", "execfile"}
RUNS_FILES = {"runpy"}
UNPICKLES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
UNSAFE_LOADS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "torch.load"}
NETWORK = {"socket", "ssl", "http", "urllib", "urllib3", "ftplib", "smtplib", "telnetlib", "requests", "httpx", "aiohttp"}
NETWORK |= {"socketserver", "xmlrpc", "asyncio", "grpc"}


def dotted(node: ast.expr) -> str:
  """The dotted name of an expression such as `a.b.c`; empty for other expressions."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute):
    return f"{owner}.{node.attr}" if (owner := dotted(node.value)) else ""
  return ""


def imported(tree: ast.AST) -> set[str]:
  """Absolute names of imported modules, and of the names imported from them."""
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
  return found


def objections(source: str) -> list[str]:
  """The parts of a source that run text as code, start a shell, unpickle, or use a network."""
  tree, found = ast.parse(source), []
  for name in imported(tree):
    root = name.partition(".")[0]
    if root in RUNS_FILES | UNPICKLES | NETWORK or name in SHELLS | UNSAFE_LOADS:
      found.append(f"imports {name}")
  for node in ast.walk(tree):
    if isinstance(node, (ast.Name, ast.Attribute)) and dotted(node) in RUNS_CODE | SHELLS | UNSAFE_LOADS:
      found.append(f"line {node.lineno}: {dotted(node)}")
    if isinstance(node, ast.Attribute) and dotted(node).startswith(("os.exec", "os.spawn", "os.posix_spawn")):
      found.append(f"line {node.lineno}: {dotted(node)}")
    if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle", "executable"):
      if not (isinstance(node.value, ast.Constant) and node.value.value is False):
        found.append(f"line {node.value.lineno}: {node.arg}=")
  return found


@pytest.mark.parametrize("file", SOURCES, ids=[str(file.relative_to(PACKAGE)) for file in SOURCES])
def test_no_source_runs_text_as_code_starts_a_shell_unpickles_or_talks_to_a_network(file):
  assert objections(file.read_text(encoding="utf-8")) == EXCEPTIONS.get(file.relative_to(PACKAGE).as_posix(), [])


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "run = exec",
        "__import__('os')",
        "import pickle",
        "def f():\n  from pickle import loads",
        "import os\nos.system('ls')",
        "from os import system",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import numpy\nnumpy.load('a', allow_pickle=value)",
        "import yaml\nyaml.load('a')",
        "import urllib.request",
        "from runpy import run_path",
        "import asyncio",
        "from xmlrpc import client",
        "import os\nos.execv('a', [])",
    ],
)
def test_each_forbidden_construct_is_objected_to(source):
  assert objections(source)


def test_the_hook_imports_nothing_but_the_standard_library_and_is_short():
  at_import = {}
  for name in HOOK:
    source = (PACKAGE / name).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 100
    body = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    at_import[name] = imported(ast.Module(body=body, type_ignores=[]))
    # What it has of the package it imports when it is called, or when MaxText is imported.
    later = {each.partition(".")[0] for each in imported(ast.parse(source)) - at_import[name]}
    assert later <= {"maxtext_pp_ext"}
  assert at_import == {"__init__.py": set(), "host/__init__.py": set(), "host/startup.py": {"os", "sys"}}


def test_both_ways_to_install_the_hook_write_the_same_one_line():
  assert build.PTH_NAME == activate.PTH_NAME == "maxtext_pp_ext.pth"
  assert build.PTH_LINE == activate.PTH_LINE and activate.PTH_LINE.count("\n") == 1


# What an interpreter does, as it reports it to an audit hook, and which environment variables it looks at.
AUDITED = """
import json, os, sys

events, read = [], []

class Environment(type(os.environ)):

  def __getitem__(self, key):
    read.append(key)
    return super().__getitem__(key)

environment = Environment(
    os.environ._data, os.environ.encodekey, os.environ.decodekey, os.environ.encodevalue, os.environ.decodevalue
)
watching = False
sys.addaudithook(lambda name, args: watching and events.append((name, [str(a) for a in args])))
os.environ = environment
watching = True
{hook}
import json.tool, email.message, concurrent.futures.thread  # as any program does
watching = False
print(json.dumps([events, read]))
"""


def audited(hook: str) -> tuple[list, list]:
  environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"}
  done = subprocess.run(
      [sys.executable, "-S", "-c", AUDITED.replace("{hook}", hook)],
      capture_output=True,
      text=True,
      env=environment,
      timeout=60,
      check=True,
  )
  events, read = json.loads(done.stdout)
  return events, read


def test_at_start_up_the_hook_reads_its_own_files_and_its_own_variable_and_does_nothing_else():
  events, read = audited(activate.PTH_LINE.strip())
  without, _ = audited("pass")
  assert [key for key in read if key not in ("PATH",)] == ["MAXTEXT_PP_EXT"]
  names = {name for name, _ in events}
  assert "import" in names and "open" in names  # the audit hook sees something
  allowed = {"import", "open", "exec", "compile", "marshal.loads", "marshal.load", "os.listdir", "sys._getframe"}
  assert names - {name for name, _ in without} <= allowed, names
  opened = [args for name, args in events if name == "open" and str(PACKAGE) in args[0]]
  files = {pathlib.Path(args[0]).name.partition(".")[0] for args in opened}
  assert files == {"__init__", "startup"}
  others = {args[0] for name, args in events if name == "open"} - {args[0] for args in opened}
  assert others == {args[0] for name, args in without if name == "open"}
  for _, mode, flags in opened:
    assert mode == "r" or mode == "rb" or not int(flags) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
  imports = {args[0] for name, args in events if name == "import"} - {
      args[0] for name, args in without if name == "import"
  }
  assert imports == {"maxtext_pp_ext", "maxtext_pp_ext.host", "maxtext_pp_ext.host.startup"}
