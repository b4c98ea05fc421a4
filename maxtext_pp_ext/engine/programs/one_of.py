# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs whose inputs are one of several arrays: kernels of grouped products read the chosen one where it is.

The compiler puts the choice of a window's buffer into the matrix product that reads the weight. A kernel (a Pallas call)
reads whole arrays. A buffer that is chosen for it by a number that is known at run time only is copied before each call.

Megablox' kernels (`jax.experimental.pallas.ops.tpu.megablox`, and MaxText's) multiply each group of rows by a matrix.
They read matrix `group − offset` of [groups, k, n], where `offset` is an operand of theirs. So here a kernel gets all
arrays as one, [arrays · groups, k, n], and an offset that leads to the chosen one. Up to there the program is run with
the arrays and the number: operations that only name dimensions or layouts act on each array, calls and `shard_map`s are
entered. What reads the input in any other way gets a copy of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.programs.jaxprs import (
    count_uses,
    inner_program,
    interpret,
    makers_of,
    on_devices,
    run_eqn,
    uses,
)
from maxtext_pp_ext.engine.programs.primitives import has, is_call, runs_program, Trait
from maxtext_pp_ext.jax_private import ClosedJaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, PallasCall, Var
from maxtext_pp_ext.sharding.resolve import mesh_axes


@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
  """One of several arrays of the same type."""

  arrays: jax.Array  # the arrays, [B, S, …], or those of one stage, [B, …]
  number: jax.Array  # for each stage the number of the array, int [S]; for one stage int []

  @functools.cached_property
  def chosen(self) -> jax.Array:
    """A copy of the choice."""
    one = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    return jax.vmap(one, in_axes=(1, 0))(self.arrays, self.number) if self.number.ndim else one(self.arrays, self.number)

  def each(self, fn: Callable[[jax.Array], jax.Array]) -> OneOf:
    """One of the results of a function."""
    return OneOf(jax.vmap(fn)(self.arrays), self.number)


# (program, one of its operations, values of the operands) -> the results, or None.
RuleOf = Callable[[Jaxpr, JaxprEqn, list[Any]], Sequence[Any] | None]


def run(
    closed: ClosedJaxpr,
    *args: Any,
    replaced: Mapping[Var, Callable[[Any], Any]] | None = None,
    first: RuleOf | None = None,
) -> list[Any]:
  """Runs a program, any of whose inputs may be a `OneOf`. An output that is such an input is one, too.

  Args:
    closed: the program.
    *args: its inputs.
    replaced: functions of values of its variables. What follows a variable gets the function's result in its place.
    first: asked first for the results of each operation, but not within calls and `shard_map`s.
  """
  if not replaced and first is None and not any(isinstance(x, OneOf) for x in args):
    return jaxpr_as_fun(closed)(*args)
  rule = functools.partial(_rule, closed.jaxpr, replaced or {}, first)
  return interpret(closed.jaxpr, closed.consts, args, rule)


def chosen(x: Any) -> jax.Array:
  """An array; a copy of the choice of a `OneOf`."""
  return x.chosen if isinstance(x, OneOf) else x


def read_by_kernels(closed: ClosedJaxpr, count: int) -> tuple[bool, ...]:
  """For each of the first `count` inputs, whether kernels that take an offset read it, and nothing else does."""
  found = []
  for var in closed.jaxpr.invars[:count]:
    entered = lambda eqn, _: runs_program(eqn)
    read = list(uses(closed.jaxpr, var, through=lambda eqn, _: has(eqn, Trait.SAME_MEMORY), enter=entered))
    found.append(bool(read) and all(eqn is not None and _offset(eqn, at) is not None for eqn, at in read))
  return tuple(found)


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
  return interpret(jaxpr, consts, args, lambda eqn, values: _results(jaxpr, eqn, values))


def _rule(
    jaxpr: Jaxpr,
    replaced: Mapping[Var, Callable[[Any], Any]],
    first: RuleOf | None,
    eqn: JaxprEqn,
    values: list[Any],
) -> Sequence[Any] | None:
  results = first(jaxpr, eqn, values) if first else None
  results = _results(jaxpr, eqn, values) if results is None else results
  if replaced.keys().isdisjoint(eqn.outvars):
    return results
  results = run_eqn(jaxpr, eqn, values) if results is None else results
  return [replaced[v](results[k]) if v in replaced else results[k] for k, v in enumerate(eqn.outvars)]


def _results(jaxpr: Jaxpr, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
  """The results of an operation on a `OneOf`; None if no operand is one."""
  name, several = eqn.primitive.name, [k for k, x in enumerate(values) if isinstance(x, OneOf)]
  if not several:
    return None
  if has(eqn, Trait.SAME_MEMORY) and several == [0]:
    return [values[0].each(lambda x: run_eqn(jaxpr, eqn, [x, *values[1:]])[0])]
  if name == "optimization_barrier":
    behind = jax.lax.optimization_barrier([x.arrays if isinstance(x, OneOf) else x for x in values])
    return [OneOf(behind[k], x.number) if isinstance(x, OneOf) else behind[k] for k, x in enumerate(values)]
  if is_call(eqn):
    inner, consts = inner_program(eqn)
    return _run(inner, consts, entering(eqn, values))
  if name == "shard_map" and _has_one_stage(eqn, values):
    return on_devices_of(eqn, values, lambda local: [chosen(x) for x in _run(*inner_program(eqn), local)])
  if len(several) == 1 and not values[several[0]].number.ndim and (offset := _offset(eqn, several[0])) is not None:
    return _with_offset(jaxpr, eqn, values, several[0], offset)
  return run_eqn(jaxpr, eqn, [chosen(x) for x in values])


def entering(call: JaxprEqn, values: list[Any]) -> list[Any]:
  """The operands of a call, of which any may be a `OneOf`, as its inner program gets them."""
  # The compiler (libtpu 0.0.48.1; benchmarks.workarounds activation_of_expert) changes shapes before it merges equal
  # operations. Without a barrier it would compute an expert's activation twice, for the product that is recomputed and
  # for the weight's gradient: 2 % of a step of Mixtral. With a remat policy JAX makes an `eval_jaxpr` of what is
  # computed again, and passes its results to the next one: behind a barrier these would be written to memory.
  of_several = any(isinstance(x, OneOf) for x in values)
  stays = lambda x: isinstance(x, OneOf) or jnp.ndim(x) < 2 or call.primitive.name == "eval_jaxpr" or not of_several
  behind = lambda x: x if stays(x) else jax.lax.optimization_barrier(x)
  return [behind(x) for x in values]


def _has_one_stage(eqn: JaxprEqn, values: Sequence[Any]) -> bool:
  """Whether each device of a shard_map has one stage at most of each operand that is a `OneOf`."""
  for x, spec in zip(values, eqn.params["in_specs"], strict=True):
    if isinstance(x, OneOf):
      stage = spec[0] if len(spec) else None
      if x.number.ndim != 1 or x.number.shape[0] != math.prod(eqn.params["mesh"].shape[a] for a in mesh_axes(stage)):
        return False
  return True


def on_devices_of(
    eqn: JaxprEqn,
    values: Sequence[Any],
    run: Callable[..., Sequence[jax.Array]],
    more: Sequence[jax.Array] = (),
    specs: Sequence[P] = (),
    results: Sequence[P] = (),
) -> list[jax.Array]:
  """The results of a shard_map, any of whose operands may be a `OneOf`, with another body.

  Args:
    eqn: the shard_map.
    values: its operands.
    run: (a device's operands, further arrays of it) -> the device's results, further ones.
    more: the further arrays.
    specs: their PartitionSpecs.
    results: those of the further results.
  """
  if not _has_one_stage(eqn, values):
    values = [chosen(x) for x in values]
  args, in_specs = list[jax.Array](), list[P]()
  for x, spec in zip(values, eqn.params["in_specs"], strict=True):
    if isinstance(x, OneOf):
      args += [x.arrays, x.number]
      in_specs += [P(None, *spec), P(spec[0] if len(spec) else None)]
    else:
      args.append(x)
      in_specs.append(spec)

  def body(*local):
    given = iter(local)
    operands = [OneOf(next(given), next(given)[0]) if isinstance(x, OneOf) else next(given) for x in values]
    return tuple(run(operands, *given))

  mapped = on_devices(eqn, body, [*in_specs, *specs], [*eqn.params["out_specs"], *results])
  scopes = str(eqn.source_info.name_stack)
  with jax.named_scope(scopes) if scopes else contextlib.nullcontext():
    return list(mapped(*args, *more))


def _with_offset(jaxpr: Jaxpr, eqn: JaxprEqn, values: Sequence[Any], at: int, offset: int) -> list[Any]:
  """A kernel whose operand number `at` is one of several arrays, and which takes an offset as operand `offset`."""
  arrays, number, groups = values[at].arrays, values[at].number, eqn.invars[at].aval.shape[0]
  given = [chosen(x) for k, x in enumerate(values) if k != at]
  given.insert(at, arrays.reshape(-1, *arrays.shape[2:]))
  given[offset] = given[offset] - (number * groups).astype(given[offset].dtype)
  return run_eqn(jaxpr, PallasCall(eqn).with_shape(at, given[at].shape), given)


def _offset(eqn: JaxprEqn, at: int) -> int | None:
  """The operand that a kernel subtracts from the number of the matrix that it reads of operand `at`.

  None if there is none: the kernel reads something else than one matrix at a time, or uses that operand elsewhere, too.
  """
  if eqn.primitive.name != "pallas_call":
    return None
  kernel = PallasCall(eqn)
  block = kernel.block(at)
  if block is None or not kernel.reads_one_at_a_time(block):
    return None
  index_map = kernel.index_map(block)
  matrix = _maker(index_map, index_map.outvars[0], "sub")
  read = None if matrix is None else _maker(index_map, matrix.invars[1], "get")
  if read is None or read.invars[0] not in index_map.invars:
    return None
  grid = kernel.grid_rank(block)
  number = index_map.invars.index(read.invars[0]) - grid
  others = [kernel.index_map(each) for each in kernel.blocks if each != block]
  read_by = [(each, each.invars[grid + number]) for each in others] + [(kernel.body, kernel.body.invars[number])]
  if any(var in count_uses(jaxpr) for jaxpr, var in read_by) or count_uses(index_map)[read.invars[0]] > 1 or number < 0:
    return None
  return kernel.operand_of_scalar(number)


def _maker(jaxpr: Jaxpr, var: Any, primitive: str) -> JaxprEqn | None:
  """The operation that computes a variable, if it has this primitive."""
  eqn = makers_of(jaxpr).get(var) if isinstance(var, Var) else None
  return eqn if eqn is not None and eqn.primitive.name == primitive else None
