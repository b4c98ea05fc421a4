# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The batch-split schedule (`use_batch_split_schedule`) for DeepSeek's MoE layers in a pipeline.

A layer computes its examples in `batch_split_factor` parts: one part computes while another part's tokens travel to and
from their experts. MaxText 0.2.5 has two implementations; both work outside of pipelines only, where weights are gathered
otherwise (docs/batch-split.md). This module implements the schedule alone, over the sublayers of MaxText's own layer.
Parameters and values are those of the layer without the schedule.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.host.models.cycles import subclass
from maxtext_pp_ext.host.models.sown import COMBINE


@functools.cache
def batch_split(layer_class: type) -> type:
  """Returns a DeepSeek MoE layer with the schedule; one class per class, since models of one config must be equal."""

  def init(self, config, *args, **kwargs):
    # With this key the layer would lay its experts out for MaxText's own schedule, and call it.
    config = with_values(config, {"use_batch_split_schedule": False})
    layer_class.__init__(self, config, *args, **kwargs)  # type: ignore[misc]  # of the class, not of an instance

  def call(self, inputs, decoder_segment_ids, decoder_positions, deterministic, model_mode, *args, **kwargs):
    inputs = inputs[0] if isinstance(inputs, tuple) else inputs  # (activations, cache) of a layer before
    parts = functools.partial(split, parts=self.config.batch_split_factor)
    examples = list(zip(parts(inputs), parts(decoder_segment_ids), parts(decoder_positions), strict=True))

    def attention(x, segment_ids, positions):
      x = checkpoint_name(self.with_logical_constraint(x), "decoder_layer_input")
      return self.self_attention_with_norm_op(x, segment_ids, positions, deterministic, model_mode, *args, **kwargs)

    def experts(normed, residual):
      out, _, counts = self.mlp_op(normed, deterministic)
      return self.dropout_op(out + residual, deterministic=deterministic), counts

    # Attentions run one after another, so the experts of the previous part overlap with them.
    outputs, counts = zip(*(experts(*x) for x in one_by_one(attention, examples)), strict=True)
    # The values that the parts have sown become one, as the layer sows one without the schedule.
    for path, variable in nnx.iter_graph(self):
      if isinstance(variable, nnx.Intermediate) and (combine := COMBINE.get(str(path[-1]))) is not None:
        values, first = variable.get_value(), -len(examples)
        variable.set_value((*values[:first], combine(jnp.stack(values[first:]), axis=0)))
    count = None if counts[0] is None else sum(counts)
    return self.post_process(self.with_logical_constraint(merge(outputs)), None, count)

  return subclass(layer_class, __init__=init, __call__=call)


def split(x: jax.Array | None, parts: int) -> list[jax.Array | None]:
  """[batch, …] -> `parts` × [batch / parts, …]. Part i has examples i, i + parts, …: none changes its device."""
  if x is None:
    return [None] * parts
  x = x.reshape(-1, parts, *x.shape[1:])
  return [x[:, i] for i in range(parts)]


def merge(parts: Sequence[jax.Array]) -> jax.Array:
  """Inverts `split`."""
  x = jnp.stack(parts, axis=1)
  return x.reshape(-1, *x.shape[2:])


def one_by_one(fn: Callable, args: list[tuple]) -> list[Any]:
  """[fn(*a) for a in args], each call after the previous one has ended."""
  results: list[Any] = []
  for a in args:
    if results:
      results[-1], a = jax.lax.optimization_barrier((results[-1], a))
    results.append(fn(*a))
  return results
