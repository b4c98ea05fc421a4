# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command itself: help, errors and exit codes."""

import json
import subprocess
import sys
import types

import pytest

from maxtext_pp_ext import cli
from maxtext_pp_ext.cli import errors
from maxtext_pp_ext.host.models import run_config


@pytest.mark.parametrize(
    "command", [[], *([name] for name in cli.SUBCOMMANDS)], ids=lambda c: " ".join(c) or "maxtext-pp"
)
def test_help_imports_nothing_heavy(command):
  code = f"""
import sys
from maxtext_pp_ext import cli
try:
  cli.main([*{command!r}, "--help"])
finally:
  heavy = {{"jax", "numpy", "maxtext", "orbax", "matplotlib", "rich"}} & set(sys.modules)
  assert not heavy, heavy
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
  assert done.returncode == 0 and "exit codes:" in done.stdout, done.stderr


def test_every_subcommand_has_its_module():
  for name in cli.SUBCOMMANDS:
    module = __import__(f"maxtext_pp_ext.cli.{name}", fromlist=["run"])
    assert callable(module.run) and callable(module.add_arguments) and module.__doc__


def test_an_unknown_subcommand_is_told_with_those_that_there_are(capsys):
  with pytest.raises(SystemExit) as stopped:
    cli.main(["plam"])
  assert stopped.value.code == 2 and "no subcommand 'plam': choose from check, " in capsys.readouterr().err


OUTCOMES = {
    "done": (lambda args: None, 0, ""),
    "an answer that is no": (lambda args: 1, 1, ""),
    "an error of the user's": (errors.CommandError("no such thing"), 2, "maxtext-pp: no such thing"),
    "a failure": (errors.CommandError("disk full", errors.FAILED), 1, "maxtext-pp: disk full"),
    "interrupted": (KeyboardInterrupt(), 130, "maxtext-pp: interrupted"),
    "a package that is missing": (
        ModuleNotFoundError("No module named 'rich'", name="rich"),
        2,
        "maxtext-pp: rich is not installed.",
    ),
}


@pytest.mark.parametrize("outcome, code, message", OUTCOMES.values(), ids=OUTCOMES.keys())
def test_exit_codes_and_one_message_on_stderr(monkeypatch, capsys, outcome, code, message):
  def run(args):
    if isinstance(outcome, BaseException):
      raise outcome
    return outcome(args)

  monkeypatch.setitem(cli.SUBCOMMANDS, "fake", "for a test")
  module = types.SimpleNamespace(run=run, add_arguments=lambda parser: None, __doc__="Fake.")
  monkeypatch.setitem(sys.modules, "maxtext_pp_ext.cli.fake", module)
  assert cli.main(["fake", "my.yml", "--json", "a=1"]) == code
  said = capsys.readouterr()
  assert said.out == "" and said.err.startswith(message) and said.err.count("\n") == bool(message)


def test_options_may_stand_between_maxtexts_arguments(monkeypatch):
  seen = []
  monkeypatch.setitem(cli.SUBCOMMANDS, "fake", "for a test")
  module = types.SimpleNamespace(run=seen.append, add_arguments=lambda parser: parser.add_argument("place"), __doc__="")
  monkeypatch.setitem(sys.modules, "maxtext_pp_ext.cli.fake", module)
  cli.main(["fake", "here", "my.yml", "--json", "a=1", "b=2"])
  assert seen[0].place == "here" and seen[0].maxtext_args == ["my.yml", "a=1", "b=2"] and seen[0].json


OPTIONS = {
    "a mistyped option": (["plan", "--devcies", "8"], "no option of maxtext-pp plan; did you mean '--devices'?"),
    "its value": (["check", "--device", "8"], "--device is no option of maxtext-pp check; did you mean '--devices'?\n"),
    "an option like none": (["draw", "--zzqqxx"], "--zzqqxx is no option of maxtext-pp draw\n"),
    "a key with dashes": (["check", "--base_emb_dim=4"], "if it is a key of MaxText's, write base_emb_dim=4\n"),
}


@pytest.mark.parametrize("argv, message", OPTIONS.values(), ids=OPTIONS.keys())
def test_an_unknown_option_is_told_with_what_it_is_like(capsys, argv, message):
  with pytest.raises(SystemExit) as stopped:
    cli.main(argv)
  assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_reader_who_leaves_early_causes_no_traceback():
  command = [sys.executable, "-m", "maxtext_pp_ext.cli", "draw", "--stages", "2", "--microbatches", "2000", "--json"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == "{\n"
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 141


WRONG = {
    "no such checkpoint": (["convert", "{}/nothing", "{}/new", "a.yml"], "nothing does not exist."),
    "no checkpoint": (["convert", "{}", "{}/new", "a.yml"], "There is no Orbax checkpoint in"),
    "a file": (["convert", __file__, "{}/new", "a.yml"], "is a file. A checkpoint is a folder."),
    "no file system": (["convert", "gs://bucket/a", "{}/new"], "only files can be converted"),
    "no run to check": (["check"], "Which run? Give a .yml file"),
    "no run to compile": (["compare", "--impl", "none"], "Which run? Give a .yml file"),
    "no run whose parameters are sharded": (["sharding"], "Which run? Give a .yml file"),
    "draw without sizes": (["draw"], "give --stages with --microbatches"),
    "draw with both": (["draw", "a.yml", "--stages", "4"], "give either --stages or CONFIG"),
    "a schedule that cannot be": (
        ["draw", "--stages", "4", "--microbatches", "6"],
        "microbatches (6) must be a multiple of stages (4)",
    ),
    "a stage that is not": (["draw", "--stages", "4", "--stage", "4"], "the stages are 0 to 3"),
    "a picture of no kind": (["draw", "--stages", "4", "--output", "{}/a.gif"], "has to end in .svg or .png"),
    "a picture nowhere": (["draw", "--stages", "4", "--output", "{}/b/a.svg"], "there is no folder"),
}


@pytest.mark.parametrize("argv, message", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_work_is_reported_at_once(tmp_path, capsys, argv, message):
  assert cli.main([text.format(tmp_path) for text in argv]) == 2
  said = capsys.readouterr()
  assert message in said.err and said.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("empty.yml", "", "empty.yml has no keys."),
        ("run.yml", "base_config: base/away.yml\nmodel_name: llama3-8b\n", "run.yml has base_config: base/away.yml, and"),
    ],
)
def test_a_file_that_says_no_run_is_named(tmp_path, monkeypatch, capsys, name, text, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / name).write_text(text, encoding="utf-8")
  assert cli.main(["sharding", name]) == 2
  assert message in capsys.readouterr().err


def test_a_folder_is_no_file(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "a.yml").mkdir()
  assert cli.main(["check", "a.yml"]) == 2 and "a.yml is a folder." in capsys.readouterr().err


def test_from_names_keys_of_maxtext(tmp_path, capsys):
  (tmp_path / "0" / "items").mkdir(parents=True)
  (tmp_path / "0" / "items" / "_METADATA").touch()
  argv = ["convert", str(tmp_path), str(tmp_path / "new"), "model_name=llama3-8b", "--from", "opt_tpye=sgd"]
  assert cli.main(argv) == 2
  assert "--from: 'opt_tpye' is no key of MaxText's config; did you mean 'opt_type'?" in capsys.readouterr().err


def test_an_interruption_that_a_library_replaced_is_no_error_of_a_config():
  with pytest.raises(KeyboardInterrupt), run_config.as_value_errors("read this config"):
    try:
      raise KeyboardInterrupt
    except KeyboardInterrupt:
      raise AttributeError("'NoneType' object has no attribute 'flags'")  # pylint: disable=raise-missing-from # noqa: B904


def test_draw_prints_the_schedule_for_programs(capsys):
  assert cli.main(["draw", "--stages", "2", "--microbatches", "2", "--repeats", "2", "--json"]) == 0
  drawn = json.loads(capsys.readouterr().out)
  assert drawn["iterations"] == 5 and len(drawn["forward"]) == len(drawn["backward"]) == 5
  assert drawn["forward"][1] == {
      "iteration": 1,
      "repeat": 0,
      "microbatch": 1,
      "current": 0,
      "arriving": 1,
      "reducing": None,
      "chunk": 1,
      "turns": True,
  }
