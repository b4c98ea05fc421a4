# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs whose experts exchange tokens: they are run so that weights are transferred while experts compute.

With MaxText's default dispatch a layer exchanges tokens between devices before its experts compute, and after. A flag
lets devices compute meanwhile, and others put transfers on the SparseCores. Left to itself, the TPU compiler (libtpu
0.0.48.1; benchmarks.workarounds transfers_behind_exchange) then puts a layer's other transfers behind an exchange, where
nothing computes: they took 0.4 of 2.2 s of Mixtral 8x7B on v5p. Here they begin behind the first exchange and end before
the last one, or begin when the last one can.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from maxtext_pp_ext.engine.per_stage import OnDevices
from maxtext_pp_ext.engine.programs import one_of
from maxtext_pp_ext.engine.programs.jaxprs import closed, has_shardings, inner_program, manual_axes
from maxtext_pp_ext.engine.programs.primitives import is_call
from maxtext_pp_ext.jax_private import ClosedJaxpr, Jaxpr, JaxprEqn

_EXCHANGE = "ragged_all_to_all"


def count(program: ClosedJaxpr) -> int:
  """The number of operations beside whose experts weights can be transferred: `shard_map`s with exchanges of tokens."""
  return len(list(_with_exchanges(program.jaxpr)))


def run(
    program: ClosedJaxpr, *args: Any, beside: Sequence[OnDevices | None], **given: Any
) -> tuple[list[Any], list[list[jax.Array]]]:
  """Runs a program as `one_of.run` does, and other functions within the operations that `count` counts.

  Args:
    program: the program.
    *args: its inputs.
    beside: one for each of these operations. The function is called when the indices are there, and, if there are any,
      the first exchange's result. The last exchange begins when its results are there. What reads these waits for that
      exchange's operand.
    **given: as for `one_of.run`.

  Returns:
    (the program's outputs, the results of each of `beside`; [] for None).
  """
  found: list[list[jax.Array]] = []

  def first(jaxpr: Jaxpr, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
    if _has_exchanges(eqn):
      one = beside[len(found)]
      results, of_one = (None, []) if one is None else _within(eqn, values, one)
      found.append(of_one)
      return results
    if _is_entered(eqn) and any(_with_exchanges(inner_program(eqn)[0])):
      return _enter(eqn, values, first)
    return None

  return one_of.run(program, *args, **given, first=first), found


def _with_exchanges(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
  for eqn in jaxpr.eqns:
    if _is_entered(eqn):
      yield from _with_exchanges(inner_program(eqn)[0])
    elif _has_exchanges(eqn):
      yield eqn


def _is_entered(eqn: JaxprEqn) -> bool:
  return is_call(eqn) and not has_shardings(eqn)


def _enter(call: JaxprEqn, values: list[Any], first: one_of.RuleOf) -> list[Any]:
  """The results of a call, within which `first` is asked, too."""
  return one_of.run(closed(*inner_program(call)), *one_of.entering(call, values), first=first)


def _has_exchanges(eqn: JaxprEqn) -> bool:
  """Whether each device runs exchanges in this operation, and nothing forbids that it does something else there."""
  if eqn.primitive.name != "shard_map" or eqn.params["check_vma"]:
    return False
  return manual_axes(eqn).issuperset(eqn.params["mesh"].axis_names) and _exchanges(inner_program(eqn)[0]) > 0


def _exchanges(jaxpr: Jaxpr) -> int:
  """The number of exchanges of a device's program, also within calls."""
  calls = sum(_exchanges(inner_program(eqn)[0]) for eqn in jaxpr.eqns if _is_entered(eqn))
  return calls + sum(eqn.primitive.name == _EXCHANGE for eqn in jaxpr.eqns)


def _within(eqn: JaxprEqn, values: Sequence[Any], beside: OnDevices) -> tuple[list[jax.Array], list[jax.Array]]:
  """(the results of an operation with exchanges, those of `beside`)."""
  inner, consts = inner_program(eqn)
  last, (indices, args) = _exchanges(inner), (list(beside.indices), list(beside.args))

  def on_device(operands: list[Any], *more: jax.Array) -> list[jax.Array]:
    numbers, arrays, number, found = list(more[: len(indices)]), more[len(indices) :], 0, list[jax.Array]()

    def first(jaxpr: Jaxpr, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
      nonlocal number, found
      if _is_entered(eqn) and _exchanges(inner_program(eqn)[0]):
        return _enter(eqn, values, first)
      if eqn.primitive.name != _EXCHANGE:
        return None
      number += 1
      if last == 1:
        found = list(beside.fn(*numbers, *arrays))
      if number == last:
        values[0], found = jax.lax.optimization_barrier((values[0], found))
      tokens = eqn.primitive.bind(*values, **eqn.params)
      if number == 1 < last:
        behind = numbers
        if numbers:
          tokens, behind = jax.lax.optimization_barrier((tokens, numbers))
        found = list(beside.fn(*behind, *arrays))
      return [tokens]

    out = one_of.run(closed(inner, consts), *operands, first=first)
    return [*(one_of.chosen(x) for x in out), *found]

  out = one_of.on_devices_of(eqn, values, on_device, [*indices, *args], beside.specs, beside.results)
  return out[: len(eqn.outvars)], out[len(eqn.outvars) :]
