# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmarks' command lines and tables. They compile nothing."""

import types

import pytest

from benchmarks import commands, compiler_figures, plan_error, shapes, tables


def row(**figures):
  return {
      "temp_GB": 10.0,
      "peak_GB": 8.0,
      "arg_GB": 2.0,
      "wire_GB": {"all-gather": 3.0, "between slices": 0.5},
      "wire_total_GB": 3.5,
      "weight_gathers": 280,
      "compile_s": 40.0,
      "compile_cpu_s": 60.0,
      "versions": {"jax": "1"},
      **figures,
  }


def test_a_table_has_ratios_to_the_hosts_plain_pipeline_and_says_what_was_not_computed():
  rows = {
      shapes.PLAIN: row(projection={"step_s": 1.0}),
      "circular_bsw": row(temp_GB=9.0, wire_total_GB=1.75, projection={"step_s": 0.9}),
      "host ag_once": {"failure": "stopped after 90 s: more than 24 GiB of host memory", "versions": {"jax": "1"}},
  }
  text = compiler_figures.report({"llama3-70b": rows})
  (line,) = [line for line in text.splitlines() if line.startswith("| circular_bsw")]
  cells = [cell.strip() for cell in line.strip("|").split("|")]
  assert cells[1:6] == ["0.900 (0.90×)", "9.0 (0.90×)", "8.0 (1.00×)", "2.0", "1.8 (0.50×)"]
  assert cells[13:15] == ["0.50", "280"]
  assert "- host ag_once: stopped after 90 s: more than 24 GiB of host memory" in text
  assert "python -m benchmarks.compiler_figures --shape llama3-70b" in text


def test_rows_with_flags_stand_below_those_without():
  rows = {name: row() for name in ("circular_bsw, DENSE_VMEM_LIMIT_FLAG", "circular_bsw", "none", "none, A, B")}
  rows["host BSW, A"] = {"failure": "stopped", "versions": {"jax": "1"}}
  text = compiler_figures.report({"llama3-70b": rows})
  first = [line.strip("| ").partition(" |")[0].strip() for line in text.splitlines() if line.startswith("| ")]
  assert first[2:] == ["none", "none, A, B", "circular_bsw", "circular_bsw, DENSE_VMEM_LIMIT_FLAG"]
  assert "- host BSW, A: stopped" in text


def _first_column(text):
  return [line.strip("| ").partition(" |")[0].strip() for line in text.splitlines() if line.startswith("| ")][2:]


def test_the_fastest_flags_of_each_pipeline_are_compared_and_slower_ones_are_listed():
  seconds = {
      shapes.PLAIN: 2.0,
      f"{shapes.PLAIN}, A": 1.6,
      f"{shapes.PLAIN}, B": 1.5,
      "window, A": 1.2,
      "window, A, B": 1.3,
      "window, kept activations": 1.0,
      "window, kept activations, A": 0.9,
  }
  text = compiler_figures.report({"llama3-70b": {name: row(projection={"step_s": s}) for name, s in seconds.items()}})
  assert _first_column(text) == [
      *("window, A", "window, kept activations", "window, kept activations, A"),
      *(shapes.PLAIN, f"{shapes.PLAIN}, B"),
  ]
  assert "1.200 (0.80×)" in text and "- window, A, B: 1.300 s" in text and f"- {shapes.PLAIN}, A: 1.600 s" in text
  assert "0.900 |" in text  # MaxText's plain pipeline with kept activations is not in the table


@pytest.fixture
def searched(monkeypatch, tmp_path):
  """Runs `compiler_figures` with a compiler that VMEM makes faster; returns the arguments of what it compiled."""
  asked = []

  def compile_step(arguments, **_):
    asked.append(arguments)
    return row(projection={"step_s": 1.0 if "vmem_limit_kib=98304" in " ".join(arguments) else 2.0})

  def run(*given):
    asked.clear()
    compiler_figures.main([*given, "--output", str(tmp_path / "figures")])
    return list(asked)

  monkeypatch.setattr(compiler_figures.compile_step, "compile_step", compile_step)
  return run


def test_a_search_of_flags_goes_on_where_it_was(searched, tmp_path, capsys):
  given = ("--shape", "llama3-70b", "--impl", "window", "--keep", "--flags", "best")
  assert len(first := searched(*given)) > 10 and all("mlpwi_0=device" in arguments for arguments in first)
  assert "window, kept activations, DENSE_VMEM_LIMIT_FLAG" in capsys.readouterr().out
  assert searched(*given) == []
  rows = tables.read(tmp_path / "figures.json")
  del rows["llama3-70b"]["window, kept activations, MOE_VMEM_LIMIT_FLAG"]
  tables.write(tmp_path / "figures.json", rows)
  (again,) = searched(*given)
  assert "compile_xla_flags=--xla_tpu_scoped_vmem_limit_kib=81920" in again


def test_a_shape_without_a_policy_has_no_rows_with_kept_activations(searched, capsys):
  with pytest.raises(SystemExit):
    searched("--shape", "deepseek3-671b", "--keep")
  assert "no policy of kept activations for deepseek3-671b" in capsys.readouterr().err


def test_flags_that_cannot_be_used_end_the_command_before_anything_is_compiled(capsys):
  for given, words in ((["DENSE"], "no such set"), (["DENSE_VMEM_LIMIT_FLAG", "MOE_VMEM_LIMIT_FLAG"], "is 98304 by")):
    with pytest.raises(SystemExit):
      compiler_figures.main(["--flags", *given])
    assert words in capsys.readouterr().err


def test_without_the_hosts_plain_pipeline_there_are_no_ratios():
  text = compiler_figures.report({"mixtral-8x7b": {"circular": row()}})
  assert "10.0" in text
  assert "×)" not in text.split("## ")[1]


def test_rows_over_slices_have_the_seconds_at_the_nominal_rate_too():
  rows = {"circular": row(projection={"step_s": 2.0, "at_nominal_rate_s": 1.25}), "none": row(projection={"step_s": 3.0})}
  header, _, none, circular = compiler_figures.report({"llama3-8b-dcn": rows}).split("## ")[1].splitlines()[4:8]
  assert header.endswith("step s at the nominal rate |")
  assert circular.endswith(" 1.250 |") and none.endswith(f" {tables.MISSING} |")


@pytest.mark.parametrize("name", ["host-plain", "host plain", "HOST-BSW", "circular_bsw"])
def test_an_implementation_is_known_by_what_one_can_type(name):
  assert shapes.implementation(name) in shapes.IMPLEMENTATIONS


def test_an_unknown_implementation_is_refused_with_the_choices():
  with pytest.raises(ValueError, match="circular_bsw"):
    shapes.implementation("zero-bubble")


def test_configurations_of_a_shape_differ_only_in_what_chooses_the_pipeline():
  shape = shapes.SHAPES["llama3-70b"]
  plain, ours, none = (set(shapes.arguments(shape, impl)) for impl in (shapes.PLAIN, "circular_bsw", "none"))
  # Of the keys that refine ours MaxText's own gets the defaults.
  auto = {
      *("pipeline_grad_accum_dtype=auto", "pipeline_gather_dtype=auto"),
      *("pipeline_remat_iterations=0", "pipeline_remat_tensors="),
  }
  assert plain ^ ours == {"pipeline_impl=host", "pipeline_impl=circular_bsw"} | auto
  assert none - plain >= {"ici_pipeline_parallelism=1", "ici_fsdp_parallelism=128"}


def test_columns_of_a_table_line_up():
  lines = tables.markdown(("a", "number"), [("long name", "1"), ("b", "22.5")]).splitlines()
  assert len({len(line) for line in lines}) == 1
  assert lines[1] == "| :-------- | -----: |"


def test_the_slowest_model_comes_first_and_a_star_says_what_takes_longer_than_it_is_meant_to():
  results = {
      "llama3-8b": {"plan": {"cpu_s": 7.04, "exit_code": 0}},
      "gpt3-175b": {"plan": {"cpu_s": 16.2, "exit_code": 0}, "check": {"cpu_s": 6.0, "exit_code": 2}},
  }
  lines = commands.report(results, {"jax": "1"}).splitlines()
  slow, quick = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[-2:])
  assert slow == ["gpt3-175b", "16.2 *", "", "6.0", "refused"] and quick == ["llama3-8b", "7.0", "", tables.MISSING, ""]


def test_every_model_of_maxtext_is_asked_for():
  assert {"llama3-70b", "deepseek3-671b", "gpt-oss-120b"} < set(commands.models())
  assert "attention=dot_product" in commands.arguments("plan", "deepseek3.2-671b")


def test_rows_that_were_scaled_instead_of_compiled_again_are_named():
  rows = {"none": {"scaled": "kernels"}, "window": {}, "circular": {"scaled": "kernels"}}
  assert tables.scaled(rows.items()) == ["Not compiled again, but scaled: kernels. So it is with none; circular."]
  assert tables.scaled([("window", {})]) == []


def test_of_each_shape_the_fastest_row_of_an_implementation_is_ranked_beside_those_that_keep_as_much():
  def of(title, impl, projected, predicted):
    return plan_error.Case(title, impl, [], row(projection={"step_s": projected})), (
        None,
        types.SimpleNamespace(seconds=predicted),
    )

  rows = [of("a", "none", 1.00, 9.0), of("a", "none, A", 0.90, 2.0), of("a", "window", 0.80, 1.0)]
  assert "In 1 of 1 shapes" in plan_error.ranking(rows)
  rows += [of("a", "none, kept activations", 0.5, 0.1), of("b", "none", 1.0, 1.0), of("b", "window", 1.03, 0.9)]
  assert "In 1 of 2 shapes" in plan_error.ranking(rows)  # the rows that keep are one implementation's
  rows += [of("c", "none", 1.0, 1.0), of("c", "window", 1.02, 0.9)]
  assert "In 2 of 3 shapes" in plan_error.ranking(rows)
