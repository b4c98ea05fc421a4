# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pipelines as MaxText's decoder builds them, and figures of their programs before compilation."""

from __future__ import annotations

import collections
from collections.abc import Iterator
import functools
import math
import types
from typing import Any, NamedTuple

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from maxtext.layers import nnx_decoders, pipeline

from maxtext_pp_ext.jax_private import ClosedJaxpr, dce_jaxpr, Jaxpr
from maxtext_pp_ext.testing import parity
from tests.parity.common import make_config, make_pipeline


class Built(NamedTuple):
  """A pipeline module, and the config and mesh that it was built from."""

  config: Any
  mesh: Any
  module: nnx.Module
  batch: parity.Batch


def decoder_policy(config: Any) -> Any:
  """The remat policy that MaxText's decoder passes to its pipeline."""
  decoder = nnx_decoders.NNXDecoder
  owner = types.SimpleNamespace(config=config, minimal_policy=functools.partial(decoder.minimal_policy, None))
  return decoder.get_remat_policy(owner)


def build(layer: str = "llama", **keys: Any) -> Built:
  """A pipeline of MaxText's layers from MaxText's own factory, which asks our registry."""
  config = make_config(**keys)
  mesh = parity.mesh_of(config)

  def factory(config, stage, mesh, remat_policy, *, rngs):
    del remat_policy
    return pipeline.create_nnx_pipeline(config, stage, mesh, decoder_policy(config), rngs=rngs)

  return Built(config, mesh, make_pipeline(factory, config, layer, mesh), parity.Batch.random(config))


def _forward(built: Built) -> tuple[Any, Any]:
  """((params, inputs) -> outputs, params)."""
  graphdef, params, rest = nnx.split(built.module, nnx.Param, ...)
  batch = built.batch

  def forward(params, x):
    module = nnx.merge(graphdef, params, rest, copy=True)
    return module(x, batch.segment_ids, batch.positions, True, "train")

  return forward, params


def gradient_program(built: Built) -> Any:
  """The jaxpr of outputs and gradients, without dead code."""
  forward, params = _forward(built)

  def run(params, x, cotangent):
    outputs, vjp_fn = jax.vjp(forward, params, x)
    return outputs, vjp_fn(cotangent)

  with jax.set_mesh(built.mesh), nn.logical_axis_rules(built.config.logical_axis_rules):
    closed = jax.make_jaxpr(run)(params, built.batch.inputs, built.batch.cotangent)
  jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
  return jaxpr


def residuals(built: Built) -> list[Any]:
  """Types of what forward keeps for backward at each iteration, leaves [T, S, …]; integers (ids, keys) left out."""
  forward, params = _forward(built)
  keep = lambda params, x: jax.tree.leaves(jax.vjp(forward, params, x)[1])
  with jax.set_mesh(built.mesh), nn.logical_axis_rules(built.config.logical_axis_rules):
    avals = jax.make_jaxpr(keep)(params, built.batch.inputs).out_avals
  config = built.config
  delay = 2 if config.pipeline_delay_activation_forwarding else 1
  stages = config.ici_pipeline_parallelism
  iterations = config.num_pipeline_microbatches * config.num_pipeline_repeats + delay * (stages - 1)
  is_float = lambda aval: jnp.issubdtype(aval.dtype, jnp.floating)
  return [aval for aval in avals if is_float(aval) and aval.shape[:1] == (iterations,)]


def dot_flops(jaxpr: Any) -> int:
  """FLOPs of all matrix products, on all devices; those in loops as often as they run, of branches the largest."""
  flops = 0
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name == "dot_general":
      (left, _), _ = eqn.params["dimension_numbers"]
      contracted = math.prod(eqn.invars[0].aval.shape[axis] for axis in left)
      flops += 2 * contracted * math.prod(eqn.outvars[0].aval.shape)
    elif name == "while":
      raise NotImplementedError("A loop without a static number of iterations.")
    inner = [dot_flops(each) for each in inner_jaxprs(eqn)]
    times = eqn.params["mesh"].size if name == "shard_map" else eqn.params.get("length", 1)
    flops += times * (max(inner) if name == "cond" else sum(inner))
  return flops


def primitives(jaxpr: Any) -> collections.Counter:
  """How often each operation occurs in the program's text, including loops and calls."""
  found = collections.Counter(eqn.primitive.name for eqn in jaxpr.eqns)
  for eqn in jaxpr.eqns:
    for inner in inner_jaxprs(eqn):
      found += primitives(inner)
  return found


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
  """The programs of a loop, call or branch."""
  for value in eqn.params.values():
    for one in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(one, ClosedJaxpr):
        yield one.jaxpr
      elif isinstance(one, Jaxpr):
        yield one
