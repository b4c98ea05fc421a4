# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for jaxprs: they analyse which variables operations use, select parts of programs, and run them by a rule."""

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from maxtext_pp_ext.engine.programs.primitives import has, is_call, runs_program, Trait
from maxtext_pp_ext.jax_private import ClosedJaxpr, dce_jaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, Literal, Var

# (operation, values of its operands) -> the values of its results, or None to run the operation as it is.
Rule = Callable[[JaxprEqn, list], Sequence | None]
# (operation, number of one of its operands) -> whether something is true of them.
OfOperand = Callable[[JaxprEqn, int], bool]


def closed(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> ClosedJaxpr:
  """A program with its constants. The one place that makes one: jax's main branch merges the two types."""
  return ClosedJaxpr(jaxpr, consts)


def inner_program(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]]:
  """(jaxpr, constants) of the program that an operation runs."""
  inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
  return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def manual_axes(eqn: JaxprEqn) -> set[str]:
  """The mesh axes over which a shard_map maps."""
  return set(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes")))


def on_devices(eqn: JaxprEqn, body: Callable, in_specs: Sequence[Any], out_specs: Sequence[Any]) -> Callable:
  """The shard_map that an operation is, with another body and other layouts."""
  return jax.shard_map(
      body,
      mesh=eqn.params["mesh"],
      in_specs=tuple(in_specs),
      out_specs=tuple(out_specs),
      check_vma=eqn.params["check_vma"],
      axis_names=manual_axes(eqn),
  )


def variables(values: Sequence[Var | Literal]) -> list[Var]:
  """Those that are no literals."""
  return [v for v in values if isinstance(v, Var)]


def count_uses(jaxpr: Jaxpr) -> dict[Var, int]:
  """Counts how often each variable is an operand or an output; variables that are neither are left out."""
  return collections.Counter(variables([*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]))


def uses(
    jaxpr: Jaxpr, var: Var, through: OfOperand, enter: OfOperand = lambda eqn, _: is_call(eqn)
) -> Iterator[tuple[JaxprEqn | None, int]]:
  """Where a variable is used: (operation, number of the operand), or (None, number of the output).

  Args:
    jaxpr: the program.
    var: the variable.
    through: whether the result of an operation stands for the variable.
    enter: whether the inner program of an operation is looked into; by default of calls.
  """
  for eqn in jaxpr.eqns:
    for at in (k for k, operand in enumerate(eqn.invars) if operand is var):
      if through(eqn, at):
        yield from uses(jaxpr, eqn.outvars[min(at, len(eqn.outvars) - 1)], through, enter)
      elif enter(eqn, at):
        inner, _ = inner_program(eqn)
        yield from uses(inner, inner.invars[at], through, enter)
      else:
        yield eqn, at
  yield from ((None, k) for k, out in enumerate(jaxpr.outvars) if out is var)


def makers_of(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
  """Maps each variable to the operation that computes it; inputs and constants are left out."""
  return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def inputs_of(jaxpr: Jaxpr, out: int) -> set[int]:
  """The numbers of the inputs that an output is computed from. Looks into loops and calls."""
  _, used_inputs = dce_jaxpr(jaxpr, [i == out for i in range(len(jaxpr.outvars))])
  return {i for i, used in enumerate(used_inputs) if used}


def origin(var: Var | Literal, makers: Mapping[Var, JaxprEqn], trait: Trait) -> Var | Literal:
  """The variable that operations with this trait have made into `var`; `var` itself if there are none."""
  while isinstance(var, Var) and var in makers and has(makers[var], trait):
    var = makers[var].invars[0]
  return var


def following(eqns: Sequence[JaxprEqn], first: Collection[Var]) -> set[Var]:
  """These variables, and those that are computed from them."""
  found = set(first)
  for eqn in eqns:
    if not found.isdisjoint(variables(eqn.invars)):
      found |= set(eqn.outvars)
  return found


def readers(jaxpr: Jaxpr, weights: set[Var], after: dict[Var, frozenset[int]]) -> frozenset[int]:
  """The operations that read any of these inputs together with something else. Looks into calls and shard_maps.

  Args:
    jaxpr: the program.
    weights: the inputs; variables that are computed from them alone are added.
    after: of variables of the program, the operations that have read when they are there; those of all are added.
  """
  read = frozenset[int]()
  for eqn in jaxpr.eqns:
    used = variables(eqn.invars)
    before = frozenset().union(*(after.get(v, frozenset()) for v in used))
    own = [v in weights for v in used]
    if used and all(own):
      weights.update(eqn.outvars)
      after.update(dict.fromkeys(eqn.outvars, before))
    elif any(own) and runs_program(eqn):
      inner, _ = inner_program(eqn)
      pairs = [(a, inner.invars[k]) for k, a in enumerate(eqn.invars) if isinstance(a, Var)]
      within = {b: after.get(a, frozenset()) for a, b in pairs}
      read |= readers(inner, {b for a, b in pairs if a in weights}, within)
      for k, out in enumerate(inner.outvars):
        after[eqn.outvars[k]] = within.get(out, frozenset()) if isinstance(out, Var) else frozenset()
    else:
      reads = frozenset([id(eqn)]) if any(own) else frozenset()
      read |= reads
      after.update(dict.fromkeys(eqn.outvars, before | reads))
  return read


def number(outvars: Sequence[Var | Literal], wanted: Collection[int]) -> tuple[dict[int, int], list[int]]:
  """Numbers the wanted outputs; equal variables share a number. ({output: number}, [output of each number])."""
  numbers: dict[int, int] = {}
  by_var: dict[Var | int, int] = {}
  first: list[int] = []
  for i in sorted(wanted):
    var = outvars[i]
    key = var if isinstance(var, Var) else id(var)
    if key not in by_var:
      by_var[key] = len(first)
      first.append(i)
    numbers[i] = by_var[key]
  return numbers, first


def select_outputs(program: ClosedJaxpr, outs: Sequence[int]) -> ClosedJaxpr:
  """The part of a program that computes these outputs (numbers in ascending order). All inputs are kept."""
  wanted = set(outs)
  jaxpr, _ = dce_jaxpr(program.jaxpr, [i in wanted for i in range(len(program.jaxpr.outvars))], instantiate=True)
  return closed(jaxpr, program.consts)


def select_eqns(
    program: ClosedJaxpr, eqns: Sequence[JaxprEqn], invars: Sequence[Var], outvars: Sequence[Var], *, consts: bool
) -> ClosedJaxpr:
  """A program of these operations only, with all constants of `program` or with none."""
  given: dict[str, list] = {} if consts else {"constvars": []}
  jaxpr = program.jaxpr.replace(eqns=list(eqns), invars=list(invars), outvars=list(outvars), **given)
  return closed(jaxpr, program.consts if consts else [])


def interpret(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], rule: Rule) -> list[Any]:
  """Runs a program one operation after the other, each by a rule."""
  values: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
  for eqn in jaxpr.eqns:
    operands = [_value(v, values) for v in eqn.invars]
    results = rule(eqn, operands)
    values |= zip(eqn.outvars, run_eqn(jaxpr, eqn, operands) if results is None else results, strict=True)
  return [_value(v, values) for v in jaxpr.outvars]


def _value(v: Var | Literal, values: dict[Var, Any]) -> Any:
  return v.val if isinstance(v, Literal) else values[v]


def run_eqn(jaxpr: Jaxpr, eqn: JaxprEqn, operands: Sequence[Any]) -> list:
  """The results of one operation of a program."""
  given = {v: operands[k] for k, v in enumerate(eqn.invars) if isinstance(v, Var)}
  single = jaxpr.replace(constvars=[], eqns=[eqn], invars=list(given), outvars=list(eqn.outvars))
  return jaxpr_as_fun(closed(single))(*given.values())


def inline(program: ClosedJaxpr, rewrite: Rule) -> ClosedJaxpr:
  """The same program without calls.

  Args:
    program: the program.
    rewrite: called first on each operation, also within calls.
  """

  def rule(eqn: JaxprEqn, operands: list) -> Sequence | None:
    results = rewrite(eqn, operands)
    if results is not None or not is_call(eqn) or has_shardings(eqn):
      return results
    return interpret(*inner_program(eqn), _keep_from_merging(eqn, operands), rule)

  run = lambda *args: interpret(program.jaxpr, program.consts, args, rule)
  return jax.make_jaxpr(run)(*program.in_avals)


def compute_once(program: ClosedJaxpr, wanted: Collection[Var]) -> ClosedJaxpr:
  """The same program, which computes each of these variables once, before all operations that use it.

  Without this the compiler may compute a cheap operation again within each matrix product that uses its result.
  """
  eqns: list[JaxprEqn] = []
  behind: dict[Var, Var] = {}
  use = lambda v: behind.get(v, v) if isinstance(v, Var) else v
  for eqn in program.jaxpr.eqns:
    eqns.append(eqn.replace(invars=[use(v) for v in eqn.invars]) if behind else eqn)
    for var in eqn.outvars:
      if var in wanted:
        (barrier,) = jax.make_jaxpr(jax.lax.optimization_barrier)(var.aval).jaxpr.eqns
        behind[var] = Var(var.aval)  # JAX traces a type once, so variables of one type have the same barrier
        eqns.append(barrier.replace(invars=[var], outvars=[behind[var]]))
  return closed(program.jaxpr.replace(eqns=eqns, outvars=[use(v) for v in program.jaxpr.outvars]), program.consts)


def has_shardings(eqn: JaxprEqn) -> bool:
  """Whether a call gives its operands or results shardings. Such a call is not inlined."""
  given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
  return any(isinstance(s, jax.sharding.Sharding) for s in given)


def _keep_from_merging(eqn: JaxprEqn, values: list) -> list:
  """Adds the barrier that lowering a rematerialised call adds; without it the compiler merges call and forward pass."""
  prevent = eqn.params.get("prevent_cse", False) if eqn.params.get("differentiated", False) else False
  flags = [prevent] * len(values) if isinstance(prevent, bool) else list(prevent)
  flagged = [k for k, flag in enumerate(flags) if flag]
  if not flagged:
    return values
  behind = dict(zip(flagged, jax.lax.optimization_barrier([values[k] for k in flagged]), strict=True))
  return [behind.get(k, value) for k, value in enumerate(values)]
