# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`maxtext-pp plan`, as a command."""

import dataclasses
import json
import re

import pytest

from maxtext_pp_ext import cli
from maxtext_pp_ext.compiled import compare
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.host.models import abstract_model, run_config
from maxtext_pp_ext.plan import choice
from maxtext_pp_ext.plan.result import divisions
from tests.host.common import TINY
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import
from tests.marks import slow_but

# 8 devices, 16 rows, 6 layers: 2, 4 or 8 stages could be, of which 4 and 8 do not divide the layers.
SIX_LAYERS = tuple(key for key in TINY if "num_decoder_layers" not in key) + ("base_num_decoder_layers=6",)

EXPERTS = (
    *("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=32"),
    "capacity_factor=1.25",
)


@pytest.fixture
def plan(installed, capfd):  # noqa: F811  pylint: disable=redefined-outer-name
  import maxtext.utils.model_creation_utils  # noqa: F401  it prints when it is first imported

  capfd.readouterr()

  def run(*arguments):
    status = cli.main(["plan", *SIX_LAYERS, *arguments])
    return status, capfd.readouterr()

  return run


def test_every_combination_is_there_and_what_cannot_be_has_its_reason(plan):
  status, captured = plan("--devices", "8", "--all", "--json")
  found = json.loads(captured.out)
  assert status == 0 and found["devices"] == 8
  layouts = {
      (row["impl"], row["stages"], row["repeats"], row["layers_per_stage"], row["microbatches"])
      for row in found["candidates"]
  }
  expected = {("none", 1, None, 6, None)}
  for impl in ("circular", "circular_bsw", "circular_ag_once"):
    expected |= {(impl, 2, repeats, 3 // repeats, m) for repeats in (1, 3) for m in (2, 4)}
    expected |= {(impl, 1, 6, 1, m) for m in (1, 2)}  # without a pipeline
  assert layouts == expected
  reasons = {each["keys"]["ici_pipeline_parallelism"]: each["reason"] for each in found["infeasible"]}
  assert set(reasons) == {4} and "cannot be divided among 4 stages" in reasons[4]


def test_what_the_run_says_of_its_pipeline_is_not_chosen_otherwise(plan):
  pinned = ("ici_pipeline_parallelism=2", "num_layers_per_pipeline_stage=3", "num_pipeline_microbatches=4")
  _, captured = plan("--devices", "8", "--all", "--json", *pinned)
  rows = [row for row in json.loads(captured.out)["candidates"] if row["impl"] != "none"]
  assert {(row["stages"], row["layers_per_stage"], row["microbatches"]) for row in rows} == {(2, 3, 4)}
  _, captured = plan("--devices", "8", "--all", "--json", pinned[0], "num_pipeline_microbatches=8")
  found = json.loads(captured.out)
  assert [row["impl"] for row in found["candidates"]] == ["none"]
  assert {each["reason"] for each in found["infeasible"]} == {"num_pipeline_microbatches=8: here only 2, 4 can be."}
  _, captured = plan("--devices", "8", "--chip", "v5e", *pinned, "remat_policy=minimal")
  said = " ".join(captured.out.split())
  assert f"as the run says: {' '.join(pinned[::2])}" in said.replace(" num_layers_per_pipeline_stage=3", "")
  assert "remat_policy=minimal" in said and "remat_policy=custom" not in said


def test_each_batch_has_the_costs_of_a_run_with_it_and_the_fastest_token_comes_first(plan):
  options = ("--devices", "8", "--chip", "v5e", "--impl", "none,circular_bsw", "--all", "--json")
  _, captured = plan(*options, "--batch", "3,2.0")
  together = json.loads(captured.out)["candidates"]
  alone = []
  for batch in (3, 2.0):
    _, captured = plan(*options, f"per_device_batch_size={batch}")
    rows = json.loads(captured.out)["candidates"]
    alone += [row | {"keys": row["keys"] | {"per_device_batch_size": batch}} for row in rows]
  ordered = lambda rows: sorted(rows, key=lambda row: json.dumps(row["keys"], sort_keys=True))
  assert ordered(together) == ordered(alone)
  _, captured = plan(*options[:-2], "--batch", "1,1.0625")
  refused = "cannot be: per_device_batch_size=1.0625: That is 8.5 sequences for 8 devices, no whole number."
  assert refused in " ".join(captured.out.split())
  rates = [row["tokens_per_s"] for row in together]
  assert rates == sorted(rates, reverse=True) and len({row["keys"]["per_device_batch_size"] for row in together}) == 2


def test_a_global_batch_is_divided_into_devices_and_parts(plan):
  assert divisions(24, 4) == [
      {"per_device_batch_size": batch, "gradient_accumulation_steps": parts}
      for batch, parts in ((6, 1), (3, 2), (2, 3), (1, 6))
  ]
  assert len(divisions(10**12, 1)) == 169
  assert divisions(2, 4) == [{"per_device_batch_size": 0.5, "gradient_accumulation_steps": 1}]
  _, captured = plan("--devices", "8", "--chip", "v5e", "--global-batch", "16", "--impl", "none", "--all")
  rows = [line.split() for line in captured.out.splitlines() if re.match(r"\s*\d+\s+none", line)]
  assert {tuple(row[2:4]) for row in rows} == {("2", "1"), ("1", "2")}
  assert "per_device_batch_size=1 gradient_accumulation_steps=2" in captured.out


def test_each_part_of_accumulated_gradients_computes_and_sends_as_much(plan):
  def of(parts):
    _, captured = plan(
        "--devices", "8", "--chip", "v5e", "--json", "--impl", "none", f"gradient_accumulation_steps={parts}"
    )
    [row] = json.loads(captured.out)["candidates"]
    return row

  one, four = of(1), of(4)
  assert four["sent"]["total"] == pytest.approx(4 * one["sent"]["total"], rel=1e-3)
  assert four["memory"]["bytes"]["gradients_of_parts"] == one["memory"]["bytes"]["parameters"]
  assert one["seconds"] == pytest.approx(sum(one["seconds_of"].values()))
  for part, seconds in one["seconds_of"].items():
    assert four["seconds_of"][part] == pytest.approx(seconds * (1 if part == "optimizer" else 4))


# 2 × 4 × 4 chips, of which tensor parallelism has the axis of 2. 2 and 8 devices cannot be made of the two axes of 4.
ON_TORUS = ("compile_topology=v5p-64", "base_num_decoder_layers=8", "ici_tensor_parallelism=2", "--all", "--json")
DIVIDED = {2, 8}


def test_where_a_mesh_divides_axes_of_the_torus_its_row_has_the_key_for_it(plan):
  status, captured = plan(*ON_TORUS)
  found = json.loads(captured.out)
  rows = found["candidates"]
  assert found["slice"] == {"topology": "v5p-64", "chips": [2, 4, 4], "closed": [False] * 3}
  assert status == 0 and {row["stages"] for row in rows} >= {4, *DIVIDED}
  for row in rows:
    assert row["keys"].get("allow_split_physical_axes", False) == (row["stages"] in DIVIDED), row


def test_a_mesh_that_the_run_forbids_is_impossible_with_the_reason(plan):
  status, captured = plan(*ON_TORUS, "allow_split_physical_axes=False")
  found = json.loads(captured.out)
  stages = {row["stages"] for row in found["candidates"]}
  assert status == 0 and 4 in stages and stages.isdisjoint(DIVIDED)
  reasons = [each["reason"] for each in found["infeasible"]]
  assert any("a mesh of stage 2, fsdp 8, tensor 2 within a slice out on the 2 × 4 × 4 chips" in each for each in reasons)


@pytest.mark.parametrize(
    "more",
    slow_but(["experts"], {"explicit": ("shard_mode=explicit", "--device-memory-gib", "0.0001"), "experts": EXPERTS}),
)
def test_models_that_candidates_share_change_no_figure(plan, monkeypatch, more):
  arguments = (*more, "base_num_decoder_layers=8", "ici_data_parallelism=4", "--devices", "8", "--all", "--json")
  found = json.loads(plan(*arguments)[1].out)
  alone = lambda self, config, changed: abstract_model.explained(config)
  monkeypatch.setattr(abstract_model.Models, "explained", alone)
  assert json.loads(plan(*arguments)[1].out) == found
  assert {row["stages"] for row in found["candidates"]} == {1, 2}
  assert {row["layers_per_stage"] for row in found["candidates"] if row["stages"] == 2} == {1, 2, 4}


def test_experts_get_devices_from_the_axis_that_gives_them_to_stages_unless_the_run_says_how_many(plan):
  def sizes(*given):
    found = json.loads(plan(*EXPERTS, *given, *options, "--all", "--json")[1].out)["candidates"]
    return {
        (row["impl"], row["stages"], row["keys"].get("ici_expert_parallelism"), row["keys"].get("ici_fsdp_parallelism"))
        for row in found
    }

  options = ("--devices", "8", "--impl", "none,circular_bsw")

  expected = {("none", 1, None, -1), ("none", 1, 2, 4), ("none", 1, 4, 2)}
  expected |= {("circular_bsw", 1, None, 8), ("circular_bsw", 1, 2, 4), ("circular_bsw", 1, 4, 2)}
  expected |= {("circular_bsw", 2, None, 4), ("circular_bsw", 2, 2, 2), ("circular_bsw", 2, 4, 1)}
  assert sizes() == expected, "four experts cannot be on eight devices"
  given = {("none", 1, None, -1), ("circular_bsw", 1, None, 4), ("circular_bsw", 2, None, 2)}
  assert sizes("ici_expert_parallelism=2") == given
  status, captured = plan(*EXPERTS, *options)
  assert not status and re.search(r"pipeline +S +EP +R ", captured.out)


def test_what_is_not_looked_at_closely_since_it_is_slower_is_never_the_first_of_its_kind(plan, monkeypatch):
  given = ("compile_topology=v5p-16", *EXPERTS, "base_num_decoder_layers=8", "--json")
  kind = lambda row: (row["impl"], row["stages"])
  every, shown, closely = dict[tuple, dict](), [], []
  best = choice.Choices.best
  monkeypatch.setattr(choice.Choices, "best", lambda *args, **more: closely.append(0) or best(*args, **more))
  for row in json.loads(plan(*given, "--all")[1].out)["candidates"]:
    every.setdefault(kind(row), row)
  looked_at, closely[:] = len(closely), []
  shown = json.loads(plan(*given)[1].out)["candidates"]
  assert len(closely) < 0.7 * looked_at
  assert {kind(row) for row in shown} <= every.keys() and len(shown) >= 5
  for row in shown:
    assert row == every[kind(row)]


def test_where_the_first_of_a_kind_is_refused_the_next_one_keeps_its_best(plan, monkeypatch):
  given = ("compile_topology=v5p-16", *EXPERTS, "base_num_decoder_layers=8", "--impl", "circular_bsw", "--json")
  rows = json.loads(plan(*given, "--all")[1].out)["candidates"]
  first, second = [row for row in rows if row["stages"] == 2][:2]
  read = run_config.Variations.read

  def refusing(self, changed):
    if changed == first["keys"]:
      raise ValueError("no such run")
    return read(self, changed)

  monkeypatch.setattr(run_config.Variations, "read", refusing)
  shown = json.loads(plan(*given)[1].out)["candidates"]
  assert [row for row in shown if row["stages"] == 2] == [second]


def test_sizes_of_the_axes_that_are_asked_for_are_tried_and_cost_what_a_run_with_them_costs(plan):
  options = ("compile_topology=v5p-16", "--impl", "none,circular_bsw", "--all", "--json")
  found = json.loads(plan(*options, "--axes", "tensor")[1].out)["candidates"]
  axes = ("ici_tensor_parallelism", "ici_pipeline_parallelism", "ici_fsdp_parallelism", "num_pipeline_microbatches")
  rows = {(row["impl"], *(row["keys"].get(key, 1) for key in axes)): row for row in found}
  assert {key[1] for key in rows} == {1, 2}, "two heads of keys and values"
  given = json.loads(plan(*options, "ici_tensor_parallelism=2")[1].out)["candidates"]
  same = 0
  for row in given:
    sizes = [2 if key == axes[0] else row["keys"].get(key, 1) for key in axes]
    if (tried := rows.get((row["impl"], *sizes))) and tried["layers_per_stage"] == row["layers_per_stage"]:
      assert (tried["memory"], tried["sent"], tried["seconds"]) == (row["memory"], row["sent"], row["seconds"])
      same += 1
  assert same >= 3 and any(row["sent"]["bytes"].get("within_layers") for row in given)
  # Of 512 tokens two devices have rows of both ends, of 16 tokens none.
  for length, sizes in ((512, {1, 2}), (16, {1})):
    found = json.loads(plan(*options, "--axes", "tensor,context", f"max_target_length={length}")[1].out)["candidates"]
    assert {row["keys"].get("ici_context_parallelism", 1) for row in found} == sizes
    assert {row["keys"].get("ici_tensor_parallelism", 1) for row in found} == {1, 2}


def test_each_batch_sends_within_layers_what_it_sends_alone(plan):
  options = ("compile_topology=v5p-16", "ici_tensor_parallelism=2", "--impl", "none,circular_bsw", "--all", "--json")
  several, alone = (json.loads(plan(*options, *batch)[1].out) for batch in (("--batch", "2,8"), ("--batch", "8")))
  of = lambda found: [row["sent"] for row in found["candidates"] if row["keys"]["per_device_batch_size"] == 8]
  assert of(several) == of(alone) and all(sent["bytes"]["within_layers"] for sent in of(alone))


def test_a_model_without_a_pipeline_needs_rows_on_each_device(plan):
  few = ("compile_topology=v5p-16", "per_device_batch_size=0.25", "attention=flash", "max_target_length=2048")
  status, captured = plan(*few, "--impl", "none")
  said = " ".join(captured.out.split())
  assert status == 1 and "needs rows in multiples of 8, and without a pipeline it gets 2 at once" in said
  found = json.loads(plan(*few, "--impl", "none", "--axes", "context", "--all", "--json")[1].out)
  assert {row["keys"]["ici_context_parallelism"] for row in found["candidates"]} == {4}


@pytest.mark.parametrize("mesh", slow_but(["cp-as-ep"], ["pure-fsdp", "cp-as-ep"]))
def test_experts_on_a_mesh_of_other_axes_take_seconds_too(plan, mesh):
  status, captured = plan(*EXPERTS, f"custom_mesh_and_rule={mesh}", "--devices", "8", "--chip", "v5p", "--json")
  candidates = json.loads(captured.out)["candidates"]
  assert status == 0 and candidates and all(row["seconds"] > 0 for row in candidates)


@pytest.mark.slow
def test_a_run_with_experts_that_is_written_has_the_costs_of_its_row(plan, tmp_path, capfd):
  file = tmp_path / "my.yml"
  options = ("--devices", "8", "--impl", "circular_bsw", "--all", "--json")
  rows = json.loads(plan(*EXPERTS, *options)[1].out)["candidates"]
  number = next(i for i, row in enumerate(rows) if row["stages"] == 2 and row["keys"].get("ici_expert_parallelism") == 4)
  assert plan(*EXPERTS, *options, "--write", str(file), "--row", str(number + 1))[0] == 0
  assert cli.main(["check", str(file), "--json"]) == 0
  assert json.loads(capfd.readouterr().out)["memory"]["total"] == rows[number]["memory"]["total"]


def test_what_fits_comes_first_and_its_keys_are_accepted_as_they_are(plan, capfd):
  _, captured = plan("--devices", "8", "--all", "--json")
  rows = json.loads(captured.out)["candidates"]
  limit = sorted(row["memory"]["total"] for row in rows)[len(rows) // 2]
  _, captured = plan("--devices", "8", "--device-memory-gib", str(limit / 2**30), "--all", "--json")
  rows = json.loads(captured.out)["candidates"]
  fits = [row["fits"] for row in rows]
  assert fits == sorted(fits, reverse=True) and 0 < sum(fits) < len(fits)
  nearly_full = [row["nearly_full"] for row in rows]
  assert nearly_full == [0.85 * limit < row["memory"]["total"] <= limit for row in rows]
  assert 0 < sum(nearly_full) < sum(fits)
  row = next(row for row in rows if row["stages"] == 2)
  arguments = [f"{key}={value}" for key, value in row["keys"].items()]
  assert cli.main(["check", *SIX_LAYERS, *arguments, "--devices", "8", "--json"]) == 0
  checked = json.loads(capfd.readouterr().out)
  assert checked["memory"]["total"] == row["memory"]["total"] and checked["sent"] == row["sent"]
  assert checked["schedule"]["microbatches"] == row["microbatches"]


def test_a_chip_gives_a_memory_and_bounds_of_the_step(plan):
  status, captured = plan("--devices", "8", "--chip", "v5e", "--top", "30", "--wide")
  assert re.search(r"bubble .* kept .* at least +at most +bound by$", captured.out, re.MULTILINE)
  assert status == 0 and "8 devices of 16.9 GB" in captured.out and "  1: pipeline_impl=" in captured.out
  assert "seconds are those of v5e-8: 2 × 4 chips" in captured.out
  _, captured = plan("--devices", "8", "--chip", "v5e", "--all", "--json")
  rows = json.loads(captured.out)["candidates"]
  assert len(rows) > 3 and "none" in [row["impl"] for row in rows]
  assert all(0 < row["seconds_at_least"] < row["seconds"] <= row["seconds_at_most"] for row in rows)
  assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)


def test_devices_that_are_no_slice_of_maxtexts_table_have_no_seconds_and_the_slices_next_to_it_are_named(plan):
  status, captured = plan("--devices", "12", "--chip", "v5e", "--impl", "none")
  said = " ".join(captured.out.split())
  assert status == 0 and "no seconds, since MaxText has no slice of 12 devices of v5e; it has v5e-8 and v5e-16" in said
  found = json.loads(plan("--devices", "12", "--chip", "v5e", "--impl", "none", "--json")[1].out)
  assert found["slice"] is None and {row["seconds"] for row in found["candidates"]} == {None}
  assert found["device_memory"] == chips.CHIPS["v5e"].hbm_bytes


def test_what_is_offloaded_has_to_fit_into_the_hosts_memory(plan, monkeypatch, capfd):
  small = dataclasses.replace(chips.CHIPS["v5e"], host_bytes=1000)
  monkeypatch.setitem(chips.CHIPS, "v5e", small)
  options = ("--devices", "8", "--chip", "v5e", "--impl", "none,circular_bsw")
  status, captured = plan(*options, "--wide", "remat_policy=qkv_proj_offloaded")
  text = " ".join(captured.out.split())
  assert status == 1 and re.search(r"the first lacks [\d.]+ kB of the host's memory for a device", text)
  assert re.search(r"[\d.]+ kB !", text)
  keys = (*SIX_LAYERS, "compile_topology=v5e-16", "remat_policy=qkv_proj_offloaded")
  cli.main(["check", *keys])
  assert "does not fit into the host's memory" in capfd.readouterr().out


def test_the_rate_between_slices_is_the_one_that_is_given(plan):
  keys = ("compile_topology=v6e-8", "compile_topology_num_slices=2", "dcn_fsdp_parallelism=2", "ici_fsdp_parallelism=8")
  seconds = {}
  for given in ((), ("--dcn-gbps", "4.11"), ("--dcn-gbps", "8.22")):
    _, captured = plan(*keys, "--impl", "none", "--all", "--json", "remat_policy=full", *given)
    (row,) = [row for row in json.loads(captured.out)["candidates"] if row["impl"] == "none"]
    assert row["sent"]["between_slices"]
    seconds[given[1:]] = row["seconds_of"]["transfers"]
  of_network = row["sent"]["between_slices"] / 4.11e9  # shared weights: no compute hides it
  assert seconds[()] == pytest.approx(seconds[("4.11",)])  # as it was measured
  assert seconds[()] - seconds[("8.22",)] == pytest.approx(of_network / 2, rel=1e-6)


def test_nothing_fits_into_no_memory(plan):
  status, captured = plan("--devices", "8", "--device-memory-gib", "1e-6")
  assert status == 1 and "none of them fits, the nearest 5 are shown" in " ".join(captured.out.split())
  assert "the first lacks " in captured.out and "no seconds, since the kind of the devices is not known" in captured.out


def test_a_table_is_no_wider_than_80_columns_and_has_one_row_of_a_kind_with_its_keys(plan, capfd, monkeypatch):
  monkeypatch.setenv("COLUMNS", "80")
  options = ("--devices", "8", "--chip", "v5e", "--impl", "none,circular_ag_once")
  _, captured = plan(*options)
  lines = captured.out.splitlines()
  keys = [line.split(":", 1)[1].split() for line in lines if re.match(r"  \d+: ", line)]
  # none, and the implementation of the longest name with 1 stage and with 2
  assert len(keys) == 3 and [] == [line for line in lines if len(line) > 80 and "pipeline_impl=" not in line]
  _, captured = plan(*options, "--json")
  rows = json.loads(captured.out)["candidates"]
  assert len({(row["impl"], row["stages"]) for row in rows}) == len(rows) == 3
  for row, arguments in zip(rows, keys, strict=True):
    assert cli.main(["check", *SIX_LAYERS, *arguments, "--devices", "8", "--json"]) == 0
    checked = json.loads(capfd.readouterr().out)
    assert checked.get("memory", row["memory"])["total"] == row["memory"]["total"]
    assert checked["layout"].startswith("pipeline of 2 stages") == (row["stages"] == 2)


def test_where_nothing_fits_a_row_is_written_only_if_it_is_named(plan, tmp_path):
  options = ("--devices", "8", "--impl", "circular_bsw", "--device-memory-gib", "1e-6")
  options += ("--write", str(tmp_path / "my.yml"))
  status, captured = plan(*options)
  said = " ".join(captured.out.split())  # lines are broken where the folder's name makes them too long
  assert status == 1 and "nothing was written" in said and list(tmp_path.iterdir()) == []
  status, captured = plan(*options, "--row", "2")
  assert status == 1 and "wrote " in captured.out and (tmp_path / "my.yml").exists()


def test_what_would_make_it_fit_is_estimated_and_is_what_a_plan_of_it_finds(plan):
  _, captured = plan("--devices", "8", "--all", "--json")
  least = min(row["memory"]["total"] for row in json.loads(captured.out)["candidates"])
  limit = str(0.98 * least / 2**30)
  status, captured = plan("--devices", "8", "--device-memory-gib", limit, "--json")
  found = json.loads(captured.out)
  assert status == 1 and [row["fits"] for row in found["candidates"]] == [False] * 5
  remedies = {tuple(remedy["keys"])[0]: remedy for remedy in found["remedies"]}
  assert {"per_device_batch_size", "internal_compile_num_devices"} <= set(remedies)
  remedy = remedies["per_device_batch_size"]
  assert remedy["missing"] == 0 and remedy["memory"] < 0.98 * least
  size = remedy["keys"]["per_device_batch_size"]
  status, captured = plan(
      "--devices", "8", "--device-memory-gib", limit, "--all", "--json", f"per_device_batch_size={size}"
  )
  sizes = [row["memory"]["total"] for row in json.loads(captured.out)["candidates"]]
  assert status == 0 and remedy["memory"] in sizes


def test_a_written_run_is_a_file_that_check_accepts_and_that_has_the_same_costs(plan, tmp_path, capfd):
  file = tmp_path / "my.yml"
  options = ("--devices", "8", "--impl", "circular_bsw", "--write", str(file), "--row", "2", "--json")
  status, captured = plan(*options)
  row = json.loads(captured.out)["candidates"][1]
  assert status == 0 and json.loads(captured.out)["written"] == str(file)
  assert cli.main(["check", str(file), "--devices", "8", "--json"]) == 0
  checked = json.loads(capfd.readouterr().out)
  assert checked["errors"] == [] and checked["memory"]["total"] == row["memory"]["total"]
  assert file.read_text("utf-8").startswith("# circular_bsw, ") and "compile_topology" not in file.read_text("utf-8")
  again = tmp_path / "again.yml"  # based on a file, beside which it is
  assert cli.main(["plan", str(file), *options[:4], "--write", str(again)]) == 0
  assert "base_config: my.yml\n" in again.read_text("utf-8")
  capfd.readouterr()
  assert plan(*options)[0] == 2  # the file exists


def test_a_written_run_that_maxtext_would_read_otherwise_is_refused(plan, tmp_path):
  keys = ("model_name=llama3-8b", "override_model_config=True", "base_emb_dim=64")
  status, captured = plan(*keys, "--devices", "8", "--write", str(tmp_path / "my.yml"))
  assert status == 1 and "base_emb_dim" in captured.err and list(tmp_path.iterdir()) == []


def test_the_best_are_compiled_for_the_topology_and_shown_beside(plan, monkeypatch):
  asked = []

  def figures(arguments, *, chip, **_):
    asked.append(arguments)
    if len(asked) == 2:
      return {"failure": "stopped: more than 60 s"}
    seconds = 2.0 if len(asked) == 1 else 1.0
    assert chip is chips.CHIPS["v5p"]
    wire = {"all-gather": 2.0, "collective-permute": 1.0}
    return {"bytes": {"peak": 10**9}, "wire_GB": wire, "projection": {"step_s": seconds}}

  monkeypatch.setattr(compare, "figures", figures)
  status, captured = plan("compile_topology=v5p-16", "--validate", "3", "--impl", "circular,circular_bsw")
  assert status == 1 and len(asked) == 3
  said = " ".join(captured.out.split())  # lines are wrapped
  assert re.search(r"circular\w*: step ", said) and "projected 2 s (" in said
  assert "compiled 1 GB (" in said and "compiled 3 GB (" in said
  assert "not compiled: stopped: more than 60 s" in said
  assert "the order by projected seconds is another: circular" in said
  for arguments in asked:
    assert {"compile_topology=v5p-16", "dataset_type=synthetic"} <= set(arguments)
  assert asked[0] != asked[1]


WRONG = {
    "no devices": ((), "Which devices?"),
    **{
        f"--batch {text}": (("--devices", "8", "--batch", f"1,{text}"), f"--batch {text}: is no positive number")
        for text in ("two", "0", "nan", "-1", "1e9")
    },
    "no network": (("--devices", "8", "--dcn-gbps", "0"), "has to be positive"),
    "no other slice": (("--devices", "8", "--dcn-gbps", "5"), "Give compile_topology_num_slices="),
    "slices of nothing": (("--devices", "8", "--dcn-gbps", "5", "num_slices=2"), "Give --chip."),
    "no batch": (("--devices", "8", "--batch", ","), "--batch: names nothing"),
    "no axis": (("--devices", "8", "--axes", ","), "--axes names nothing"),
    "an axis that is not chosen": (("--devices", "8", "--axes", "data"), "--axes data: known are tensor, context"),
    "an axis that is given": (
        ("--devices", "8", "--axes", "tensor", "ici_tensor_parallelism=2"),
        "ici_tensor_parallelism=2: the run says the size of the axis that should be tried",
    ),
    "no batch has whole sequences": (("--devices", "8", "--batch", "0.0625,1.0625"), "no whole number"),
    "parts that cannot be": (
        ("--devices", "8", "--global-batch", "24", "gradient_accumulation_steps=2"),
        "on 8 devices it can be 1, 3.",
    ),
    "no batch for these chips": (
        ("compile_topology=v5e-8", "attention=flash", "--global-batch", "12", "--impl", "none"),
        "Give 8 or 16.",
    ),
    "stages that cannot be": (
        ("--devices", "8", "--impl", "circular_bsw", "ici_pipeline_parallelism=3"),
        "8 devices (num_target_devices=8) cannot be divided as ici_pipeline_parallelism=3",
    ),
    "two kinds of devices": (("compile_topology=v5p-8", "--devices", "4"), "give one of them"),
    "no topology to compile for": (("--devices", "8", "--validate", "1"), "needs compile_topology="),
    "unknown implementation": (("--devices", "8", "--impl", "zero-bubble"), "zero-bubble"),
    "no formulas": (("--devices", "8", "--impl", "host"), "host"),
    "unknown chip": (("--devices", "8", "--chip", "h100"), "known chips are v4, v5e"),
    "a row that never is": (("--devices", "8", "--write", "my.yml", "--row", "12"), "the table has at most 11 rows"),
    "nothing to show": (("--devices", "8", "--top", "0"), "has to be positive"),
    "no such key": (("--devices", "8", "no_such_key=1"), "no_such_key"),
}


@pytest.mark.parametrize("arguments, words", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_planned_is_reported(plan, arguments, words):
  status, captured = plan(*arguments)
  assert status == 2 and words in captured.err and captured.out == ""
