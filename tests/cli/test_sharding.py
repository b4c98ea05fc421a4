# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`maxtext-pp sharding`."""

import json
import re

import pytest

from maxtext_pp_ext import cli
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import
from tests.marks import slow_but

SMALL = (
    "model_name=llama3-8b",
    "override_model_config=True",
    "base_num_decoder_layers=4",
    "compile_topology=v5p-64",
    "ici_tensor_parallelism=4",
)


@pytest.fixture
def command(installed, capsys):  # noqa: F811  pylint: disable=redefined-outer-name
  def run(*arguments):
    return cli.main(["sharding", *arguments]), *capsys.readouterr()

  return run


def test_the_table_has_parameters_rules_bytes_and_totals(command):
  status, out, _ = command(*SMALL)
  assert status == 0
  assert out.startswith("mesh of 32 devices: fsdp=8, tensor=4\n")
  # 14336 * 4096 * 4 layers * 4 bytes / 32 devices
  assert re.search(r"29.4 MB +1 +decoder/layers/mlp/wi_0/kernel +fsdp - tensor\n", out)
  layer = 3 * 4096 * 14336 + 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096
  assert f"12 arrays, {2 * 128256 * 4096 + 4 * layer + 4096:,} elements" in out and "conflict" not in out


def test_verbose_adds_shapes_and_the_rule_of_each_dimension(command):
  status, out, _ = command(*SMALL, "--verbose")
  out = " ".join(out.split())  # lines may break anywhere
  assert status == 0 and "P('fsdp', None, 'tensor')" in out
  assert "2 mlp: tensor by rule ('mlp'," in out and "replicated by rule" in out
  assert "passed over rule" in out and "fsdp_transpose is bound to dimension 2" in out


def test_at_80_columns_a_parameter_has_a_line_and_a_path_is_cut_between_its_parts(command, monkeypatch):
  monkeypatch.setenv("COLUMNS", "80")
  status, out, _ = command(*SMALL)
  lines = out.splitlines()
  assert status == 0 and max(map(len, lines)) <= 80 and len(lines) == 2 + 12 + 2
  parts = {"decoder", "layers", "self_attention", "mlp", "…", "token_embedder"}
  paths = [re.search(r"\S*/\S*", line)[0] for line in lines[2:14]]
  assert all(set(path.split("/")[:-2]) <= parts for path in paths)
  _, out, _ = command(*SMALL, "--conflicts")
  assert out.splitlines()[1:] == ["no sharding conflicts"]


def test_json_is_all_that_is_printed_and_has_the_numbers(command):
  status, out, _ = command(*SMALL, "--json")
  found = json.loads(out)
  assert status == 0 and found["devices"] == 32 and found["mesh"] == {"fsdp": 8, "tensor": 4}
  rows = found["parameters"]
  cost = [row["bytes_per_device"] - -(-row["bytes"] // 32) for row in rows]
  assert cost == sorted(cost, reverse=True)
  assert {row["path"] for row in rows} >= {"token_embedder/embedding", "decoder/layers/self_attention/query/kernel"}
  kernel = next(row for row in rows if row["path"] == "decoder/layers/mlp/wo/kernel")
  assert kernel["shape"] == [14336, 4, 4096] and kernel["logical_axes"] == ["mlp", "layers", "embed"]
  assert kernel["spec"] == ["tensor", None, "fsdp"] and kernel["replication"] == 1
  assert kernel["bytes_per_device"] * 32 == kernel["bytes"] == 14336 * 4 * 4096 * 4
  assert len(json.loads(command(*SMALL, "--json", "--limit", "2")[1])["parameters"]) == 2


def test_a_pipeline_over_slices_shards_its_layers_over_stages(command):
  keys = ("ici_pipeline_parallelism=2", "dcn_pipeline_parallelism=2", "compile_topology_num_slices=2")
  _, out, _ = command(*SMALL, *keys, "pipeline_impl=circular_bsw", "per_device_batch_size=4", "--json")
  found = json.loads(out)
  assert found["mesh"] == {"stage": 4, "fsdp": 4, "tensor": 4} and found["devices"] == 64
  kernel = next(row for row in found["parameters"] if row["path"] == "decoder/pipeline_module/layers/mlp/wo/kernel")
  assert kernel["logical_axes"] == ["layers", "mlp", "embed"] and kernel["spec"] == ["stage", "tensor", "fsdp"]


@pytest.mark.parametrize("devices, mesh", [((), {"stage": 4, "fsdp": 2}), (("--devices", "16"), {"stage": 4, "fsdp": 4})])
def test_devices_are_those_of_the_parallelism_or_as_many_as_asked_for(command, devices, mesh):
  keys = ("ici_pipeline_parallelism=4", f"ici_fsdp_parallelism={-1 if devices else 2}", "per_device_batch_size=4")
  status, out, _ = command("model_name=llama3-8b", "pipeline_impl=circular", *keys, *devices, "--json")
  assert status == 0 and json.loads(out)["mesh"] == mesh


def test_a_picture_of_a_parameter(command):
  status, out, _ = command(*SMALL, "--picture", "wi_0/kernel")
  assert status == 0 and out.startswith("decoder/layers/mlp/wi_0/kernel\n[4096, 4, 14336]: rows along dimension 0;")
  assert "| 512:1024 " in out and "10752:14336" in out


PICTURES = {
    "several": ("kernel", "8 parameters have a path that ends so; take one of", 8),
    "a part of the path": ("mlp", "no parameter has a path that ends so; these have it elsewhere:", 3),
    "mistyped": ("wo/kernl", "these end in something like it:", 5),
    "nothing like it": ("xyzzy", "no parameter has a path that ends so; take one of", 12),
}


@pytest.mark.parametrize("name, words, count", slow_but(["a part of the path", "mistyped"], PICTURES, spread=True))
def test_a_picture_of_no_one_parameter_lists_those_that_may_be_meant(command, name, words, count):
  status, out, err = command(*SMALL, "--picture", name)
  assert status == 2 and out == "" and words in err and "  decoder/layers/mlp/wo/kernel\n" in err
  assert len([line for line in err.splitlines() if line.startswith("  ")]) == count


def test_conflicts_are_shown_and_are_no_failure(command):
  status, out, _ = command(*SMALL, 'logical_axis_rules=[["embed", "fsdp"], ["mlp", ["fsdp", "tensor"]]]', "--limit", "3")
  text = " ".join(out.split())
  assert status == 0 and " ! decoder/" in text and "two dimensions want the same mesh axis" in text
  assert "1 sharding conflict:" in text and "Add the rule ('mlp', None)" in text and "9 more, without --limit" in text


def test_a_parallelism_that_does_not_fit_the_topology_is_reported(command):
  status, out, err = command(*SMALL, "ici_tensor_parallelism=5")
  assert status == 2 and out == "" and "maxtext-pp: " in err and "ici_tensor_parallelism=5" in err
