# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for jaxprs: they analyse which variables operations use, select parts of programs and inline calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from maxtext_pp_ext.jax_private import ClosedJaxpr, dce_jaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, Literal, Var

# Calls whose operands are the inner program's inputs, one to one. Functions with their own derivative rule are left out:
# the rule may use an operand in another way than the function does.
CALLS = frozenset({"pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint"})

# (operation, values of its operands) -> values that replace its results, or None to keep the operation.
Rewrite = Callable[[JaxprEqn, list], list | None]


def inner_program(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]]:
  """(jaxpr, constants) of the program that an operation runs."""
  inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
  return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def on_devices(eqn: JaxprEqn, body: Callable, in_specs: Sequence[Any], out_specs: Sequence[Any]) -> Callable:
  """The shard_map that an operation is, with another body and other layouts."""
  return jax.shard_map(
      body,
      mesh=eqn.params["mesh"],
      in_specs=tuple(in_specs),
      out_specs=tuple(out_specs),
      check_vma=eqn.params["check_vma"],
      axis_names=set(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))),
  )


def count_uses(jaxpr: Jaxpr) -> dict[Var, int]:
  """Counts how often each variable is an operand or an output; variables that are neither are left out."""
  uses: dict = {}
  for var in [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars):
    if isinstance(var, Var):
      uses[var] = uses.get(var, 0) + 1
  return uses


def makers_of(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
  """Maps each variable to the operation that computes it; inputs and constants are left out."""
  return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def inputs_of(jaxpr: Jaxpr, out: int) -> set[int]:
  """The numbers of the inputs that an output is computed from. Looks into loops and calls."""
  _, used_inputs = dce_jaxpr(jaxpr, [i == out for i in range(len(jaxpr.outvars))])
  return {i for i, used in enumerate(used_inputs) if used}


def readers(jaxpr: Jaxpr, weights: set[Var], after: dict[Var, frozenset[int]]) -> frozenset[int]:
  """The operations that read any of these inputs together with something else. Looks into calls and shard_maps.

  Args:
    jaxpr: the program.
    weights: the inputs; variables that are computed from them alone are added.
    after: of variables of the program, the operations that have read when they are there; those of all are added.
  """
  read = frozenset[int]()
  for eqn in jaxpr.eqns:
    used = [v for v in eqn.invars if isinstance(v, Var)]
    before = frozenset().union(*(after.get(v, frozenset()) for v in used))
    own = [v in weights for v in used]
    if used and all(own):
      weights.update(eqn.outvars)
      after.update(dict.fromkeys(eqn.outvars, before))
    elif any(own) and eqn.primitive.name in CALLS | {"shard_map"}:
      inner, _ = inner_program(eqn)
      pairs = [(a, b) for a, b in zip(eqn.invars, inner.invars, strict=True) if isinstance(a, Var)]
      within = {b: after.get(a, frozenset()) for a, b in pairs}
      read |= readers(inner, {b for a, b in pairs if a in weights}, within)
      outs = zip(eqn.outvars, inner.outvars, strict=True)
      after.update({v: within.get(out, frozenset()) if isinstance(out, Var) else frozenset() for v, out in outs})
    else:
      reads = frozenset([id(eqn)]) if any(own) else frozenset()
      read |= reads
      after.update(dict.fromkeys(eqn.outvars, before | reads))
  return read


def number(outvars: Sequence[Var | Literal], wanted: Sequence[bool]) -> tuple[dict[int, int], list[int]]:
  """Numbers the wanted outputs; equal variables share a number. ({output: number}, [output of each number])."""
  numbers: dict[int, int] = {}
  by_var: dict[Var | int, int] = {}
  first: list[int] = []
  for i, (var, want) in enumerate(zip(outvars, wanted, strict=True)):
    if not want:
      continue
    key = var if isinstance(var, Var) else id(var)
    if key not in by_var:
      by_var[key] = len(first)
      first.append(i)
    numbers[i] = by_var[key]
  return numbers, first


def select_outputs(closed: ClosedJaxpr, outs: Sequence[int]) -> ClosedJaxpr:
  """The part of a program that computes these outputs (numbers in ascending order). All inputs are kept."""
  wanted = set(outs)
  jaxpr, _ = dce_jaxpr(closed.jaxpr, [i in wanted for i in range(len(closed.jaxpr.outvars))], instantiate=True)
  return ClosedJaxpr(jaxpr, closed.consts)


def select_eqns(
    closed: ClosedJaxpr, eqns: Sequence[JaxprEqn], invars: Sequence[Var], outvars: Sequence[Var], *, consts: bool
) -> ClosedJaxpr:
  """A program of these operations only, with all constants of `closed` or with none."""
  given: dict[str, list] = {} if consts else {"constvars": []}
  jaxpr = closed.jaxpr.replace(eqns=list(eqns), invars=list(invars), outvars=list(outvars), **given)
  return ClosedJaxpr(jaxpr, closed.consts if consts else [])


def inline(closed: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
  """The same program without calls.

  Args:
    closed: the program.
    rewrite: called first on each operation, also within calls.
  """
  return jax.make_jaxpr(lambda *args: _run(closed.jaxpr, closed.consts, rewrite, *args))(*closed.in_avals)


def compute_once(closed: ClosedJaxpr, variables: Collection[Var]) -> ClosedJaxpr:
  """The same program, which computes each of these variables once, before all operations that use it.

  Without this the compiler may compute a cheap operation again within each matrix product that uses its result.
  """
  eqns: list[JaxprEqn] = []
  behind: dict[Var, Var] = {}
  use = lambda v: behind.get(v, v) if isinstance(v, Var) else v
  for eqn in closed.jaxpr.eqns:
    eqns.append(eqn.replace(invars=[use(v) for v in eqn.invars]) if behind else eqn)
    for var in eqn.outvars:
      if var in variables:
        (barrier,) = jax.make_jaxpr(jax.lax.optimization_barrier)(var.aval).jaxpr.eqns
        behind[var] = Var(var.aval)  # JAX traces a type once, so variables of one type have the same barrier
        eqns.append(barrier.replace(invars=[var], outvars=[behind[var]]))
  return ClosedJaxpr(closed.jaxpr.replace(eqns=eqns, outvars=[use(v) for v in closed.jaxpr.outvars]), closed.consts)


def run_eqn(jaxpr: Jaxpr, eqn: JaxprEqn, values: Sequence[Any]) -> list:
  """The results of one operation of a program."""
  given = {v: x for v, x in zip(eqn.invars, values, strict=True) if isinstance(v, Var)}
  single = jaxpr.replace(constvars=[], eqns=[eqn], invars=list(given), outvars=list(eqn.outvars))
  return jaxpr_as_fun(ClosedJaxpr(single, []))(*given.values())


def _run(jaxpr: Jaxpr, consts: Sequence, rewrite: Rewrite, *args: Any) -> list:
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
  read = lambda v: v.val if isinstance(v, Literal) else env[v]
  for eqn in jaxpr.eqns:
    values = [read(v) for v in eqn.invars]
    results = rewrite(eqn, values)
    if results is None and eqn.primitive.name in CALLS and not _has_shardings(eqn):
      inner, inner_consts = inner_program(eqn)
      results = _run(inner, inner_consts, rewrite, *_keep_from_merging(eqn, values))
    elif results is None:
      results = run_eqn(jaxpr, eqn, values)
    env.update(zip(eqn.outvars, results, strict=True))
  return [read(v) for v in jaxpr.outvars]


def _has_shardings(eqn: JaxprEqn) -> bool:
  """Whether a call gives its operands or results shardings. Such a call is not inlined."""
  given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
  return any(isinstance(s, jax.sharding.Sharding) for s in given)


def _keep_from_merging(eqn: JaxprEqn, values: list) -> list:
  """Adds the barrier that lowering a rematerialised call adds; without it the compiler merges call and forward pass."""
  prevent = eqn.params.get("prevent_cse", False) if eqn.params.get("differentiated", False) else False
  flags = [prevent] * len(values) if isinstance(prevent, bool) else list(prevent)
  if not any(flags):
    return values
  behind = iter(jax.lax.optimization_barrier([v for v, f in zip(values, flags, strict=False) if f]))
  return [next(behind) if f else v for v, f in zip(values, flags, strict=False)]
