# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`maxtext-pp doctor`: what it finds in an environment that is fine, and in ones that are not."""

import importlib.metadata
import json

import pytest

from maxtext_pp_ext import cli, registry
from maxtext_pp_ext.host import doctor
from maxtext_pp_ext.host.patch_points import install, table, version


def found(subject, name):
  [finding] = [each for each in doctor.findings() if (each.subject, each.name) == (subject, name)]
  return finding


def test_nothing_is_wrong_where_the_tests_run(capsys):
  assert cli.main(["doctor", "--no-devices", "--json"]) == 0
  result = json.loads(capsys.readouterr().out)
  told = {(each["subject"], each["name"]): each for each in result["findings"]}
  assert result["wrong"] == 0
  assert {("versions", "maxtext"), ("versions", "jax"), *(("patch points", name) for name in table.PATCH_POINTS)} <= set(
      told
  )
  assert {("implementations", name) for name in registry.names()} <= set(told)
  assert told["versions", "maxtext"]["value"].startswith(importlib.metadata.version("maxtext"))


def test_a_package_that_is_missing_or_too_old_is_wrong_and_comes_with_what_to_install(monkeypatch, capsys):
  own = importlib.metadata.version
  missing = importlib.metadata.PackageNotFoundError
  versions = {"jax": "0.4.1", "flax": missing("flax")}

  def of(name):
    value = versions.get(name) or own(name)
    if isinstance(value, Exception):
      raise value
    return value

  monkeypatch.setattr(importlib.metadata, "version", of)
  assert cli.main(["doctor", "--no-devices"]) == 1
  said = capsys.readouterr().out
  assert "0.4.1" in said and "pip install 'jax>=" in said and "pip install 'flax>=" in said and "2 wrong" in said


def test_a_maxtext_that_is_not_supported_is_told_with_the_reason(monkeypatch):
  def refuse():
    raise version.HostVersionError("the version is outside that range.")

  monkeypatch.setattr(install, "install", refuse)
  finding = found("patch points", "all")
  assert finding.state == doctor.WRONG and "supports MaxText" in finding.advice


def test_a_feature_that_is_missing_is_a_note(monkeypatch):
  monkeypatch.setitem(install._missing, table.LINEN.name, "expected another signature.")
  finding = found("patch points", table.LINEN.name)
  assert (finding.state, finding.advice) == (doctor.NOTE, "expected another signature.")


def test_an_implementation_that_cannot_be_loaded_is_wrong_and_the_others_are_told(monkeypatch):
  def fail():
    raise registry.PluginError("its module is gone")

  broken = registry.Implementation(name="theirs", summary="from theirs 1.0", load=fail)
  every = {**registry._implementations(), "theirs": broken}
  monkeypatch.setattr(registry, "_implementations", lambda: every)
  finding = found("implementations", "theirs")
  assert finding.state == doctor.WRONG and finding.advice == "its module is gone"
  assert found("implementations", "circular_bsw").state == doctor.FINE


@pytest.mark.parametrize("value, advice", [("off", "Unset MAXTEXT_PP_EXT"), ("offf", "It is on.")])
def test_the_variable_that_switches_the_hook_is_told(value, advice, monkeypatch):
  monkeypatch.setenv("MAXTEXT_PP_EXT", value)
  finding = found("start-up hook", "MAXTEXT_PP_EXT")
  assert finding.state == doctor.NOTE and advice in finding.advice


def test_devices_and_the_failure_to_get_them_are_told():
  there = {"platform": "tpu", "kinds": {"TPU v5p": 4}, "count": 4, "processes": 1, "runtime": "libtpu"}
  assert doctor.of_devices(there).value == "4 × TPU v5p; libtpu"
  assert doctor.of_devices({"failure": "no driver"}).state == doctor.NOTE


def test_a_part_that_fails_does_not_hide_the_others(monkeypatch):
  monkeypatch.setattr(registry, "names", lambda: 1 / 0)
  states = {(each.subject, each.name): each.state for each in doctor.findings()}
  assert states["implementations", "not looked at"] == doctor.WRONG and states["versions", "jax"] == doctor.FINE
