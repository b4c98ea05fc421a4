# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One pipeline stage as a pure program: traced once, then run forward, forward with residuals, and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_pp_ext.engine.programs import one_of, operands
from maxtext_pp_ext.engine.programs.jaxprs import inputs_of, number, select_outputs
from maxtext_pp_ext.engine.programs.partial import GradientProgram
from maxtext_pp_ext.engine.programs.roots import BatchSplit
from maxtext_pp_ext.jax_private import ClosedJaxpr

PyTree = Any
# (weights, aux, x) -> (y, intermediates); see StageProgram.
StageFn = Callable[[PyTree, PyTree, jax.Array], tuple[jax.Array, PyTree]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageProgram:
  """All S stages of one iteration, traced once.

  A stage maps (weights, aux, x) to (y, intermediates). `weights` are differentiated, `aux` (segment ids, positions,
  random keys) are not, and x and y are activations [S, microbatch, sequence, embed]. The layer's Python code runs during
  `trace` only. Later it would run outside Flax's module scope and count random numbers twice.

  There are two kinds of residuals. `save` returns those that depend on x, such as the stage input itself and the values
  that the remat policy saves; they have to be stored per iteration. `backward` recomputes the others (weights, their
  casts and transposes, masks, dropout keys) from its weights and aux, so no gathered weight is ever stored.
  """

  weights_and_aux: jax.tree_util.PyTreeDef  # structure of (weights, aux)
  outputs: jax.tree_util.PyTreeDef  # structure of (y, intermediates)
  output_avals: tuple[Any, ...]  # types of their leaves, each [S, …]
  primal: ClosedJaxpr  # (weights, aux, x) -> outputs
  saving: ClosedJaxpr  # (weights, aux, x) -> outputs + saved
  rebuilding: ClosedJaxpr  # (weights, aux, x) -> the residuals that do not depend on x
  saved_avals: tuple[Any, ...]  # types of the saved residuals, each [S, …]
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
      gathered_in_steps: bool = False,
      summed: bool = True,
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
      gathered_in_steps: as for `GradientProgram.plan`.
      summed: whether gradients are summed over several microbatches.
    """
    structure: dict[str, Any] = {}

    def with_residuals(weights, aux, x):
      stage = lambda w, x: fn(w, aux, x)
      outputs, vjp_fn = jax.vjp(checkpoint(stage) if checkpoint else stage, weights, x)
      flat, structure["outputs"] = jax.tree.flatten(outputs)
      leaves, structure["vjp"] = jax.tree.flatten(vjp_fn)
      structure["static"] = [None if _is_array(leaf) else leaf for leaf in leaves]
      return flat, [leaf for leaf in leaves if _is_array(leaf)]

    closed = jax.make_jaxpr(with_residuals)(weights, aux, x)
    jaxpr = closed.jaxpr
    num_outputs = structure["outputs"].num_leaves
    of_x = len(jaxpr.invars) - 1
    residuals = range(len(jaxpr.outvars) - num_outputs)
    on_x = {i for i in residuals if of_x in inputs_of(jaxpr, num_outputs + i)}
    # The same value is often a residual of several operations: store it once.
    saved_index, saved_outs = number(jaxpr.outvars[num_outputs:], on_x)
    rebuilt_index, rebuilt_outs = number(jaxpr.outvars[num_outputs:], on_x.symmetric_difference(residuals))

    saved_positions = [num_outputs + i for i in saved_outs]
    rebuilt_positions = [num_outputs + i for i in rebuilt_outs]
    avals = lambda positions: [_struct(jaxpr.outvars[i].aval) for i in positions]
    outputs = [_struct(v.aval) for v in jaxpr.outvars[:num_outputs]]

    def pull_back(rebuilt, saved, cotangents):
      arrays = iter([saved[saved_index[k]] if k in saved_index else rebuilt[rebuilt_index[k]] for k in residuals])
      vjp_fn = jax.tree.unflatten(structure["vjp"], [next(arrays) if s is None else s for s in structure["static"]])
      given = iter(cotangents)
      dweights, dx = vjp_fn(
          jax.tree.unflatten(structure["outputs"], [next(given) if _is_float(o) else _float0(o) for o in outputs])
      )
      return [*jax.tree.leaves(dweights), dx]

    cotangents = [o for o in outputs if _is_float(o)]
    backward = jax.make_jaxpr(pull_back)(avals(rebuilt_positions), avals(saved_positions), cotangents)
    take = functools.partial(select_outputs, closed)
    primal = take(range(num_outputs))
    num_weights = len(jax.tree.leaves(weights))
    inputs = [inputs_of(jaxpr, at) for at in rebuilt_positions]
    reads = [[k for k, used in enumerate(inputs) if i in used] for i in range(num_weights)]
    return cls(
        weights_and_aux=jax.tree.structure((weights, aux)),
        outputs=structure["outputs"],
        output_avals=tuple(outputs),
        primal=primal,
        saving=take([*range(num_outputs), *saved_positions]),
        rebuilding=take(rebuilt_positions),
        saved_avals=tuple(avals(saved_positions)),
        gradients=GradientProgram.plan(
            backward,
            splits,
            batch_axes,
            len(cotangents),
            gathered_in_steps,
            reads if summed else None,
            num_residuals=len(saved_positions),
        ),
        orders=operands.orders(primal, num_weights),
        of_kernels=one_of.read_by_kernels(primal, num_weights),
    )

  def _run(self, closed: ClosedJaxpr, weights: PyTree, aux: PyTree, x: jax.Array) -> list[jax.Array]:
    leaves, structure = jax.tree.flatten((weights, aux))
    if structure != self.weights_and_aux:
      raise TypeError(f"The stage was traced for {self.weights_and_aux} and is run on {structure}.")
    return one_of.run(closed, *leaves, x)

  @jax.named_scope("stage")
  def run(self, weights: PyTree, aux: PyTree, x: jax.Array) -> tuple[jax.Array, PyTree]:
    """Forward without residuals: (y like x, intermediates [S, …]).

    Args:
      weights: leaves [S, …].
      aux: leaves [S, …].
      x: [S, microbatch, sequence, embed].

    Raises:
      TypeError: weights and aux have another structure than when the stage was traced.
    """
    return jax.tree.unflatten(self.outputs, self._run(self.primal, weights, aux, x))

  @jax.named_scope("stage")
  def save(self, weights: PyTree, aux: PyTree, x: jax.Array) -> tuple[jax.Array, PyTree, list[jax.Array]]:
    """Forward with residuals: (y, intermediates, saved [S, …]). Takes the same arguments and raises as `run` does."""
    out = self._run(self.saving, weights, aux, x)
    n = self.outputs.num_leaves
    y, intermediates = jax.tree.unflatten(self.outputs, out[:n])
    return y, intermediates, out[n:]

  @jax.named_scope("stage")
  def inputs_of_backward(
      self, weights: list[Any], aux: PyTree, saved: Sequence[Any], dy: jax.Array, dintermediates: PyTree
  ) -> list[Any]:
    """The inputs of `gradients`; residuals that were not saved are computed again.

    Cotangents of intermediates that are not floating point are ignored.

    Args:
      weights: leaves [S, …].
      aux: leaves [S, …].
      saved: what `save` returned, or what stands for it.
      dy: cotangent of y.
      dintermediates: cotangents of the intermediates.
    """
    # These residuals do not depend on x: a placeholder completes the argument list and is never read.
    rebuilt = self._run(self.rebuilding, weights, aux, jnp.zeros(dy.shape, dy.dtype))
    given = jax.tree.leaves((dy, dintermediates))
    return [*rebuilt, *saved, *(given[k] for k, aval in enumerate(self.output_avals) if _is_float(aval))]

  @property
  def intermediates_avals(self) -> PyTree:
    """Shapes and dtypes of one iteration's intermediates, leaves [S, …]."""
    return jax.tree.unflatten(self.outputs, self.output_avals)[1]


def _is_float(aval: Any) -> bool:
  return jnp.issubdtype(aval.dtype, jnp.inexact)


def _float0(aval: Any) -> np.ndarray:
  """The cotangent that JAX requires for integers."""
  return np.zeros(aval.shape, jax.dtypes.float0)


def _struct(aval: Any) -> Any:
  """The type of an array to trace with. It includes the memory space: a remat policy may offload what it saves."""
  return aval.strip_weak_type()


def _is_array(leaf: Any) -> bool:
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic))
