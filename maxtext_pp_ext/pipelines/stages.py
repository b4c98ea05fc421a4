# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A stacked NNX stage module as arrays and a pure function."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from maxtext_pp_ext.host.models.sown import READ_ONLY_STATE, sow_counts, SOWN
from maxtext_pp_ext.pipelines.intermediates import per_layer, per_microbatch
from maxtext_pp_ext.pipelines.stacking import Stacking
from maxtext_pp_ext.schedule import Schedule
from maxtext_pp_ext.schedule.moves import numbers
from maxtext_pp_ext.sharding.resolve import LogicalAxes

PyTree = Any

# State whose "gradient" is its next value, such as the scales and histories of Flax's fp8 operations.
Overwritten = nnx.variable_type_from_name(OVERWRITE_WITH_GRADIENT, allow_register=True)
# The state that a training step differentiates.
Differentiated = nnx.Any(nnx.Param, Overwritten)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageModule:
  """The state of stacked stages `[repeat, stage, …]` as lists of arrays, and the function of one stage."""

  schedule: Schedule
  stacking: Stacking
  graphdef: Any  # structure of one stage's module
  weights: list[jax.Array]  # differentiated arrays, leaves [R, S, …] (with a repeat axis also if R = 1)
  weight_axes: list[LogicalAxes | None]  # logical axes of each weight, or None
  overwritten: list[bool]  # whether a training step overwrites each weight with its gradient instead of stepping along it
  weight_structure: Any  # tree structure of the weights' state
  rest: list[jax.Array]  # random keys as raw data, other random state, and state that no call changes, leaves [R, S, …]
  rest_structure: Any  # tree structure of their state
  is_key: list[bool]  # which of `rest` are random keys
  call: Callable  # the stage's call, (module, x, segment_ids, positions) -> output

  @classmethod
  def of(cls, layers: nnx.Module, schedule: Schedule, stacking: Stacking, call: Callable) -> StageModule:
    """Splits a stacked module from which all values that an earlier call has sown were popped.

    Raises:
      NotImplementedError: if a stage has state other than parameters, random streams, and state that no call changes.
    """
    graphdef, params, rest = nnx.split(layers, Differentiated, ...)  # type: ignore[misc]  # flax says one state or more
    is_variable = lambda x: isinstance(x, nnx.Variable)
    of_params = jax.tree.leaves(params, is_leaf=is_variable)
    of_rest = jax.tree_util.tree_leaves_with_path(rest, is_leaf=is_variable)
    for path, variable in of_rest:
      if not isinstance(variable, nnx.RngState) and type(variable).__name__ not in READ_ONLY_STATE:
        raise NotImplementedError(
            f"A pipelined stage has the state variable {jax.tree_util.keystr(path)} of type {type(variable).__name__};"
            " circular pipelines carry parameters and random streams only."
        )
    # A variable may hold several arrays.
    weights = [(variable, x) for variable in of_params for x in jax.tree.leaves(variable)]
    others = [(variable, x) for _, variable in of_rest for x in jax.tree.leaves(variable)]
    is_key = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for _, x in others]
    data = [(variable, jax.random.key_data(x) if k else x) for (variable, x), k in zip(others, is_key, strict=True)]
    return cls(
        schedule=schedule,
        stacking=stacking,
        graphdef=graphdef,
        weights=[stacking.leading(variable, x) for variable, x in weights],
        weight_axes=[stacking.names(variable) for variable, _ in weights],
        overwritten=[isinstance(variable, Overwritten) for variable, _ in weights],
        weight_structure=jax.tree.structure(params),
        rest=[stacking.leading(variable, x) for variable, x in data],
        rest_structure=jax.tree.structure(rest),
        is_key=is_key,
        call=call,
    )

  @property
  def counts_tokens(self) -> bool:
    """Whether routed experts sow counts of tokens instead of updates of their biases; see `sown`."""
    return self.schedule.microbatches > 1

  def aux(self, segment_ids: jax.Array | None, positions: jax.Array | None) -> PyTree:
    """The stages' inputs without gradients. Segment ids and positions are int [M, microbatch, sequence] or None."""
    return {"rest": self.rest, "segment_ids": segment_ids, "positions": positions}

  def aux_at(self, aux: PyTree, t: jax.Array | int) -> PyTree:
    """`aux` of iteration t, leaves [S, …]: each stage's random state, and its microbatch's ids.

    In a bubble those of the stage's first or last item.
    """
    stages = jnp.arange(self.schedule.stages, dtype=jnp.int32)
    first = self.schedule.iteration(0, 0, stages)
    last = self.schedule.iteration(self.schedule.repeats - 1, self.schedule.microbatches - 1, stages)
    t = jnp.clip(t, first, last)
    microbatch = self.schedule.microbatch(t, stages)
    if self.schedule.stages > 1:
      microbatch = jnp.asarray(numbers(self.schedule), jnp.int32)[microbatch]
    repeat = self.schedule.repeat(t, stages)
    of_microbatch = lambda x: None if x is None else jnp.take(x, microbatch, axis=0)
    return {
        "rest": [x[repeat, stages] for x in aux["rest"]],
        "segment_ids": of_microbatch(aux["segment_ids"]),
        "positions": of_microbatch(aux["positions"]),
        "microbatch": microbatch,
    }

  def over_stages(self, spmd_axis_name: str | None) -> Callable:
    """All stages of an iteration: (weights [S, …], aux [S, …], x [S, …]) -> (y, intermediates)."""
    return jax.vmap(self._one_stage, spmd_axis_name=spmd_axis_name)

  def _one_stage(
      self, weights: list[jax.Array], aux: PyTree, x: jax.Array, earlier: nnx.State | None = None
  ) -> tuple[jax.Array, PyTree]:
    rest = [
        _keys_of_microbatch(r, aux["microbatch"]) if is_key else r
        for r, is_key in zip(aux["rest"], self.is_key, strict=True)
    ]
    module = nnx.merge(
        self.graphdef, jax.tree.unflatten(self.weight_structure, weights), jax.tree.unflatten(self.rest_structure, rest)
    )
    known = {path for path, _ in nnx.to_flat_state(nnx.state(module))}
    counters = [path for path, _ in jax.tree_util.tree_leaves_with_path(nnx.state(module, nnx.RngCount))]
    if earlier is not None:
      nnx.update(module, earlier)
    if self.counts_tokens:
      sow_counts(module)
    x = checkpoint_name(x, "iteration_input")
    out = self.call(module, x, aux["segment_ids"], aux["positions"])
    # MaxText's layers return (activations, the values that a scan over layers would stack).
    y = out[0] if isinstance(out, tuple) else out
    if y.shape != x.shape or y.dtype != x.dtype:
      raise NotImplementedError(
          f"A pipelined stage must keep the shape and dtype of its input {x.dtype}{list(x.shape)}, but it returned"
          f" {y.dtype}{list(y.shape)}."
      )
    intermediates = nnx.pop(module, SOWN)
    for path, variable in nnx.to_flat_state(nnx.state(module)):
      if path not in known and not isinstance(variable, nnx.RngState):
        raise NotImplementedError(
            f"A pipelined stage makes the state variable {'/'.join(map(str, path))} of type {type(variable).__name__}"
            " when it is called; circular pipelines return values only if they are sown as nnx.Intermediate."
        )
    # Counters of modules that a layer creates in each call, as MoE layers do with AQT, are left out.
    counts = dict(jax.tree_util.tree_leaves_with_path(nnx.state(module, nnx.RngCount)))
    return y, (intermediates, [counts[path] for path in counters])

  def appends(self, earlier: nnx.State, aux: PyTree, x: jax.Array) -> dict[tuple, bool]:
    """By path, whether a call appends to the value of an earlier call, as `sow` does by default, or overwrites it.

    The pipeline runs stages without the earlier values. So this method traces a stage that holds values with one more
    axis, and reads off the shapes of the results what the call does with them.

    Args:
      earlier: the values of earlier calls that the stacked module holds.
      aux: the result of `aux`.
      x: inputs of a microbatch, [microbatch, sequence, embed].

    Raises:
      NotImplementedError: the layers combine the values in another way, by their own `reduce_fn`.
    """
    weights, aux = [w[0, 0] for w in self.weights], jax.tree.map(lambda leaf: leaf[0], self.aux_at(aux, 0))
    sown = lambda earlier: self._one_stage(weights, aux, x, earlier)[1][0]
    fresh = dict(nnx.to_flat_state(jax.eval_shape(sown, None)))
    there = [path for path, _ in nnx.to_flat_state(earlier) if path in fresh]
    larger = lambda leaf: jnp.zeros((*leaf.shape, 2), leaf.dtype)
    probe = {path: fresh[path].replace(jax.tree.map(larger, fresh[path].get_value())) for path in there}
    try:
      found = dict(nnx.to_flat_state(jax.eval_shape(sown, nnx.from_flat_state(list(probe.items())))))
    except (TypeError, ValueError) as error:
      raise NotImplementedError(_OTHER_REDUCTION.format(", ".join("/".join(map(str, path)) for path in there))) from error
    kinds = lambda value: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), value)
    appended = {}
    for path in there:
      new, before, after = (kinds(state[path].get_value()) for state in (fresh, probe, found))
      appended[path] = after != new
      if after != new and not (isinstance(fresh[path].get_value(), tuple) and after == (*before, *new)):
        raise NotImplementedError(_OTHER_REDUCTION.format("/".join(map(str, path))))
    return appended

  def per_layer(self, sown: PyTree) -> tuple[PyTree, list[jax.Array]]:
    """Intermediates of each layer, and its random counters after one call, from both of the engine, leaves [T, S, …]."""
    intermediates, counts = sown
    # Every microbatch starts from the same counters; its random numbers differ by its key.
    counts = [c[:, :, 0] for c in per_microbatch(counts, self.schedule)]
    values = per_layer(intermediates, self.schedule)
    return jax.tree.map(self.stacking.stored, values), [self.stacking.stored(c) for c in counts]

  def store_back(self, layers: nnx.Module, intermediates: PyTree, counts: list[jax.Array]) -> None:
    """Stores the results of `per_layer` in the stacked module."""
    if jax.tree.leaves(intermediates):
      nnx.update(layers, intermediates)
    if counts:
      structure = jax.tree.structure(nnx.state(layers, nnx.RngCount))
      nnx.update(layers, jax.tree.unflatten(structure, counts))


_OTHER_REDUCTION = (
    "A pipelined stage is called again while it holds {} of an earlier call. It neither appends the new values, as nnx's"
    " sow does by default, nor overwrites the earlier ones. Pop the values of a call before the next one:"
    " nnx.pop(model, nnx.Intermediate)."
)


def _keys_of_microbatch(data: jax.Array, microbatch: jax.Array) -> jax.Array:
  """The random keys [...] of a microbatch in a layer, derived from the layer's raw keys, uint32 [..., words].

  They are threefry keys, whatever the implementation of the layer's keys is. MaxText's trainers use `unsafe_rbg` (0.2.5).
  That implementation draws the numbers for all keys of a `vmap` from the first key, and under
  `xla_tpu_spmd_rng_bit_generator_unsafe` it draws other numbers in another layout. Stages are such a `vmap`: in a bubble
  of the first stage, all stages would draw from a key that has been used before. Backward draws the numbers again, and
  may have another layout than forward.
  """
  keys = jax.random.wrap_key_data(data[..., :2], impl="threefry2x32")
  fold_in = jnp.vectorize(jax.random.fold_in)
  for word in range(2, data.shape[-1]):
    keys = fold_in(keys, data[..., word])
  return fold_in(keys, microbatch)
