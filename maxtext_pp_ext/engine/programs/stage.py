# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One pipeline stage as a pure program: traced once, then run forward, forward with residuals, and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_pp_ext.engine import exchanges
from maxtext_pp_ext.engine.per_stage import OnDevices
from maxtext_pp_ext.engine.programs import offloaded, one_of, operands
from maxtext_pp_ext.engine.programs.jaxprs import inputs_of, number, select_outputs
from maxtext_pp_ext.engine.programs.partial import GradientProgram
from maxtext_pp_ext.engine.programs.roots import BatchSplit
from maxtext_pp_ext.jax_private import ClosedJaxpr, Var

PyTree = Any
# (weights, aux, x) -> (y, intermediates); see StageProgram.
StageFn = Callable[[PyTree, PyTree, jax.Array], tuple[jax.Array, PyTree]]
# (number of a saved residual, its value [S, …]) -> the array that what follows reads in its place
Keep = Callable[[int, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageProgram:
  """All S stages of one iteration, traced once.

  A stage maps (weights, aux, x) to (y, intermediates). `weights` are differentiated, `aux` (segment ids, positions,
  random keys) are not, and x and y are activations [S, microbatch, sequence, embed]. The layer's Python code runs during
  `trace` only. Later it would run outside Flax's module scope and count random numbers twice.

  There are two kinds of residuals. `run` keeps those that depend on x, such as the stage input itself and the values
  that the remat policy saves; they have to be stored per iteration. `backward` recomputes the others (weights, their
  casts and transposes, masks, dropout keys) from its weights and aux, so no gathered weight is ever stored.
  """

  weights_and_aux: jax.tree_util.PyTreeDef  # structure of (weights, aux)
  outputs: jax.tree_util.PyTreeDef  # structure of (y, intermediates)
  output_avals: tuple[Any, ...]  # types of their leaves, each [S, …]
  primal: ClosedJaxpr  # (weights, aux, x) -> outputs
  saving: ClosedJaxpr  # (weights, aux, x) -> outputs + saved
  rebuilding: ClosedJaxpr  # (weights, aux, x) -> the residuals that do not depend on x
  saved_avals: tuple[Any, ...]  # types of the saved residuals, each [S, …], where backward finds them
  saved_orders: tuple[tuple[int, ...], ...]  # for each its dimensions from major to minor as backward reads them fastest
  saved_by_kernels: tuple[bool, ...]  # for each whether a kernel returns it
  saved_to_send: tuple[bool, ...]  # for each whether `run` leaves it on the device, and it has to be sent to the host
  saved_by_products: tuple[bool, ...]  # for each whether a product computes it, and what reads it can read a part
  gradients: GradientProgram  # (rebuilt, saved, cotangents) -> (gradients of the weights, cotangent of x)
  # for each weight, its dimensions from major to minor as forward's products read them fastest
  orders: tuple[tuple[int, ...], ...]
  of_kernels: tuple[bool, ...]  # for each weight whether kernels read it, and nothing else does

  @classmethod
  def trace(
      cls,
      fn: StageFn,
      weights: PyTree,
      aux: PyTree,
      x: jax.Array,
      checkpoint: Callable | None,
      splits: Sequence[Sequence[BatchSplit]],
      batch_axes: Sequence[str],
      on_sparsecores: bool = False,
      summed: bool = True,
      matrix_unit: int | None = None,
  ) -> StageProgram:
    """Traces `fn` on example arguments (only their types matter).

    Args:
      fn: the stages; its Python side effects happen here, once.
      weights: weights of the stages, leaves [S, …].
      aux: pytree of arrays that are not differentiated.
      x: activations [S, microbatch, sequence, embed].
      checkpoint: wraps a function of (weights, x) in `jax.checkpoint` with the remat policy; None stores every residual.
      splits: for each weight, the batch axes to split so that its gradient is left as a partial sum.
      batch_axes: the mesh axes that shard the batch and the sequence.
      on_sparsecores: as for `GradientProgram.plan`.
      summed: whether gradients are summed over several microbatches.
      matrix_unit: the number of columns of a matrix unit; None if it is not known.
    """
    traced = Traced.of(fn, weights, aux, x, checkpoint)
    take = functools.partial(select_outputs, traced.forward)
    primal, num_weights = take(range(len(traced.output_avals))), len(jax.tree.leaves(weights))
    inputs = [inputs_of(traced.forward.jaxpr, at) for at in traced.rebuilt]
    backward = traced.backward()
    reads = [[k for k, used in enumerate(inputs) if i in used] for i in range(num_weights)]
    saving = take([*range(len(traced.output_avals)), *traced.saved])
    orders = operands.residual_orders(backward.jaxpr, len(traced.rebuilt), len(traced.saved))
    on_host = [k for k, v in enumerate(traced.avals(traced.saved)) if v.memory_space != jax.memory.Space.Device]
    first = len(traced.output_avals)
    of_host = {(first + k, len(traced.rebuilt) + k): orders[k] for k in on_host}
    saving, backward, to_send = offloaded.in_orders(saving, backward, of_host) if of_host else (saving, backward, set())
    saved = _types(saving.jaxpr.outvars[first:])
    return cls(
        weights_and_aux=jax.tree.structure((weights, aux)),
        outputs=traced.outputs,
        output_avals=traced.output_avals,
        primal=primal,
        saving=saving,
        rebuilding=take(traced.rebuilt),
        saved_avals=tuple(
            aval.update(memory_space=jax.memory.Space.Host) if first + k in to_send else aval
            for k, aval in enumerate(saved)
        ),
        saved_to_send=tuple(first + k in to_send for k in range(len(saved))),
        saved_orders=orders,
        saved_by_kernels=operands.of_kernels(traced.forward.jaxpr, traced.saved),
        saved_by_products=operands.of_products(traced.forward.jaxpr, traced.saved),
        gradients=GradientProgram.plan(
            backward,
            splits,
            batch_axes,
            sum(map(_is_float, traced.output_avals)),
            on_sparsecores,
            reads if summed else None,
            num_residuals=len(traced.saved),
        ),
        orders=operands.orders(primal, num_weights, matrix_unit),
        of_kernels=one_of.read_by_kernels(primal, num_weights),
    )

  def _inputs(self, weights: PyTree, aux: PyTree, x: jax.Array) -> list[Any]:
    leaves, structure = jax.tree.flatten((weights, aux))
    if structure != self.weights_and_aux:
      raise TypeError(f"The stage was traced for {self.weights_and_aux} and is run on {structure}.")
    return [*leaves, x]

  @jax.named_scope("stage")
  def run(
      self,
      weights: PyTree,
      aux: PyTree,
      x: jax.Array,
      keep: Keep | None,
      beside: Sequence[OnDevices | None] = (),
  ) -> tuple[jax.Array, PyTree, list[list[jax.Array]]]:
    """Forward: (y like x, intermediates [S, …], the results of each of `beside`).

    Args:
      weights: leaves [S, …].
      aux: leaves [S, …].
      x: [S, microbatch, sequence, embed].
      keep: keeps a residual, [S, …], for backward; None if there is no backward. It is called as soon as a product has
        computed one (`saved_by_products`), and what follows reads the array that it returns. It is called for the others
        at the end.
      beside: what devices do while experts compute, for each of `exchanges`; () for nothing.

    Raises:
      TypeError: weights and aux have another structure than when the stage was traced.
    """
    n, inputs = self.outputs.num_leaves, self._inputs(weights, aux, x)
    if keep is None:
      out, found = _run(self.primal, inputs, beside)
      return *jax.tree.unflatten(self.outputs, out), found
    kept = set[int]()

    def keep_now(k: int, residual: jax.Array) -> jax.Array:
      kept.add(k)
      return keep(k, residual)

    of_products = {v: k for k, v in enumerate(self.saving.jaxpr.outvars[n:]) if self.saved_by_products[k]}
    now = {v: functools.partial(keep_now, k) for v, k in of_products.items()}
    out, found = _run(self.saving, inputs, beside, replaced=now)
    for k, residual in enumerate(out[n:]):
      if k not in kept:
        keep(k, residual)
    return *jax.tree.unflatten(self.outputs, out[:n]), found

  @jax.named_scope("stage")
  def inputs_of_backward(
      self, weights: list[Any], aux: PyTree, saved: Sequence[Any], dy: jax.Array, dintermediates: PyTree
  ) -> list[Any]:
    """The inputs of `gradients`; residuals that were not saved are computed again.

    `weights` and `aux` are those of `run`, and `saved` what it saved, or what stands for it. Cotangents of intermediates
    that are not floating point are ignored.
    """
    # These residuals do not depend on x: a placeholder completes the argument list and is never read.
    rebuilt = one_of.run(self.rebuilding, *self._inputs(weights, aux, jnp.zeros(dy.shape, dy.dtype)))
    given = jax.tree.leaves((dy, dintermediates))
    return [*rebuilt, *saved, *(given[k] for k, aval in enumerate(self.output_avals) if _is_float(aval))]

  def exchanges(self, *, save: bool) -> int:
    """The number of operations beside whose experts weights can be transferred in `run`, with `keep` or without."""
    return exchanges.count(self.saving if save else self.primal)

  @property
  def intermediates_avals(self) -> PyTree:
    """Shapes and dtypes of one iteration's intermediates, leaves [S, …]."""
    return jax.tree.unflatten(self.outputs, self.output_avals)[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
  """The stages as JAX differentiates them. Residuals are numbered as JAX returns them, outputs of `forward` before."""

  forward: ClosedJaxpr  # (weights, aux, x) -> outputs + residuals
  outputs: jax.tree_util.PyTreeDef  # structure of (y, intermediates)
  output_avals: tuple[Any, ...]  # types of their leaves
  vjp: jax.tree_util.PyTreeDef  # structure of JAX's backward function
  static: list[Any]  # its leaves that are no arrays; None for residuals
  saved_numbers: dict[int, int]  # residual that depends on x -> its number among them; equal ones are stored once
  rebuilt_numbers: dict[int, int]  # other residual -> its number among the others
  saved: list[int]  # the outputs of `forward` that are saved
  rebuilt: list[int]  # those that are computed again

  @classmethod
  def of(cls, fn: StageFn, weights: PyTree, aux: PyTree, x: jax.Array, checkpoint: Callable | None) -> Traced:
    structure: dict[str, Any] = {}

    def with_residuals(weights, aux, x):
      stage = lambda w, x: fn(w, aux, x)
      outputs, vjp_fn = jax.vjp(checkpoint(stage) if checkpoint else stage, weights, x)
      flat, structure["outputs"] = jax.tree.flatten(outputs)
      leaves, structure["vjp"] = jax.tree.flatten(vjp_fn)
      is_array = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]
      structure["static"] = [None if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
      return flat, list(itertools.compress(leaves, is_array))

    forward = jax.make_jaxpr(with_residuals)(weights, aux, x)
    jaxpr, first = forward.jaxpr, structure["outputs"].num_leaves
    residuals = range(len(jaxpr.outvars) - first)
    on_x = {i for i in residuals if len(jaxpr.invars) - 1 in inputs_of(jaxpr, first + i)}
    saved_numbers, saved = number(jaxpr.outvars[first:], on_x)
    rebuilt_numbers, rebuilt = number(jaxpr.outvars[first:], on_x.symmetric_difference(residuals))
    return cls(
        forward=forward,
        output_avals=_types(jaxpr.outvars[:first]),
        saved_numbers=saved_numbers,
        rebuilt_numbers=rebuilt_numbers,
        saved=[first + i for i in saved],
        rebuilt=[first + i for i in rebuilt],
        **structure,
    )

  def avals(self, outs: Sequence[int]) -> tuple[Any, ...]:
    """The types of these outputs of `forward`."""
    return _types([self.forward.jaxpr.outvars[i] for i in outs])

  def backward(self) -> ClosedJaxpr:
    """(rebuilt, saved, cotangents of float outputs) -> (cotangents of weights, of x)."""
    count = len(self.saved_numbers) + len(self.rebuilt_numbers)

    def pull_back(rebuilt, saved, cotangents):
      of = lambda k: saved[self.saved_numbers[k]] if k in self.saved_numbers else rebuilt[self.rebuilt_numbers[k]]
      arrays = iter([of(k) for k in range(count)])
      vjp_fn = jax.tree.unflatten(self.vjp, [next(arrays) if s is None else s for s in self.static])
      given = iter(cotangents)
      float0 = lambda aval: np.zeros(aval.shape, jax.dtypes.float0)  # JAX requires this cotangent for integers
      all_ = [next(given) if _is_float(aval) else float0(aval) for aval in self.output_avals]
      dweights, dx = vjp_fn(jax.tree.unflatten(self.outputs, all_))
      return [*jax.tree.leaves(dweights), dx]

    cotangents = [aval for aval in self.output_avals if _is_float(aval)]
    return jax.make_jaxpr(pull_back)([*self.avals(self.rebuilt)], [*self.avals(self.saved)], cotangents)


def _run(
    program: ClosedJaxpr,
    inputs: Sequence[Any],
    beside: Sequence[OnDevices | None],
    replaced: Mapping[Var, Callable] | None = None,
) -> tuple[list[jax.Array], list[list[jax.Array]]]:
  if not beside:
    return one_of.run(program, *inputs, replaced=replaced), []
  return exchanges.run(program, *inputs, beside=beside, replaced=replaced)


def _is_float(aval: Any) -> bool:
  return jnp.issubdtype(aval.dtype, jnp.inexact)


def _types(variables: Sequence[Any]) -> tuple[Any, ...]:
  """The types of arrays to trace with. They include the memory space: a remat policy may offload what it saves."""
  return tuple(v.aval.strip_weak_type() for v in variables)
