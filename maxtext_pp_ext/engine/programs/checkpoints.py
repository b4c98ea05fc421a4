# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a stage from being recomputed twice, where its layers are rematerialised already.

A pipeline wraps its stages in `jax.checkpoint` with the run's remat policy. If each layer has a checkpoint, too, and the
policy does not keep the layers' inputs, backward would compute every layer once for the outer checkpoint, to have these
inputs, and once more for the inner one. So the inner ones are dropped: the outer one recomputes everything that they
would, and the run's policy decides what is kept.

A checkpoint within a layer keeps its meaning, as MaxText's (0.2.5) around the loop of DeepSeek's indexer: it bounds the
memory of a part that the outer one recomputes as a whole. The two are told apart by where they stand. A checkpoint around
a part has some of the layer's operations beside it, such as the sum of its residual connection. Checkpoints around whole
layers leave nothing outside on the way from the stage's input to its output.
"""

from collections.abc import Callable, Sequence, Set
import contextlib
import functools
from typing import Any

import jax

from maxtext_pp_ext.engine.programs.jaxprs import inner_program, inputs_of, interpret, run_eqn, variables
from maxtext_pp_ext.engine.programs.primitives import has, is_call, Trait
from maxtext_pp_ext.jax_private import Jaxpr, jaxpr_as_fun, JaxprEqn, Var


class _PartOutsideError(Exception):
  """Something is computed outside of checkpoints."""


def recomputed_once(fn: Callable, *, layer_by_layer: bool = False) -> Callable:
  """The stages, (weights, x) -> (y, intermediates), for a caller that wraps them in `jax.checkpoint`.

  Args:
    fn: the stages. They are traced once in each call.
    layer_by_layer: whether the run asks for a checkpoint around each layer within the stages'. The innermost ones around
      whole layers then stay.
  """

  def stages(weights: Any, x: jax.Array) -> Any:
    closed, outputs = jax.make_jaxpr(fn, return_shape=True)(weights, x)
    run, last = jaxpr_as_fun(closed), len(closed.jaxpr.invars) - 1
    with contextlib.suppress(_PartOutsideError):
      dropped, holders = _of_layers(closed.jaxpr, {last}, {0}, layer_by_layer)
      if dropped:
        run = functools.partial(_run, closed.jaxpr, closed.consts, dropped, holders)
    return jax.tree.unflatten(jax.tree.structure(outputs), run(*jax.tree.leaves((weights, x))))

  return stages


def _of_layers(
    jaxpr: Jaxpr, sources: Set[int], targets: Set[int], layer_by_layer: bool
) -> tuple[frozenset[int], frozenset[int]]:
  """(checkpoints of whole layers that are to be dropped, loops and calls that hold some of them), by `id`.

  Args:
    jaxpr: the program. The results hold as long as its operations live.
    sources: the numbers of the inputs that are activations.
    targets: the numbers of the outputs that are activations.
    layer_by_layer: as in `recomputed_once`.

  Raises:
    _PartOutsideError: something between them is computed outside of checkpoints.
  """
  dropped, holders = frozenset[int](), frozenset[int]()
  for eqn, of, to in _between(jaxpr, sources, targets):
    name = eqn.primitive.name
    if has(eqn, Trait.PASSES):
      continue
    if not is_call(eqn) and name != "scan":
      raise _PartOutsideError
    inner, _ = inner_program(eqn)
    try:
      found, holding = _of_layers(inner, *(_with_carries(eqn, of, to) if name == "scan" else (of, to)), layer_by_layer)
    except _PartOutsideError:
      if not has(eqn, Trait.CHECKPOINT):
        raise
      # What it holds is no chain of checkpoints: it is a layer.
      dropped |= frozenset() if layer_by_layer else {id(eqn)}
      continue
    if has(eqn, Trait.CHECKPOINT):
      dropped |= {id(eqn)}  # around others
    elif found:
      holders |= {id(eqn)}
    dropped, holders = dropped | found, holders | holding
  return dropped, holders


def _between(jaxpr: Jaxpr, sources: Set[int], targets: Set[int]) -> list[tuple[JaxprEqn, Set[int], Set[int]]]:
  """The operations on the way from these inputs to these outputs, each with the numbers of its operands and results."""
  reached = {jaxpr.invars[i] for i in sources}
  reading = []
  for eqn in jaxpr.eqns:
    of = {i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and v in reached}
    reached |= {eqn.outvars[i] for i in _results_of(eqn, of)}
    reading.append((eqn, of))
  wanted = {*variables([jaxpr.outvars[i] for i in targets])}
  found: list[tuple[JaxprEqn, Set[int], Set[int]]] = []
  for eqn, of in reversed(reading):
    to = {i for i, v in enumerate(eqn.outvars) if v in wanted}
    if to:
      wanted |= {*variables(eqn.invars)}
    if to := {i for i in to if eqn.outvars[i] in reached}:
      found.append((eqn, of, to))
  return found


def _results_of(eqn: JaxprEqn, operands: Set[int]) -> Set[int]:
  """The results that an operation computes from any of these operands; of a loop all, as of most operations."""
  if not operands:
    return set()
  if not is_call(eqn):
    return set(range(len(eqn.outvars)))
  inner, _ = inner_program(eqn)
  return {i for i in range(len(eqn.outvars)) if inputs_of(inner, i) & operands}


def _with_carries(eqn: JaxprEqn, sources: Set[int], targets: Set[int]) -> tuple[Set[int], Set[int]]:
  """The same operands and results of a loop, and what its body carries from them, or to them, over iterations."""
  body, _ = inner_program(eqn)
  carries = number_of_one_rank(eqn.outvars, body.outvars)
  first = number_of_one_rank(eqn.invars, body.invars) - carries
  reads = [inputs_of(body, i) for i in range(len(body.outvars))]
  while True:
    more = sources | {first + i for i in range(carries) if reads[i] & sources}
    others = targets | {i for i in range(carries) if any(first + i in reads[t] for t in targets)}
    if (more, others) == (sources, targets):
      return sources, targets
    sources, targets = more, others


def number_of_one_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
  """How many of a loop's operands or results have one rank outside and inside: what is scanned over has one axis more."""
  return sum(v.aval.ndim == inside[k].aval.ndim for k, v in enumerate(outside))


def _run(jaxpr: Jaxpr, consts: Sequence, dropped: Set[int], holders: Set[int], *args: Any) -> list:
  """Runs a program without these checkpoints."""

  def rule(eqn: JaxprEqn, values: list) -> list | None:
    if id(eqn) in dropped:
      return _run(*inner_program(eqn), dropped, holders, *values)
    return run_eqn(jaxpr, _with_body(eqn, dropped, holders), values) if id(eqn) in holders else None

  return interpret(jaxpr, consts, args, rule)


def _with_body(eqn: JaxprEqn, dropped: Set[int], holders: Set[int]) -> JaxprEqn:
  """A loop or call that runs its program without these checkpoints."""
  inner, consts = inner_program(eqn)
  avals = [v.aval for v in inner.invars]
  body = jax.make_jaxpr(lambda *args: _run(inner, consts, dropped, holders, *args))(*avals)
  return eqn.replace(params={**eqn.params, "jaxpr": body})
