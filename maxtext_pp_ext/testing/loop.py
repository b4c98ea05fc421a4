# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference of `parity`: decoder layers called one after the other, without any pipeline code.

The loop runs over microbatches, then over layers. It must not run the whole batch at once: random numbers are drawn per
microbatch, and experts in buffers of a given size drop tokens per microbatch.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_pp_ext.config.derived import sound_stages
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.host.models import decoder_layers

PyTree = Any

# How values of microbatches combine into the value of the batch, by the name under which layers sow them. Other names
# have no value for the batch: a pipeline keeps one per microbatch.
OF_THE_BATCH: dict[str, Callable] = {
    "moe_lb_loss": jnp.mean,
    "indexer_loss": jnp.mean,
    "activation_mean": jnp.mean,
    "activation_fraction_zero": jnp.mean,
    "max_logits": jnp.max,
    "moe_required_rbf": jnp.max,
    "moe_max_load_ratio": jnp.max,
    "moe_has_overflow": jnp.any,
    "moe_dropless_fallback": jnp.any,
}
# Values that need the whole batch at once: a standard deviation is no mean of standard deviations, and the sign of an
# update depends on counts over all tokens.
OF_THE_WHOLE_BATCH = ("activation_stdev", "moe_bias_updates")


class Loop:
  """Calls layers one after the other, with the weights and random streams of a pipeline."""

  def __init__(
      self,
      pipeline: nnx.Module,
      layers: list[decoder_layers.Structure],
      config: HostKeys,
      sharding: jax.sharding.Sharding,
      *,
      deterministic: bool = True,
  ):
    """`layers` are the structures of the layers without a pipeline, in order; the loop's state is put onto `sharding`."""
    # State other than parameters has leaves [repeat, stage, …] ([stage, …] with one repeat).
    stages = pipeline.layers  # type: ignore[attr-defined]  # pipelines have it
    self._graphdef, *(_, rest) = nnx.split(stages, nnx.Param, ...)
    self._rest = jax.device_put(rest, sharding)
    self._layers = layers
    self._repeats, self._stages = config.num_pipeline_repeats, sound_stages(config)
    self._microbatches = config.num_pipeline_microbatches
    self._deterministic = deterministic  # whether dropout is off

  def __call__(self, params: PyTree, inputs: jax.Array, *ids: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs the batch.

    Args:
      params: parameters of the stacked stages, leaves [repeat, stage, …] ([stage, …] with one repeat).
      inputs: [batch, sequence, embed].
      *ids: segment ids and positions, [batch, sequence].

    Returns activations [batch, sequence, embed], and the sown values, by path in the stage: [repeat · stage, …]. Raises
    NotImplementedError with dropout, if layers sow values that need the whole batch at once.
    """
    outputs, sown = self._run(params, self._microbatches, inputs, *ids)
    of_batch = [path for path in sown if _is_named(path, OF_THE_WHOLE_BATCH)]
    if of_batch and not self._deterministic:
      raise NotImplementedError(
          f"deterministic=False with {', '.join(of_batch)}: for these values the loop would run the whole batch at once, "
          "which draws other random numbers than microbatches do. Compare with deterministic=True, or make the layers "
          "sow none of these values (record_internal_nn_metrics=0, routed_bias_update_rate=0)."
      )
    if of_batch:
      _, of_whole = self._run(params, 1, inputs, *ids)
      sown |= {path: of_whole[path] for path in of_batch}
    return outputs, {path: _of_the_batch(path, values) for path, values in sown.items()}

  def _run(self, params: PyTree, parts: int, *batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Activations, and sown values by path, [repeat · stage, part, (layer of a stack), …]."""

    def run_part(_, number_and_rows):
      part, (x, *ids) = number_and_rows
      return None, self._run_part(params, part, x, *ids)

    rows = [x.reshape(parts, -1, *x.shape[1:]) for x in batch]
    _, (outputs, sown) = jax.lax.scan(run_part, None, (jnp.arange(parts), rows))
    return outputs.reshape(batch[0].shape), {path: values.swapaxes(0, 1) for path, values in sown.items()}

  def _run_part(self, params: PyTree, part: jax.Array, x: jax.Array, *ids: jax.Array):
    """Runs a microbatch through all stages. Where their layers are alike, one loop runs them: it compiles faster."""
    count = len(self._layers) // (self._repeats * self._stages)
    of_stages = [self._layers[i : i + count] for i in range(0, len(self._layers), count)]
    indices = np.indices((self._repeats, self._stages)).reshape(2, -1)
    at = tuple(indices) if self._repeats > 1 else (indices[1],)
    if len({tuple(map(id, layers)) for layers in of_stages}) == 1:
      return jax.lax.scan(lambda x, at: self._run_stage(of_stages[0], params, at, part, x, *ids), x, at)
    sown = []
    for number, layers in enumerate(of_stages):
      x, values = self._run_stage(layers, params, tuple(int(index[number]) for index in at), part, x, *ids)
      sown.append(values)
    return x, {path: jnp.stack([values[path] for values in sown]) for path in sown[0]}

  def _run_stage(self, layers: list, params: PyTree, at: tuple, part: jax.Array, x: jax.Array, *ids: jax.Array):
    of_stage = jax.tree.map(lambda leaf: _of_part(leaf[at], part), (params, self._rest))
    module = nnx.merge(self._graphdef, *of_stage)
    sown: dict[str, list] = {}
    for structure, layer in zip(layers, decoder_layers.layers_of(module), strict=True):
      x, values = self._layer(structure, layer.module, x, *ids)
      for path, value in values.items():
        path = "".join(f"['{name}']" for name in layer.path) + path
        sown.setdefault(path, []).append(value if layer.index is None else value[None])
    # Layers in a stack share one path; other layers have a path each.
    return x, {path: jnp.concatenate(values) if len(values) > 1 else values[0] for path, values in sown.items()}

  def _layer(self, structure: decoder_layers.Structure, of_stage: nnx.Module, x: jax.Array, *ids: jax.Array):
    """Calls a layer built without a pipeline with the state of a stage's layer: (activations, sown values by path)."""
    state = nnx.state(of_stage)
    if (found := decoder_layers.paths(state)) != structure.paths:
      raise AssertionError(
          "The layers of a stage have other state than those without a pipeline. Only in a stage: "
          f"{sorted(found - structure.paths)}; only without a pipeline: {sorted(structure.paths - found)}."
      )
    layer = nnx.merge(structure.graphdef, state)
    what_is_left = sown_beside(layer)
    out = layer(x, *ids, self._deterministic, "train")
    sown = by_path(nnx.pop(layer, what_is_left))
    nnx.update(of_stage, nnx.state(layer, nnx.RngState))  # streams that layers share have moved on
    return out[0] if isinstance(out, tuple) else out, sown


def by_path(state: nnx.State) -> dict[str, jax.Array]:
  return {
      jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
  }


def sown_beside(module: nnx.Module) -> Callable:
  """A filter for the variables that a later call adds to a module, of any type except random streams.

  A variable may have several names, and `nnx.pop` calls the filter with each of them. So a variable that the module has
  now is recognised under any of its names.
  """
  before = {path: variable for path, variable in nnx.iter_graph(module) if isinstance(variable, nnx.Variable)}
  known = {id(variable) for variable in before.values()}
  is_random = lambda variable: isinstance(variable, nnx.RngState)
  return lambda path, variable: path not in before and id(variable) not in known and not is_random(variable)


def _of_part(leaf: jax.Array, part: jax.Array) -> jax.Array:
  """The random keys of a microbatch: a layer's keys, folded with the microbatch's number.

  Keys of other implementations than threefry (`unsafe_rbg` has four words) are first converted to threefry keys: the
  first two words, folded with the others.
  """
  if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return leaf

  def one(words):
    key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    return functools.reduce(jax.random.fold_in, [*words[2:], part], key)

  words = jax.random.key_data(leaf)
  return jax.vmap(one)(words.reshape(-1, words.shape[-1])).reshape(leaf.shape)


def _is_named(path: str, names: Any) -> bool:
  return any(f"['{name}']" in path for name in names)


def _of_the_batch(path: str, values: jax.Array) -> jax.Array:
  """[repeat · stage, microbatch, …] -> [repeat · stage, …]; unchanged for names that are not listed."""
  if _is_named(path, OF_THE_WHOLE_BATCH):
    return values[:, 0]
  combine = next((combine for name, combine in OF_THE_BATCH.items() if _is_named(path, [name])), None)
  return values if combine is None else combine(values, axis=1)
