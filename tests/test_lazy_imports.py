# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules that wait until they are used."""

import importlib
import sys

import pytest

from maxtext_pp_ext import lazy_imports


@pytest.fixture
def package(tmp_path, monkeypatch):
  """A package that counts how often it is executed, in `sys.executed`."""
  folder = tmp_path / "waits_here"
  folder.mkdir()
  (folder / "__init__.py").write_text("import sys; sys.executed.append(__name__); value, table = 3, {'a': 1}\n")
  (folder / "part.py").write_text("import sys; sys.executed.append(__name__); value = 4\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setattr(sys, "executed", [], raising=False)
  before = list(sys.meta_path)
  monkeypatch.setattr(sys, "meta_path", [found for found in before if not isinstance(found, lazy_imports._Finder)])
  yield "waits_here"
  for name in [name for name in sys.modules if name.split(".")[0] == "waits_here"]:
    del sys.modules[name]


def test_a_module_is_executed_on_its_first_use_and_once(package):
  lazy_imports.postpone({package: ()})
  module = importlib.import_module(package)
  assert isinstance(module, lazy_imports._Waiting) and sys.executed == []
  assert module.value == 3 and module.table == {"a": 1} and sys.executed == [package]
  assert type(module) is type(sys)


def test_a_submodule_does_not_execute_its_package(package):
  lazy_imports.postpone({package: ()})
  assert importlib.import_module(f"{package}.part").value == 4
  assert sys.executed == [f"{package}.part"]


def test_a_submodule_that_waits_is_an_attribute_of_its_package(package):
  lazy_imports.postpone({package: (), f"{package}.part": ()})
  exec(f"from {package} import part", found := {})  # pylint: disable=exec-used
  assert sys.executed == [] and found["part"].value == 4 and sys.executed == [f"{package}.part"]


def test_a_mapping_that_another_module_takes_out_waits_too(package):
  lazy_imports.postpone({package: ("table",)})
  exec(f"from {package} import table", found := {})  # pylint: disable=exec-used
  assert sys.executed == []
  assert found["table"]["a"] == 1 and "b" not in found["table"] and sys.executed == [package]
  assert sys.modules[package].table == {"a": 1} and type(sys.modules[package].table) is dict


def test_what_has_another_home_comes_from_there(package):
  lazy_imports.postpone({package: ()}, {f"{package}.imported": f"{package}.part.value"})
  assert importlib.import_module(package).imported == 4 and sys.executed == [f"{package}.part"]
  assert importlib.import_module(package).value == 3


def test_a_module_that_puts_another_object_in_its_place_is_that_object(package, tmp_path):
  text = "import sys, types; new = types.ModuleType(__name__); new.value = 5; sys.modules[__name__] = new\n"
  (tmp_path / package / "part.py").write_text(text)
  lazy_imports.postpone({f"{package}.part": ()})
  module = importlib.import_module(f"{package}.part")
  assert module.value == 5 and importlib.import_module(f"{package}.part").value == 5


def test_an_error_of_a_module_is_its_users_error_and_can_be_tried_again(package, monkeypatch):
  lazy_imports.postpone({package: ()})
  module = importlib.import_module(package)
  monkeypatch.delattr(sys, "executed")
  with pytest.raises(AttributeError, match="executed"):
    module.value  # noqa: B018  pylint: disable=pointless-statement
  monkeypatch.setattr(sys, "executed", [], raising=False)
  assert module.value == 3


def test_a_module_that_is_not_there_is_not_found(package):
  lazy_imports.postpone({f"{package}.nowhere": ()})
  with pytest.raises(ModuleNotFoundError):
    importlib.import_module(f"{package}.nowhere")
