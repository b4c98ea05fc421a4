# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the explanation of a model's sharding with JAX's arrays."""

import json
import math

from flax import nnx
import jax
from jax.sharding import PartitionSpec as P
import pytest

from maxtext_pp_ext.sharding import create_sharded, explain, Kind
from tests.sharding.common import mesh_of, param

MESH = mesh_of(data=2, fsdp=4, tensor=2)
RULES = [("mlp", "tensor"), ("embed", ("fsdp", "tensor")), ("embed", "fsdp"), ("layers", ("stage", "data"))]
STATE = nnx.State(
    {
        "mlp": {"kernel": param((64, 32, 4), ("embed", "mlp", "layers")), "bias": param((33,), ("mlp",))},
        "norm": param((128,)),
        "free": param((8, 8), (P.UNCONSTRAINED, "unknown")),
    }
)


def test_bytes_and_replication_are_those_of_jax():
  explanation = explain(STATE, MESH, RULES)
  for row in explanation.rows:
    layout = row.layout
    if layout.path == "free":
      continue  # the compiler's choice
    shard = math.prod(layout.sharding.shard_shape(layout.shape))
    assert row.bytes_per_device == 4 * shard and row.bytes == 4 * math.prod(layout.shape)
    assert row.replication * row.bytes == MESH.size * row.bytes_per_device
  assert explanation["mlp/kernel"].replication == 1 and explanation["norm"].replication == 16
  assert explanation.totals == {
      "arrays": 4,
      "elements": 64 * 32 * 4 + 33 + 128 + 64,
      "bytes": 4 * (64 * 32 * 4 + 33 + 128 + 64),
      "bytes_per_device": 4 * (64 * 32 * 4 // 16 + 33 + 128 + 64),
      # The whole of what is replicated less a sixteenth of it, rounded up.
      "bytes_of_replication": 4 * 33 - 9 + 4 * 128 - 32 + 4 * 64 - 16,
  }


def test_what_replication_costs_most_comes_first():
  assert [row.layout.path for row in explain(STATE, MESH, RULES).rows] == ["norm", "free", "mlp/bias", "mlp/kernel"]


def test_the_text_has_the_rule_of_each_dimension_and_those_passed_over_and_why():
  text = str(explain(STATE, MESH, RULES))
  assert text.splitlines()[0] == "mesh of 16 devices: data=2, fsdp=4, tensor=2"
  for line in (
      "mlp/kernel float32[64, 32, 4] P('fsdp', 'tensor', 'data'): 2.05 kB per device, 1x",
      "  0 embed: fsdp by rule ('embed', 'fsdp'); passed over rule ('embed', ('fsdp', 'tensor')): tensor is bound to"
      " dimension 1",
      "  2 layers: data by rule ('layers', ('stage', 'data')); stage: not in the mesh",
      "  0 mlp: replicated by rule ('mlp', 'tensor'); tensor: does not divide the dimension",
      "  ! a dimension that its mesh axes do not divide",
      "  0 UNCONSTRAINED: left to the compiler",
      "  1 unknown: replicated, no rule",
  ):
    assert line in text.splitlines()


def test_a_variable_with_fewer_names_than_dimensions_is_marked():
  explanation = explain(param((4, 16, 16), ("embed", "mlp")), MESH, RULES)
  assert "  ! fewer logical axes than dimensions" in str(explanation).splitlines()
  assert [conflict["kind"] for conflict in explanation.to_dict()["parameters"][0]["conflicts"]] == [Kind.UNNAMED.value]


def test_a_rule_behind_the_one_that_bound_is_passed_over_for_that():
  row = explain(param((8,), ("a",)), MESH, [("a", "fsdp"), ("a", "data")]).rows[0]
  (dimension,) = row.to_dict()["dimensions"]
  assert dimension["rule"] == "rule ('a', 'fsdp')"
  assert dimension["passed_over"] == [{"rule": "rule ('a', 'data')", "why": "an earlier rule has bound the dimension"}]


def test_the_dict_is_json_and_has_what_the_text_has():
  found = json.loads(json.dumps(explain(STATE, MESH, RULES).to_dict()))
  assert found["devices"] == 16 and found["mesh"] == {"data": 2, "fsdp": 4, "tensor": 2}
  kernel = next(p for p in found["parameters"] if p["path"] == "mlp/kernel")
  assert kernel["spec"] == ["fsdp", "tensor", "data"] and kernel["logical_axes"] == ["embed", "mlp", "layers"]
  assert kernel["dimensions"][2]["dropped"] == {"stage": "not in the mesh"}
  assert [c["kind"] for c in kernel["conflicts"]] == ["a rule for a mesh axis that the mesh lacks"]
  assert found["totals"] == explain(STATE, MESH, RULES).totals


def test_a_mesh_of_devices_and_a_module_will_do_and_an_unknown_path_is_a_key_error():
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  init = lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("embed", None)})
  model = create_sharded(init, mesh, [("embed", "fsdp")])
  explanation = explain(model, mesh, [("embed", "fsdp")])
  assert explanation["kernel"].layout.sharding == model.kernel.get_value().sharding
  with pytest.raises(KeyError, match="nothing"):
    explanation["nothing"]  # pylint: disable=pointless-statement
