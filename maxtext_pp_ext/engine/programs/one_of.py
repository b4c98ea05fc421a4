# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs whose inputs are one of several arrays: kernels read the chosen one where it is, without a copy.

A kernel (a Pallas call) reads whole arrays. If its operand is chosen by a number that is known at run time only, the
compiler copies the choice before each call. Here the program is run with the arrays and the number instead. Operations
that only name dimensions or layouts act on each array. Calls and `shard_map`s are entered. Around a kernel stands a
branch for each array. What reads the input in any other way gets a copy of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.programs.jaxprs import CALLS, inner_program, on_devices, run_eqn
from maxtext_pp_ext.jax_private import ClosedJaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, Literal, Var
from maxtext_pp_ext.sharding.resolve import mesh_axes

# Operations that leave the elements where they are in memory.
_SAME_MEMORY = frozenset({"squeeze", "reshape", "expand_dims", "sharding_constraint", "copy"})
_KERNEL, _ON_DEVICES = "pallas_call", "shard_map"


@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
  """One of several arrays of the same type.

  Attributes:
    arrays: the arrays, [S, …]; on a device that has one stage without S if `number` has none.
    number: for each stage the number of the array, int [S], or int [].
  """

  arrays: tuple[jax.Array, ...]
  number: jax.Array

  @functools.cached_property
  def chosen(self) -> jax.Array:
    """A copy of the choice."""
    number = self.number.reshape(self.number.shape + (1,) * (self.arrays[0].ndim - self.number.ndim))
    return jax.lax.select_n(jnp.broadcast_to(number, self.arrays[0].shape), *self.arrays)

  def each(self, fn: Callable[[jax.Array], jax.Array]) -> OneOf:
    """One of the results of a function."""
    return OneOf(tuple(fn(x) for x in self.arrays), self.number)


def run(closed: ClosedJaxpr, *args: Any) -> list[Any]:
  """Runs a program, any of whose inputs may be a `OneOf`. An output that is such an input is one, too."""
  if not any(isinstance(x, OneOf) for x in args):
    return jaxpr_as_fun(closed)(*args)
  return _run(closed.jaxpr, closed.consts, args)


def chosen(x: Any) -> jax.Array:
  """An array; a copy of the choice of a `OneOf`."""
  return x.chosen if isinstance(x, OneOf) else x


def read_by_kernels(closed: ClosedJaxpr, count: int) -> tuple[bool, ...]:
  """For each of the first `count` inputs, whether kernels read it, and nothing else does."""
  return tuple(bool(uses := _uses(closed.jaxpr, var)) and all(uses) for var in closed.jaxpr.invars[:count])


def _uses(jaxpr: Jaxpr, var: Var) -> list[bool]:
  """For each use of a variable whether it is a kernel's."""
  found = [False] if any(v is var for v in jaxpr.outvars) else []
  for eqn in jaxpr.eqns:
    for at, operand in enumerate(eqn.invars):
      if operand is not var:
        continue
      if eqn.primitive.name in _SAME_MEMORY:
        found += _uses(jaxpr, eqn.outvars[0])
      elif eqn.primitive.name in CALLS or eqn.primitive.name == _ON_DEVICES:
        inner, _ = inner_program(eqn)
        found += _uses(inner, inner.invars[at])
      else:
        found.append(eqn.primitive.name == _KERNEL)
  return found


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
  env: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
  read = lambda v: v.val if isinstance(v, Literal) else env[v]
  for eqn in jaxpr.eqns:
    values = [read(v) for v in eqn.invars]
    env.update(zip(eqn.outvars, _results(jaxpr, eqn, values), strict=True))
  return [read(v) for v in jaxpr.outvars]


def _results(jaxpr: Jaxpr, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
  name, several = eqn.primitive.name, [x for x in values if isinstance(x, OneOf)]
  if not several:
    return run_eqn(jaxpr, eqn, values)
  if name in _SAME_MEMORY and isinstance(values[0], OneOf):
    return [values[0].each(lambda x: run_eqn(jaxpr, eqn, [x, *values[1:]])[0])]
  if name == "optimization_barrier":
    return _barrier(values)
  if name in CALLS:
    inner, consts = inner_program(eqn)
    return _run(inner, consts, values)
  if name == _ON_DEVICES and (results := _on_devices(eqn, values)) is not None:
    return results
  if name == _KERNEL and all(x.number.ndim == 0 for x in several) and len({id(x.number) for x in several}) == 1:
    return _kernel(jaxpr, eqn, values, several[0].number)
  return run_eqn(jaxpr, eqn, [chosen(x) for x in values])


def _barrier(values: Sequence[Any]) -> list[Any]:
  behind = jax.lax.optimization_barrier([x.arrays if isinstance(x, OneOf) else x for x in values])
  return [OneOf(b, x.number) if isinstance(x, OneOf) else b for x, b in zip(values, behind, strict=True)]


def _on_devices(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
  """A shard_map of which each device has one stage at most; None for another one."""
  specs, mesh = eqn.params["in_specs"], eqn.params["mesh"]
  args, arg_specs, slots = [], [], []
  for x, spec in zip(values, specs, strict=True):
    if not isinstance(x, OneOf):
      slots.append(1)
      args.append(x)
      arg_specs.append(spec)
      continue
    stage = spec[0] if len(spec) else None
    if x.number.ndim != 1 or x.number.shape[0] != math.prod(mesh.shape[a] for a in mesh_axes(stage)):
      return None
    slots.append(0)
    args += [*x.arrays, x.number]
    arg_specs += [*(spec for _ in x.arrays), P(stage)]
  inner, consts = inner_program(eqn)
  count = next(len(x.arrays) for x in values if isinstance(x, OneOf))

  def body(*local):
    given, numbers = iter(local), dict[int, jax.Array]()
    operands: list[Any] = []
    for slot, x in zip(slots, values, strict=True):
      if slot:
        operands.append(next(given))
      else:
        arrays, number = tuple(next(given) for _ in range(count)), next(given)
        # The same number for all of them, so that one branch chooses all operands of a kernel.
        operands.append(OneOf(arrays, numbers.setdefault(id(x.number), number[0])))
    return tuple(chosen(x) for x in _run(inner, consts, operands))

  return list(on_devices(eqn, body, arg_specs, eqn.params["out_specs"])(*args))


def _kernel(jaxpr: Jaxpr, eqn: JaxprEqn, values: Sequence[Any], number: jax.Array) -> list[Any]:
  """A kernel in a branch for each array, which reads it where it is."""
  count = next(len(x.arrays) for x in values if isinstance(x, OneOf))
  branches = [
      lambda *operands, k=k: run_eqn(jaxpr, eqn, [x[k] if isinstance(x, tuple) else x for x in operands])
      for k in range(count)
  ]
  operands = [x.arrays if isinstance(x, OneOf) else x for x in values]
  return jax.lax.switch(number, branches, *operands)
