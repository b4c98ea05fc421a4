# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What devices do while experts compute: between which exchanges of tokens, and for which weights."""

import types

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from maxtext_pp_ext.engine import exchanges
from maxtext_pp_ext.engine.per_stage import Layout, OnDevices
from maxtext_pp_ext.engine.programs.jaxprs import inner_program
from maxtext_pp_ext.engine.programs.partial import GradientProgram
from maxtext_pp_ext.engine.programs.segments import Segment
from maxtext_pp_ext.engine.weights import of_all

NUMBER = jnp.array([3])
ARRAY = jnp.arange(4.0).reshape(1, 4)


@pytest.fixture(name="mesh", scope="module")
def fixture_mesh():
  return jax.make_mesh((1, 2), ("stage", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def exchange(x):
  rows = jnp.zeros((2,), jnp.int32)
  return jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), rows, rows, rows, rows, axis_name="expert")


def layer(mesh, of_device, axes=("stage", "expert")):
  spec = P(*(axis if axis in axes else None for axis in mesh.axis_names))
  return jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(axes), check_vma=False)


def traced(mesh, *of_devices, **given):
  """A program of layers, some of which are in calls."""

  def program(x):
    for k, of_device in enumerate(of_devices):
      one = layer(mesh, of_device, **given)
      x = jax.jit(one)(x) if k % 2 else one(x)
    return x

  return jax.make_jaxpr(program)(jnp.zeros((1, 8)))


def on_devices(mesh):
  """Doubles an array as often as a number says."""
  fn = lambda number, x: [x * 2.0**number]
  return OnDevices.per_stage(fn, mesh, [NUMBER], [ARRAY], [Layout(P("stage"), 0)], [Layout(P("stage"), 0)])


def within(mesh, program, beside):
  """The operations of the last layer's devices, with what they do beside it."""
  jaxpr = jax.make_jaxpr(lambda x: exchanges.run(program, x, beside=beside))(jnp.zeros((1, 8))).jaxpr
  return inner_program([eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"][-1])[0]


def after(jaxpr, eqn):
  """The operations that follow from one."""
  found, values = [], set(eqn.outvars)
  for each in jaxpr.eqns:
    if any(isinstance(v, jax.extend.core.Var) and v in values for v in each.invars):
      found.append(each)
      values |= set(each.outvars)
  return found


def named(jaxpr, name):
  return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]


@pytest.mark.parametrize("of_device, number", [(lambda x: exchange(exchange(x) + 1), 1), (jnp.sin, 0)])
def test_operations_with_exchanges_are_counted_also_in_calls(mesh, of_device, number):
  assert exchanges.count(traced(mesh, of_device)) == number
  assert exchanges.count(traced(mesh, of_device, of_device, jnp.sin)) == 2 * number


def test_an_operation_that_is_not_over_all_axes_is_left_as_it_is(mesh):
  assert exchanges.count(traced(mesh, exchange, axes=["expert"])) == 0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_it_begins_behind_the_first_exchange_and_ends_before_the_last_one(mesh, number):
  def of_device(x):
    for _ in range(number):
      x = jnp.sin(exchange(x))
    return x

  jaxpr = within(mesh, traced(mesh, of_device), [on_devices(mesh)])
  (doubled,) = named(jaxpr, "pow") or named(jaxpr, "exp2")
  first, *_, last = [*named(jaxpr, "ragged_all_to_all")] * 2
  assert last in after(jaxpr, doubled)
  assert (doubled in after(jaxpr, first)) == (number > 1)


def test_without_indices_nothing_waits_for_the_first_exchange(mesh):
  doubles = OnDevices.per_stage(lambda x: [x * 2], mesh, [], [ARRAY], [Layout(P("stage"), 0)], [Layout(P("stage"), 0)])
  program = traced(mesh, lambda x: exchange(exchange(x)))
  barriers = [len(named(within(mesh, program, [each]), "optimization_barrier")) for each in (on_devices(mesh), doubles)]
  assert barriers == [2, 1]  # without the first: only what the last exchange waits for


def test_each_operation_has_its_own_and_the_results_are_in_order(mesh):
  twice = lambda x: exchange(exchange(x))
  program = traced(mesh, twice, jnp.sin, twice, twice)
  one = on_devices(mesh)
  _, found = jax.eval_shape(lambda x: exchanges.run(program, x, beside=[None, one, one]), jnp.zeros((1, 8)))
  assert [len(each) for each in found] == [0, 1, 1]


def weights(sizes, overlapped):
  return [
      types.SimpleNamespace(shape=(2, 1, size), is_gather_overlapped=each)
      for size, each in zip(sizes, overlapped, strict=True)
  ]


@pytest.mark.parametrize(
    "sizes, overlapped, groups",
    [
        ([4, 4, 4, 4], [True] * 4, [[0, 1], [2, 3]]),
        ([9, 1, 9, 1], [True] * 4, [[0, 1], [2, 3]]),
        ([4, 4, 4, 4], [True, False, True, True], [[0], [2, 3]]),
        ([4], [True], [[], [0]]),
        ([4], [False], []),
        ([0, 0], [True, True], [[0, 1], []]),
    ],
)
def test_weights_are_in_groups_that_gather_about_as_much(sizes, overlapped, groups):
  assert of_all.in_groups(weights(sizes, overlapped), 2) == groups


def test_without_exchanges_there_are_no_groups():
  assert of_all.in_groups(weights([4], [True]), 0) == []


def test_the_gathers_are_in_their_scope(mesh):
  one = on_devices(mesh)
  beside = [one._replace(fn=jax.named_scope("gather")(one.fn))]
  jaxpr = within(mesh, traced(mesh, lambda x: exchange(exchange(x))), beside)
  (doubled,) = named(jaxpr, "pow") or named(jaxpr, "exp2")
  assert "gather" in str(doubled.source_info.name_stack)


# (for each segment of backward whether it has exchanges, the segment in the middle if gathers wait) -> the segment.
@pytest.mark.parametrize(
    "with_exchanges, gathers_after, found",
    [
        ([True, False], 0, 0),
        ([True, False], None, 0),
        ([True, False, True, False], 1, 0),
        ([True, False, True, False], None, 2),
        ([True, False, False, False], None, None),
        ([False, False, True, False], 1, None),
        ([False, False], 0, None),
    ],
)
def test_transfers_end_in_the_segment_with_the_last_exchange_before_gathers_begin(
    mesh, with_exchanges, gathers_after, found
):
  programs = [traced(mesh, exchange if each else jnp.sin) for each in with_exchanges]
  segments = tuple(Segment(program, (), (), (), ()) for program in programs)
  program = GradientProgram(inputs=(), segments=segments, gradients=(), others=(), gathers_after=gathers_after)
  assert program.exchanges_in == found
