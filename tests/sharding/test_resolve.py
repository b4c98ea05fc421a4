# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each rule of the resolution; it equals Flax's in all cases that Flax's can express."""

from flax import linen as nn
from flax.core.spmd import logical_axis_rules
import hypothesis
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
import pytest

from maxtext_pp_ext.sharding import gathered_spec
from maxtext_pp_ext.sharding.resolve import Dropped, mesh_axes, read_rules, resolution, resolve, spec_entry
from tests.sharding.common import mesh_of

MESH = mesh_of(data=2, fsdp=4, tensor=2, one=1)
U = P.UNCONSTRAINED

# A name, its rules, and what they give: one case per rule of the resolution.
CASES = {
    "the first rule for a name binds it": (("a",), [("a", "fsdp"), ("a", "data")], P("fsdp")),
    "an array is bound in the order of the rules, not of its dimensions": (
        ("a", "b"),
        [("b", "fsdp"), ("a", "fsdp")],
        P(None, "fsdp"),
    ),
    "a mesh axis is bound to one dimension, the next rule for the other name applies": (
        ("a", "b"),
        [("a", "fsdp"), ("b", "fsdp"), ("b", "data")],
        P("fsdp", "data"),
    ),
    "a dimension whose rules all are taken is replicated": (("a", "b"), [("a", "fsdp"), ("b", "fsdp")], P("fsdp", None)),
    "a compound rule binds all its axes": (("a",), [("a", ("data", "fsdp"))], P(("data", "fsdp"))),
    "a compound rule that is partly taken is passed over as a whole": (
        ("a", "b"),
        [("a", "data"), ("b", ("data", "fsdp")), ("b", ("fsdp", "tensor"))],
        P("data", ("fsdp", "tensor")),
    ),
    "a list is as good as a tuple": (["a"], [["a", ["data", "fsdp"]]], P(("data", "fsdp"))),
    "mesh axes with one device are removed": (("a", "b"), [("a", ("one", "fsdp")), ("b", "tensor")], P("fsdp", "tensor")),
    "an axis with one device is taken all the same": (("a", "b"), [("a", "one"), ("b", ("one", "fsdp"))], P(None, None)),
    "mesh axes that the mesh lacks are removed": (("a",), [("a", ("nowhere", "fsdp"))], P("fsdp")),
    "a rule to None binds, later rules do not apply": (("a",), [("a", None), ("a", "fsdp")], P(None)),
    "an empty rule binds, later rules do not apply": (("a",), [("a", ()), ("a", "fsdp")], P(None)),
    "a rule to UNCONSTRAINED binds, also twice": (("a", "b"), [("a", U), ("b", U), ("a", "fsdp")], P(U, U)),
    "a name without rule is replicated": (("a",), [("b", "fsdp")], P(None)),
    "without rules all is replicated": (("a", "b"), [], P(None, None)),
    "None and UNCONSTRAINED stay": ((None, U, "a"), [("a", "fsdp")], P(None, U, "fsdp")),
    "a tuple in the place of a name are mesh axes, which others do not get": (
        (("data", "fsdp"), "a"),
        [("a", "fsdp"), ("a", "tensor")],
        P(("data", "fsdp"), "tensor"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_bind_dimensions_in_order(case):
  names, rules, expected = CASES[case]
  assert resolve(names, MESH, rules) == expected


def _flax_then_without_size_one(names, mesh, rules):
  """Flax's spec without the axes that have one device or that the mesh lacks, as MaxText removes them."""
  spec = nn.logical_to_mesh_axes(names, rules=rules)
  kept = lambda entry: spec_entry(tuple(a for a in mesh_axes(entry) if mesh.shape.get(a, 1) > 1))
  return P(*(entry if entry is U else kept(entry) for entry in spec))


NAMES = st.sampled_from("abcdef")
MESH_AXES = st.sampled_from(["data", "fsdp", "tensor", "one", "nowhere"])
BINDS = st.one_of(st.none(), st.just(U), MESH_AXES, st.lists(MESH_AXES, unique=True, max_size=4).map(tuple))
RULES = st.lists(st.tuples(NAMES, BINDS), max_size=12)
ANNOTATIONS = st.lists(NAMES, unique=True, max_size=5).flatmap(
    lambda names: st.permutations([*names, None, U][: len(names) + 2])
)


@hypothesis.given(names=ANNOTATIONS, rules=RULES, cut=st.integers(0, 2))
@hypothesis.settings(max_examples=1000)
def test_it_is_flaxs_resolution_without_axes_of_one_device(names, rules, cut):
  names = tuple(names[: len(names) - cut])
  assert resolve(names, MESH, rules) == _flax_then_without_size_one(names, MESH, rules)


@hypothesis.given(names=ANNOTATIONS, rules=RULES)
@hypothesis.settings(max_examples=500)
def test_the_record_accounts_for_every_rule_of_every_dimension(names, rules):
  record = resolution(names, MESH, rules)
  for dimension in record.dimensions:
    expected = [rule for rule in read_rules(rules) if rule.name == dimension.name and isinstance(dimension.name, str)]
    found = [p.rule for p in dimension.passed] + ([dimension.rule] if dimension.rule else [])
    assert sorted(found, key=lambda rule: rule.index) == expected
    for passed in dimension.passed:
      # Either another dimension has one of its axes, or this one was bound before.
      if passed.taken:
        assert dimension.rule is None or dimension.rule.index > passed.rule.index
        for axis, holder in passed.taken.items():
          assert holder != dimension.index and axis in record.dimensions[holder].rule.axes
      else:
        assert dimension.rule.index < passed.rule.index
    if dimension.rule and dimension.entry is not U:
      assert {*mesh_axes(dimension.entry), *dimension.dropped} == set(dimension.rule.axes)


@hypothesis.given(names=ANNOTATIONS, rules=RULES, sizes=st.lists(st.integers(0, 24), min_size=7, max_size=7))
@hypothesis.settings(max_examples=500)
def test_with_a_shape_the_spec_divides_it_and_lacks_only_what_does_not(names, rules, sizes):
  shape = tuple(sizes[: len(names)])
  record = resolution(names, MESH, rules, shape)
  for dimension, whole in zip(record.dimensions, resolve(names, MESH, rules), strict=True):
    if dimension.entry is U:
      continue
    product = 1
    for axis in mesh_axes(whole):
      fits = dimension.size % (product * MESH.shape[axis]) == 0
      product *= MESH.shape[axis] if fits else 1
      assert (axis in mesh_axes(dimension.entry)) == fits
      assert (dimension.dropped.get(axis) is Dropped.INDIVISIBLE) == (not fits)


def test_the_axes_of_a_compound_rule_that_divide_are_kept():
  mesh = mesh_of(x=2, y=3, z=2)
  assert resolve(("a",), mesh, [("a", ("x", "y", "z"))], (4,)) == P(("x", "z"))
  assert resolve(("a",), mesh, [("a", ("x", "y", "z"))], (6,)) == P(("x", "y"))
  assert resolve(("a",), mesh, [("a", ("x", "y", "z"))], (5,)) == P(None)


def test_names_beyond_the_shape_are_left_out():
  assert resolve(("a", "b"), MESH, [("a", "fsdp"), ("b", "data")], (8,)) == P("fsdp")


def test_rules_come_from_the_context_if_there_are_none():
  with logical_axis_rules((("a", "fsdp"),)):
    assert resolve(("a",), MESH) == P("fsdp")
    assert resolve(("a",), MESH, ()) == P(None)


def test_an_array_without_annotation_has_an_empty_spec():
  assert resolve(None, MESH, [("a", "fsdp")]) == P()


def test_own_rules_come_before_all_others():
  rules = read_rules([("a", "fsdp")], own=[("a", "data")])
  assert resolve(("a",), MESH, rules) == P("data")
  assert [str(rule) for rule in rules] == ["own rule ('a', 'data')", "rule ('a', 'fsdp')"]


def test_a_name_that_occurs_twice_is_refused_as_flax_refuses_it():
  with pytest.raises(ValueError, match="'a' more than once"):
    resolve(("a", "b", "a"), MESH, [("a", "fsdp")])


@pytest.mark.parametrize("rule", ["a", ("a",), ("a", "b", "c"), ("a", 3), ("a", (("x", "y"),)), 3])
def test_a_rule_that_is_none_is_refused(rule):
  with pytest.raises(ValueError, match="Rule 1, .* is not a pair"):
    resolve(("a",), MESH, [("b", "fsdp"), rule])


def test_a_rule_that_names_a_mesh_axis_twice_is_refused():
  with pytest.raises(ValueError, match="names a mesh axis twice"):
    resolve(("a",), MESH, [("a", ("fsdp", "fsdp"))])


@pytest.mark.parametrize("names", [("embed",), ("embed", "mlp", "heads")])
def test_a_weight_with_fewer_or_more_names_than_dimensions_is_not_gathered_by_guess(names):
  with pytest.raises(ValueError, match=rf"{len(names)} logical axes .* for the 2 entries of .*Name each dimension"):
    gathered_spec(P("fsdp", "tensor"), names, {"fsdp"})
  assert gathered_spec(P("fsdp", "tensor"), ("embed", "mlp"), {"fsdp"}) == P(None, "tensor")
