# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares a pipeline with a plain Python loop over the same decoder layers with the same weights."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import linen as nn
from flax import nnx
import jax
from jax.sharding import Mesh
import jax.numpy as jnp

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """What decoder layers are called with. inputs and cotangent: [batch, sequence, embed]; ids: [batch, sequence]."""

  inputs: jax.Array
  cotangent: jax.Array
  segment_ids: jax.Array
  positions: jax.Array

  @classmethod
  def random(cls, config: Any, seed: int = 0) -> Batch:
    """Activations from a normal distribution, and packed sequences: segments and positions differ by example."""
    shape = (config.global_batch_size_to_train_on, config.max_target_length, config.emb_dim)
    keys = jax.random.split(jax.random.key(seed), 3)
    starts = jax.random.randint(keys[2], (shape[0], 1), 1, shape[1])
    at = jnp.arange(shape[1], dtype=jnp.int32)[None]
    return cls(
        inputs=jax.random.normal(keys[0], shape, config.dtype),
        cotangent=jax.random.normal(keys[1], shape, config.dtype),
        segment_ids=jnp.where(at < starts, 1, 2).astype(jnp.int32),
        positions=jnp.where(at < starts, at, at - starts).astype(jnp.int32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
  """Relative errors ‖pipeline − sequential‖ / ‖sequential‖, in float32, per array.

  Attributes:
    outputs: of the activations [batch, sequence, embed].
    gradients: of each parameter's gradient, by its path in the pipeline, and of the inputs' (`inputs`).
  """

  outputs: float
  gradients: dict[str, float]

  @property
  def worst(self) -> tuple[str, float]:
    """The array with the largest error."""
    return max([("outputs", self.outputs), *self.gradients.items()], key=lambda item: item[1])

  def check(self, bound: float) -> None:
    """Raises AssertionError naming every array whose error is above the bound, worst first (NaN counts as above)."""
    errors = sorted([("outputs", self.outputs), *self.gradients.items()], key=lambda item: -item[1])
    bad = [f"  {name}: {error:.3e}" for name, error in errors if not error <= bound]
    if bad:
      raise AssertionError("\n".join([f"Relative error above {bound:.1e} in {len(bad)} of {len(errors)} arrays:", *bad]))


def sequential(config: Any, layer_class: type, mesh: Mesh) -> Callable[[PyTree, Batch], jax.Array]:
  """The reference: `f(params, batch)` runs one layer after the other, with no pipeline code of anybody's.

  `params` is the parameter state of a pipeline's `layers`, leaves [repeat, stage, …] ([stage, …] with one repeat).
  """
  stages = config.ici_pipeline_parallelism * config.dcn_pipeline_parallelism
  layer = layer_class(config=config, mesh=mesh, quant=None, model_mode="train", rngs=nnx.Rngs(params=0, dropout=1))
  graphdef, layer_params, rest = nnx.split(layer, nnx.Param, ...)
  structure = jax.tree.structure(layer_params)

  def run(params, batch):
    x = batch.inputs
    for repeat in range(config.num_pipeline_repeats):
      for stage in range(stages):
        at = (repeat, stage) if config.num_pipeline_repeats > 1 else (stage,)
        of_stage = jax.tree.map(lambda w, at=at: w[at], nnx.to_pure_dict(params))
        for index in range(config.num_layers_per_pipeline_stage):
          weights = jax.tree.leaves(_layer_of_stage(config, of_stage, index))
          module = nnx.merge(graphdef, jax.tree.unflatten(structure, weights), rest, copy=True)
          out = module(x, batch.segment_ids, batch.positions, True, "train")
          x = out[0] if isinstance(out, tuple) else out
    return x

  return run


def _layer_of_stage(config: Any, stage: PyTree, index: int) -> PyTree:
  """One layer's parameters out of a stage's, which MaxText keeps in one of three forms."""
  if config.num_layers_per_pipeline_stage == 1:
    return stage
  if config.scan_layers_per_stage:
    axis = config.param_scan_axis
    return jax.tree.map(lambda w: jnp.take(w, index, axis=min(axis, w.ndim - 1)), stage["scanned_layers"])
  return stage[f"layers_{index}"]


def compare(pipeline: nnx.Module, reference: Callable, batch: Batch, mesh: Mesh, rules: Any) -> Parity:
  """Runs both forward and backward under one jit each, and compares outputs and every gradient.

  Args:
    pipeline: a pipeline module, called like a decoder layer.
    reference: (params, batch) -> activations, such as `sequential` returns.
    batch: inputs and the outputs' cotangent.
    mesh: device mesh.
    rules: logical axis rules.
  """
  graphdef, params, rest = nnx.split(pipeline, nnx.Param, ...)

  def pipelined(params, batch):
    module = nnx.merge(graphdef, params, rest, copy=True)
    return module(batch.inputs, batch.segment_ids, batch.positions, True, "train")

  def of_layers(params, batch):
    return reference(params["layers"], batch)

  def with_gradients(fn):
    def run(params, inputs):
      outputs, vjp_fn = jax.vjp(lambda p, x: fn(p, dataclasses.replace(batch, inputs=x)), params, inputs)
      return outputs, vjp_fn(batch.cotangent)

    return jax.jit(run)

  with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    outputs, gradients = with_gradients(pipelined)(params, batch.inputs)
    expected_outputs, expected_gradients = with_gradients(of_layers)(params, batch.inputs)
  errors = jax.tree.map(relative_error, nnx.to_pure_dict(gradients[0]), nnx.to_pure_dict(expected_gradients[0]))
  by_path = {jax.tree_util.keystr(path): error for path, error in jax.tree_util.tree_leaves_with_path(errors)}
  return Parity(
      outputs=relative_error(outputs, expected_outputs),
      gradients={**by_path, "inputs": relative_error(gradients[1], expected_gradients[1])},
  )


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
  """‖actual − expected‖ / ‖expected‖ in float32; 0 if both are zero."""
  actual, expected = jnp.asarray(actual, jnp.float32), jnp.asarray(expected, jnp.float32)
  norm = float(jnp.linalg.norm(expected))
  difference = float(jnp.linalg.norm(actual - expected))
  return difference / norm if norm else difference


jax.tree_util.register_dataclass(Batch, ["inputs", "cotangent", "segment_ids", "positions"], [])
