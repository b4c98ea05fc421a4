# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of every bad kind: no traceback, the documented exit codes, nothing written by what is refused."""

from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import pytest

from maxtext_pp_ext import cli
from tests.fuzz.common import ACCEPTED, NO, REFUSED, run

INTEGERS = st.one_of(
    st.integers(-3, 40), st.integers(), st.sampled_from([10**6, 10**12, 10**30, 2**63, -(2**63)])
).map(str)
FLOATS = st.one_of(st.floats().map(str), INTEGERS)
TEXT = st.text(max_size=12)
PATHS = st.sampled_from(
    ["a.svg", "b.png", "c.gif", "none/a.svg", "", ".svg", "a\0.svg", "é.svg", "x" * 300 + ".svg", "."]
)
# Options of the commands that do not need MaxText for what is asked here, or refuse it before.
OPTIONS = {
    "draw": {
        **dict.fromkeys(("--stages", "--microbatches", "--repeats", "--delay", "--stage"), INTEGERS),
        "--output": PATHS,
        "--json": None,
    },
    "check": {"--devices": INTEGERS, "--json": None},
    "compare": {
        "--impl": st.sampled_from(["", ",", ",,", "none,none", "é"]),
        "--devices": INTEGERS,
        "--minutes": FLOATS,
        "--memory-gib": FLOATS,
        "--output": PATHS,
    },
    "convert": {"--step": INTEGERS, "--from": TEXT, "--dry-run": None},
    "plan": {
        **dict.fromkeys(("--devices", "--top", "--validate"), INTEGERS),
        **dict.fromkeys(("--minutes", "--memory-gib", "--device-memory-gib"), FLOATS),
        "--impl": st.sampled_from(["", ",", "é"]),
        "--chip": TEXT,
    },
    "doctor": {"--no-devices": None, "--json": None},
    "sharding": {"--limit": INTEGERS, "--picture": TEXT},
}
POSITIONAL = st.lists(
    st.one_of(TEXT, st.sampled_from(["a.yml", "steps=", "=", "steps", "none/", "..", "gs://a/b"])), max_size=3
)


@st.composite
def arguments(draw):
  """A random command line: a command or another word, with right and wrong options."""
  name = draw(st.sampled_from(sorted(cli.SUBCOMMANDS)))
  found = [draw(st.one_of(st.just(name), st.just(name), st.just(name), TEXT))]
  for option in draw(st.lists(st.sampled_from(sorted(OPTIONS[name])), max_size=4)):
    values = OPTIONS[name][option]
    found.append(option)
    if values is not None:
      found.append(draw(st.one_of(values, values, values, TEXT)))
  if name != "draw" or draw(st.booleans()):
    # What is neither a file nor key=value keeps all commands from asking MaxText.
    found += [*draw(POSITIONAL), "no argument of MaxText"]
  if draw(st.booleans()):
    found.append(draw(st.sampled_from(["--unknown", "-x", "--js", "--", "-1", "--json=1", "-h"])))
  return found


def fuzz(examples):
  @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
  @given(argv=arguments())
  def test(capfd, tmp_path, tried, argv):
    tried(run(capfd, tmp_path, argv)[0])

  return test


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)


def test_any_command_line_ends_with_a_documented_code(capfd, tmp_path, tried):
  fuzz(400)(capfd, tmp_path, tried)


@pytest.mark.slow
def test_thousands_of_command_lines_end_with_a_documented_code(capfd, tmp_path, tried):
  fuzz(5000)(capfd, tmp_path, tried)


REFUSALS = {
    "a delay of nothing": ("draw", "--stages", "2", "--delay", "0"),
    "more stages than can be drawn": ("draw", "--stages", "1000000"),
    "more than can be drawn": ("draw", "--stages", "1000", "--repeats", "1000"),
    "more digits than can be read": ("draw", "--stages", "9" * 5000),
    "a number of devices that nobody has": ("check", "--devices", "1" + "0" * 20),
    "the first of less than nothing": ("sharding", "--limit", "-1"),
    "time without end": ("compare", "--minutes", "inf"),
    "no time": ("compare", "--minutes", "nan"),
    "memory without end": ("plan", "--devices", "4", "--memory-gib", "inf"),
    "devices without end": ("plan", "--devices", "1" + "0" * 18),
    "a folder for a picture": ("draw", "--stages", "2", "--output", "folder.svg"),
    "a key of no value": ("convert", "old", "new", "--from", "a=["),
    "a checkpoint with zeros in its name": ("convert", "a\0b", "new"),
    "a checkpoint with a name that is too long": ("convert", "a" * 5000, "new"),
}


@pytest.mark.parametrize("argv", REFUSALS.values(), ids=REFUSALS.keys())
def test_what_would_not_end_or_mean_something_else_is_refused(capfd, tmp_path, tried, argv):
  (tmp_path / "folder.svg").mkdir()
  (tmp_path / "old").mkdir()
  (tmp_path / "old" / "_METADATA").write_text("{}")
  outcome, said = run(capfd, tmp_path, argv)
  assert outcome == REFUSED, said
  tried(outcome)


def test_a_good_command_line_is_accepted_and_a_bad_one_refused(capfd, tmp_path):
  assert run(capfd, tmp_path, ["draw", "--stages", "2"])[0] == ACCEPTED
  assert run(capfd, tmp_path, ["draw", "--stages", "0"])[0] == REFUSED != NO
