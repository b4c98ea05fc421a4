# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What layers keep and compute again, against what JAX's own partial evaluation keeps and computes again."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.engine.programs.jaxprs import closed, inner_program
from maxtext_pp_ext.engine.programs.primitives import has, Trait
from maxtext_pp_ext.engine.programs.stage import Traced
from maxtext_pp_ext.host.models import abstract_model, cycles, loss, run_config
from maxtext_pp_ext.jax_private import jaxpr_as_fun, Offloadable
from maxtext_pp_ext.plan import experts, layers
from maxtext_pp_ext.plan.blocks import Again
from maxtext_pp_ext.plan.operations import Array, Kind, Reader
from tests.marks import slow_but

KEYS = ("per_device_batch_size=2", "max_target_length=256", "attention=flash", "dataset_type=synthetic")
NAMED = ("full", "minimal", "minimal_with_context", "save_out_proj", "save_qkv_proj", "save_dot_except_mlpwi")
OFFLOADING = ("qkv_proj_offloaded", "minimal_offloaded")
CUSTOM = (
    {"query_proj": "device", "context": "device", "mlpwi_0": "offload"},
    {"decoder_layer_input": "offload", "mlpwi_1": "device", "mlpwo": "device", "moe_mlpwi_0": "device"},
    {"out_proj": "device", "attention_out": "offload", "kv_wa_proj": "device", "moe_x_sorted": "device"},
)
POLICIES = [{"remat_policy": name} for name in (*NAMED, *OFFLOADING)] + [
    {"remat_policy": "custom", **each} for each in CUSTOM
]
MODELS = ("llama3-8b", "mixtral-8x7b", "gemma2-9b", "deepseek3-671b", "qwen3-8b", "gpt3-175b")
QUICK = ("llama3-8b", "mixtral-8x7b")
# A model, and how many devices share its experts: fewer, in between, more.
EXPERTS = [
    ("mixtral-8x7b", 1, 4, 8),
    ("mixtral-8x7b", 1, 2, 8),
    ("deepseek3-671b", 2, 8, 256),
    ("deepseek3-671b", 1, 64, 256),
]


def config_of(model, devices=1, **more):
  argv = (f"model_name={model}", *KEYS, *(f"{key}={value}" for key, value in more.items()))
  return run_config.read_without_run(argv, internal_compile=True, internal_compile_num_devices=devices)


@functools.cache
def read(model):
  config = config_of(model)
  return config, layers.read(with_values(config, {}), abstract_model.abstract_mesh(config))


def blocks_of_loss(jaxpr, count=1):
  """(program of a layer, how many run, its policy) of each checkpoint in the traced loss; found without the reader."""
  for eqn in jaxpr.eqns:
    if has(eqn, Trait.CHECKPOINT):
      yield closed(*inner_program(eqn)), count, eqn.params["policy"]
    elif eqn.primitive.name in ("scan", "jit", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call"):
      inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
      yield from blocks_of_loss(getattr(inner, "jaxpr", inner), count * eqn.params.get("length", 1))


def products(program):
  """FLOPs of the matrix products in a program on one device, loops and shard_maps included."""
  reader = Reader(collections.defaultdict(lambda: 1))
  reader.read(program.jaxpr, [Array(v.aval.shape, 0, ((),) * v.aval.ndim, 0.0) for v in program.jaxpr.invars])
  return sum(each.amount for each in reader.operations if each.kind is Kind.PRODUCT)


@pytest.mark.parametrize("model", slow_but(QUICK, MODELS))
def test_what_is_kept_and_computed_again_is_what_jax_keeps_and_computes_again(model):
  config, found = read(model)
  mesh = abstract_model.abstract_mesh(config)
  traced = loss.traced(with_values(config, {"remat_policy": "full"}), mesh)
  programs = [(program, count) for program, count, _ in blocks_of_loss(traced.program.jaxpr)]
  assert sum(count for _, count in programs) == sum(count for _, count in found.blocks)
  for keys in POLICIES:
    places = loss.places(with_tensors(config, keys))
    expected = np.zeros(3)
    for program, count in programs:
      expected += count * np.array(by_jax(program, policy_of(places)))
    kept = found.under(places)
    sizes = np.array([kept.device, kept.host]) * found.tokens
    np.testing.assert_allclose(sizes, expected[:2], rtol=1e-9, err_msg=str(keys))
    forward = sum(count * products(program) for program, count in programs)
    assert kept.again[Kind.PRODUCT] * forward == pytest.approx(expected[2], rel=1e-9), keys


def test_layers_that_are_left_over_from_cycles_keep_all():
  # Without a pipeline: a cycle of six layers in a loop, and two after it.
  config = config_of("gemma3-4b", base_num_decoder_layers=8, override_model_config=True)
  found = layers.read(with_values(config, {}), abstract_model.abstract_mesh(config))
  cycle, left = (layers.Layers(blocks=(each,), tokens=found.tokens).under({}.get) for each in found.blocks)
  assert cycle.share(Kind.PRODUCT) > 0.9 and left.share(Kind.PRODUCT) == 0.0
  embed, heads, mlp = config.emb_dim, 2 * (config.num_query_heads + config.num_kv_heads) * config.head_dim, config.mlp_dim
  assert cycle.device == 2 * embed
  # At least queries, keys, values, what attention makes of them, both projections of the MLP and what it reads.
  assert left.device > 2 * 2 * (heads + 3 * mlp)
  assert found.last(1.0).under({}.get).share(Kind.PRODUCT) > 0.9  # in a pipeline


@pytest.mark.parametrize("model", slow_but(("llama3-8b", "gemma2-9b"), ("llama3-8b", "gemma2-9b", "qwen3-8b")))
def test_layers_are_those_that_have_queries_and_norms(model):
  config, found = read(model)
  queries = found.under({"query_proj": "device"}.get).device - found.under({}.get).device
  assert queries == pytest.approx(cycles.layers(config) * config.num_query_heads * config.head_dim * 2)  # of bfloat16
  # Norms that read the residual stream do not count. Gemma has others behind attention and the MLP, Qwen3 those of heads.
  heads = (config.num_query_heads + config.num_kv_heads) * config.head_dim
  normalised = {"llama3-8b": 0, "gemma2-9b": 2 * config.emb_dim, "qwen3-8b": heads}[model]
  assert found.normalised == cycles.layers(config) * normalised


@pytest.mark.parametrize(
    "model, of_kernel, of_product",
    [
        ("llama3-8b", ("attention_out", 4096), ("mlpwi_0", 14336)),
        ("mixtral-8x7b", ("mlpwo", 2 * 4096), ("out_proj", 4096)),
    ],
)
def test_kept_results_of_kernels_and_those_of_products_are_counted_apart(model, of_kernel, of_product):
  config, found = read(model)
  kinds = Again.KEPT_OF_KERNELS, Again.KEPT_OF_PRODUCTS
  kept = lambda kind, *names: found.kept_at_most(kind) * found.under(dict.fromkeys(names, "device").get).again[kind]
  for kind, (name, values), (other, _) in zip(kinds, (of_kernel, of_product), (of_product, of_kernel), strict=True):
    assert kept(kind) == kept(kind, "query_proj") == kept(kind, other) == 0.0  # queries are rotated behind their product
    assert kept(kind, name) == pytest.approx(config.num_decoder_layers * values)
    assert kept(kind, name, "query_proj") == kept(kind, name) < found.kept_at_most(kind) * 1.001


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma4-31b", "qwen3-next-80b-a3b"])
def test_layers_that_do_not_offload_keep_it_on_the_device(model):
  config, found = read(model)
  config = with_tensors(config, {"remat_policy": "custom", "mlpwi_0": "offload", "context": "device", "mlpwo": "offload"})
  traced = loss.traced(config, abstract_model.abstract_mesh(config))
  of_layers = [np.array(by_jax(program, policy)) * n for program, n, policy in blocks_of_loss(traced.program.jaxpr)]
  kept = found.under(loss.places(config))
  sizes = np.array([kept.device, kept.host]) * found.tokens
  np.testing.assert_allclose(sizes, sum(of_layers)[:2], rtol=1e-9)
  assert {bool(host) for _, host, _ in of_layers} == {False, True}


@pytest.mark.parametrize("model, fewer, own, more", slow_but([EXPERTS[0]], EXPERTS, spread=True))
def test_layers_on_a_number_of_devices_follow_from_those_on_fewer_and_on_more(model, fewer, own, more):
  configs = {each: config_of(model, devices=more, ici_expert_parallelism=each) for each in (fewer, own, more)}
  read_ = {each: layers.layers_of(config) for each, config in configs.items()}
  found = experts.between(configs[own], {each: read_[each] for each in (fewer, more)})
  # On one device nothing is sent, and so less is read and written around it. Exchanges are dispatches and combinations.
  inexact = {Again.BETWEEN, Kind.EXCHANGE}
  assert found.normalised == pytest.approx(read_[own].normalised, rel=1e-3)
  exact = lambda again: {kind: share for kind, share in again.items() if kind not in inexact}
  for keys in POLICIES:
    places = loss.places(with_tensors(configs[own], keys))
    kept, expected = found.under(places), read_[own].under(places)
    assert [kept.device, kept.host] == pytest.approx([expected.device, expected.host], rel=1e-3)
    assert exact(kept.again) == pytest.approx(exact(expected.again), rel=1e-3)
    off = 1e-3 if fewer > 1 else 0.12 if own == 2 else 0.04
    assert kept.again[Again.BETWEEN] == pytest.approx(expected.again[Again.BETWEEN], abs=off)


def with_tensors(config, keys):
  """A config with a policy, and the lists that MaxText derives from the keys of tensors."""
  of = lambda place: [name for name, value in keys.items() if value == place]
  inputs = [] if "decoder_layer_input" in keys else ["decoder_layer_input"]
  lists = {"tensors_on_device": of("device") + inputs, "tensors_to_offload": of("offload")}
  return with_values(config, {"remat_policy": keys["remat_policy"], **lists})


def policy_of(places):
  """A policy of `jax.checkpoint` that keeps names in these places."""

  def policy(primitive, *_, **params):
    place = places(params["name"]) if primitive.name == "name" else None
    return Offloadable(src="device", dst="pinned_host") if place == "offload" else place == "device"

  return policy


def by_jax(program, policy):
  """(bytes kept on the device, and on the host, FLOPs of products computed again) of a layer, by `jax.checkpoint`."""
  avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.invars]
  (at,) = (k for k, aval in enumerate(avals) if aval.shape[:2] == (2, 256) and aval.ndim == 3)
  weights = [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating) and k != at]
  others = [k for k in range(len(avals)) if k != at and k not in weights]

  def layer(weights_, others_, x):
    given = dict(zip([*weights, *others, at], [*weights_, *others_, x], strict=True))
    first, *rest = jaxpr_as_fun(program)(*(given[k] for k in range(len(avals))))
    return first, rest

  arguments = [avals[k] for k in weights], [avals[k] for k in others], avals[at]
  kept = Traced.of(layer, *arguments, lambda fn: jax.checkpoint(fn, policy=policy))
  everything = Traced.of(layer, *arguments, None)
  saved = kept.avals(kept.saved)
  size = lambda avals: sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
  host = size(aval for aval in saved if aval.memory_space != jax.memory.Space.Device)
  return size(saved) - host, host, products(kept.backward()) - products(everything.backward())
