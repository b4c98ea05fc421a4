# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which resolutions are conflicts, which are not, and the messages about them."""

import pickle
import warnings

from flax import nnx
from jax.sharding import PartitionSpec as P
import pytest

from maxtext_pp_ext.sharding import (
    conflicts,
    Kind,
    named_shardings,
    resolution,
    ShardingConflictError,
    ShardingConflictWarning,
)
from tests.sharding.common import mesh_of, param

MESH = mesh_of(data=2, fsdp=4, tensor=2, one=1)


def kinds(names, rules, shape=None, mesh=MESH):
  return [conflict.kind for conflict in conflicts(resolution(names, mesh, rules, shape))]


# names, rules, shape, what is found.
CASES = {
    "two dimensions that want the same mesh axis": (("a", "b"), [("a", "fsdp"), ("b", "fsdp")], None, [Kind.TAKEN]),
    "a compound rule of which one axis is taken": (
        ("a", "b"),
        [("a", "fsdp"), ("b", ("fsdp", "tensor"))],
        None,
        [Kind.TAKEN],
    ),
    "a rule that loses its axes to one with a common axis of one device": (
        ("a", "b"),
        [("a", ("one", "fsdp")), ("b", ("one", "tensor"))],
        None,
        [Kind.TAKEN],
    ),
    "a mesh axis in an annotation that a rule wants": ((("fsdp",), "a"), [("a", "fsdp")], None, [Kind.TAKEN]),
    "a rule for an axis that the mesh lacks": (("a",), [("a", ("fsdp", "nowhere"))], None, [Kind.MISSING]),
    "an annotation with an axis that the mesh lacks": ((("nowhere",),), [("a", "fsdp")], None, [Kind.MISSING]),
    "an indivisible dimension": (("a",), [("a", ("data", "fsdp"))], (12,), [Kind.INDIVISIBLE]),
    "the same rule twice": (("a",), [("a", "fsdp"), ("a", "fsdp")], None, [Kind.SHADOWED]),
    "a rule behind one that always binds": (("a",), [("a", None), ("a", "fsdp")], None, [Kind.SHADOWED]),
    "a rule behind one to UNCONSTRAINED": (("a",), [("a", P.UNCONSTRAINED), ("a", "fsdp")], None, [Kind.SHADOWED]),
    "a rule behind one that needs fewer axes": (
        ("a",),
        [("a", "fsdp"), ("a", ("fsdp", "data"))],
        None,
        [Kind.SHADOWED],
    ),
    "an unknown name": (("a", "b"), [("b", "fsdp")], None, [Kind.UNKNOWN]),
    "more names than dimensions": (("a", "b"), [("a", "fsdp"), ("b", "data")], (8,), [Kind.RANK]),
    "fewer names than dimensions": (("a", "b"), [("a", "fsdp"), ("b", "data")], (4, 8, 8), [Kind.UNNAMED]),
    "fewer names, of which all are replicated": (("a",), [("a", None)], (4, 8), [Kind.UNNAMED]),
    "nothing of no names at all": ((), [("a", "fsdp")], (4, 8), []),
    "several at once": (
        ("a", "b", "c", "d"),
        [("a", "fsdp"), ("b", "fsdp"), ("d", "nowhere")],
        (6, 8, 8, 8),
        [Kind.INDIVISIBLE, Kind.TAKEN, Kind.UNKNOWN, Kind.MISSING],
    ),
    "nothing where all axes in common have one device": (("a", "b"), [("a", "one"), ("b", "one")], None, []),
    "nothing where a later rule says what then": (("a", "b"), [("a", "fsdp"), ("b", "fsdp"), ("b", "data")], None, []),
    "nothing where a later rule says to replicate": (("a", "b"), [("a", "fsdp"), ("b", "fsdp"), ("b", None)], None, []),
    "nothing of rules for names that the array has not": (("a",), [("a", "fsdp"), ("b", "nowhere")], None, []),
    "nothing of a narrower rule behind a wider one": (("a",), [("a", ("fsdp", "data")), ("a", "fsdp")], None, []),
    "nothing of an axis of one device that does not divide": (("a",), [("a", ("fsdp", "one"))], (4,), []),
    "nothing of None and UNCONSTRAINED": ((None, P.UNCONSTRAINED), [("a", "fsdp")], (3, 3), []),
}


@pytest.mark.parametrize("case", CASES)
def test_conflicts_are_found_and_intended_cases_are_not(case):
  names, rules, shape, expected = CASES[case]
  assert kinds(names, rules, shape) == expected


def test_own_rules_that_override_are_no_conflict_and_shadow_each_other():
  overriding = param((8,), ("a",), sharding_rules=(("a", "data"),))
  named_shardings(overriding, MESH, [("a", "data"), ("a", "fsdp")], on_conflict="error")
  twice = param((8,), ("a",), sharding_rules=(("a", "data"), ("a", "data")))
  with pytest.raises(ShardingConflictError, match="own rule .* can never apply"):
    named_shardings(twice, MESH, [("a", "fsdp")], on_conflict="error")


# What a message has to name: the array, its shape, its names, the rules in play, what would resolve it.
MESSAGES = {
    Kind.TAKEN: (
        (("embed", "mlp"), [("embed", "fsdp"), ("mlp", "fsdp")], (8, 16)),
        "'embed' has fsdp (4 devices) by rule ('embed', 'fsdp'), so rule ('mlp', 'fsdp') was passed over, and"
        " 'mlp' is not sharded over 'fsdp'. Add the rule ('mlp', None) to replicate it, or"
        " ('mlp', 'data') to shard it,",
    ),
    Kind.MISSING: (
        (("embed", "mlp"), [("embed", "fsdp"), ("mlp", "model")], (8, 16)),
        "rule ('mlp', 'model') names model, which the mesh (data, fsdp, tensor, one) does not have. Add model to the"
        " mesh",
    ),
    Kind.INDIVISIBLE: (
        (("embed", "mlp"), [("embed", ("data", "fsdp")), ("mlp", None)], (12, 16)),
        "rule ('embed', ('data', 'fsdp')) shards 'embed' over data (2 devices) and fsdp (4 devices), and its"
        " size 12 is not a multiple of 8, so it is not sharded over fsdp. Make it 16, or bind 'embed' to mesh axes that"
        " divide 12",
    ),
    Kind.SHADOWED: (
        (("embed", "mlp"), [("embed", "fsdp"), ("mlp", None), ("embed", ("fsdp", "data"))], (8, 16)),
        "rule ('embed', ('fsdp', 'data')) can never apply: whenever its mesh axes are free, rule ('embed', 'fsdp')"
        " has bound 'embed'. Put it before rule",
    ),
    Kind.UNKNOWN: (
        (("embed", "mpl"), [("embed", "fsdp"), ("mlp", "data")], (8, 16)),
        "there is no rule for 'mpl', so it is replicated. Did you mean 'mlp'? Otherwise add the rule ('mpl', None)",
    ),
    Kind.RANK: ((("embed", "mlp"), [("embed", "fsdp"), ("mlp", None)], (8,)), "2 logical axes for 1 dimensions"),
    Kind.UNNAMED: (
        (("embed", "mlp"), [("embed", "fsdp"), ("mlp", None)], (4, 8, 8)),
        "2 logical axes for 3 dimensions, so it cannot be told which of them are meant; the names are taken for the first"
        " dimensions, and the others are replicated. Name each dimension",
    ),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_error_names_array_rules_and_remedy(kind):
  (names, rules, shape), expected = MESSAGES[kind]
  tree = nnx.State({"layer": {"kernel": param(shape, names)}})
  with pytest.raises(ShardingConflictError) as raised:
    named_shardings(tree, MESH, rules, on_conflict="error")
  (conflict,) = raised.value.conflicts
  text = str(raised.value)
  assert conflict.kind is kind and kind.value in text and expected in text
  assert f"layer/kernel {list(shape)} ({', '.join(names)})" in text


@pytest.mark.parametrize("names", [("a",), ("a", None), ("a", "layers")])
def test_names_that_a_scan_leaves_short_are_a_conflict_although_it_names_its_own_dimension(names):
  """MaxText's scans put the name of their dimension in, behind as many names as there should be in front of it."""
  variable = param((8, 8, 4), names, param_scan_axis=2, **{nnx.PARTITION_NAME: "layers"})
  rules = [("a", "fsdp"), ("layers", None)]
  if names == ("a", None):
    named_shardings(variable, MESH, rules, on_conflict="error")
    return
  with pytest.raises(ShardingConflictError, match="logical axes for 3 dimensions"):
    named_shardings(variable, MESH, rules, on_conflict="error")
  assert named_shardings(variable, MESH, rules).get_value().spec[0] == "fsdp"


def test_names_of_stacks_alone_are_no_conflict():
  """MaxText names the stacks of a variable whose own dimensions have no names."""
  variable = param((8, 4), ("layers",), param_scan_axis=1, **{nnx.PARTITION_NAME: "layers"})
  named_shardings(variable, MESH, [("layers", "data")], on_conflict="error")


def test_one_error_has_all_conflicts_and_groups_the_arrays_of_each():
  rules = [("a", "fsdp"), ("b", "fsdp")]
  tree = nnx.State({name: param((8, 8), ("a", "b")) for name in ("x", "y")} | {"z": param((8,), ("c",))})
  with pytest.raises(ShardingConflictError) as raised:
    named_shardings(tree, MESH, rules, on_conflict="error")
  text = str(raised.value)
  assert text.startswith("2 sharding conflicts:") and len(raised.value.conflicts) == 3
  assert text.count("was passed over") == 1 and "x [8, 8] (a, b)" in text and "y [8, 8] (a, b)" in text
  assert "z [8] (c)" in text
  assert str(pickle.loads(pickle.dumps(raised.value))) == text


def test_of_many_arrays_with_one_conflict_the_text_has_the_first():
  tree = nnx.State({"layers": {i: param((8, 8), ("a", "b")) for i in range(30)}})
  with pytest.raises(ShardingConflictError, match="and 10 more") as raised:
    named_shardings(tree, MESH, [("a", "fsdp"), ("b", "fsdp")], on_conflict="error")
  assert len(raised.value.conflicts) == 30 and str(raised.value).count("\n") == 1 + 20 + 1


def test_warn_says_the_same_and_goes_on_and_fallback_is_silent():
  tree, rules = param((8, 8), ("a", "b")), [("a", "fsdp"), ("b", "fsdp")]
  with pytest.warns(ShardingConflictWarning, match="was passed over"):
    warned = named_shardings(tree, MESH, rules, on_conflict="warn")
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    silent = named_shardings(tree, MESH, rules, on_conflict="fallback")
  assert warned.get_value().spec == silent.get_value().spec == P("fsdp", None)


def test_another_value_of_on_conflict_is_refused():
  with pytest.raises(ValueError, match="on_conflict='ignore' must be one of 'fallback', 'warn', 'error'"):
    named_shardings(param((8,)), MESH, [], on_conflict="ignore")
