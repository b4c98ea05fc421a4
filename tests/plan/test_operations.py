# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What programs send over axes other than those of data, against counts by hand."""

import collections

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.plan.layers import kept_by, layers_of
from maxtext_pp_ext.plan.operations import Kind, of_spec, Over, Reader, Why

MESH = AbstractMesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
ROWS, EMBED, HIDDEN = 8, 16, 32
WHOLE = ROWS // 2 * EMBED * 4  # bytes of all activations of a device's rows, in float32
X, UP, DOWN = P("fsdp", "tensor"), P(None, "tensor"), P("tensor", None)


def read(function, *of, within=("tensor",)):
  """(what is sent, FLOPs of products, axes of the results) of a function of arrays, each with a shape and a spec."""
  with jax.sharding.use_abstract_mesh(MESH):
    program = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in of))
  reader = Reader(MESH.shape, within)
  inputs = [reader.array(aval, of_spec(spec, aval.ndim)) for aval, (_, spec) in zip(program.in_avals, of, strict=True)]
  outs = reader.read(program.jaxpr, inputs)
  sent = collections.Counter()
  for each in reader.operations:
    sent.update(each.sends)
  flops = sum(each.amount for each in reader.operations if each.kind is Kind.PRODUCT)
  return {over: size for over, size in sent.items() if size}, flops, [each.axes for each in outs]


def ask(x, spec):
  return lax.with_sharding_constraint(x, NamedSharding(MESH, spec))


def mlp(x, gate, up, down):
  return jax.nn.silu(x @ gate) * (x @ up) @ down


OF_MLP = (((ROWS, EMBED), X), ((EMBED, HIDDEN), UP), ((EMBED, HIDDEN), UP), ((HIDDEN, EMBED), DOWN))
FLOPS = 3 * 2 * (ROWS // 2) * EMBED * HIDDEN // 4
GATHERED, REDUCED, MOVED = (Over(("tensor",), why) for why in (Why.WHOLE, Why.SUMMED, Why.MOVED))


def test_an_mlp_gathers_its_input_once_for_both_products_and_scatters_its_result_where_that_is_asked_for():
  sent, flops, axes = read(lambda *args: ask(mlp(*args).astype(jnp.bfloat16), X), *OF_MLP)
  assert sent == {GATHERED: WHOLE * 3 / 4, REDUCED: WHOLE * 3 / 4} and flops == FLOPS
  assert axes == [(("fsdp",), ("tensor",))]


def test_without_a_constraint_the_result_goes_to_all_devices():
  sent, flops, axes = read(mlp, *OF_MLP)
  assert sent == {GATHERED: WHOLE * 3 / 4, REDUCED: 2 * WHOLE * 3 / 4} and flops == FLOPS
  assert axes == [(("fsdp",), ())]


@pytest.mark.parametrize(
    "behind",
    [
        lambda y, r: y + r,
        lambda y, r: y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True)),
        lambda y, r: jnp.einsum("k,...k->...k", jnp.ones(EMBED), y),
        lambda y, r: jax.nn.silu(y),
    ],
    ids=["residual", "norm", "scale", "activation"],
)
def test_a_constraint_behind_what_computes_value_by_value_counts_for_the_product_before(behind):
  sent, _, axes = read(lambda r, *args: ask(behind(mlp(*args), r), X), ((ROWS, EMBED), X), *OF_MLP)
  of_norm = 2 * (ROWS // 2 * 4) * 3 / 4  # at most, the sums of squares
  assert WHOLE * 3 / 4 <= sent[REDUCED] <= WHOLE * 3 / 4 + of_norm and axes == [(("fsdp",), ("tensor",))]


def test_of_an_axis_that_both_operands_have_one_is_gathered():
  whole = 4 * ROWS * EMBED * 4  # bytes of all keys
  of = ((2, 4 * ROWS, EMBED), P(None, "tensor", None)), ((2, 4 * ROWS, EMBED), P(None, "tensor", None))
  sent, flops, axes = read(lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k), *of)
  assert sent == {GATHERED: 2 * whole * 3 / 4} and flops == 2 * 2 * ROWS * 4 * ROWS * EMBED
  assert axes == [((), ("tensor",), ())]
  # Tensor parallelism of sequences: what comes behind asks for the heads.
  to_heads = lambda x, w: ask(x @ w, P(None, "tensor"))
  sent, _, _ = read(to_heads, ((4 * ROWS, EMBED), P("tensor", None)), ((EMBED, HIDDEN), UP))
  assert sent == {GATHERED: whole * 3 / 4}


def test_a_contraction_of_which_one_operand_is_cut_is_a_part_of_it_on_each_device():
  _, flops, _ = read(lambda x, w: x @ w, ((ROWS, HIDDEN), P("fsdp", None)), ((HIDDEN, EMBED), DOWN))
  assert flops == 2 * (ROWS // 2) * HIDDEN // 4 * EMBED


def test_a_constraint_within_a_function_counts_for_what_calls_it():
  inner = jax.jit(lambda x: ask(x, X))
  sent, _, _ = read(lambda *args: inner(mlp(*args)), *OF_MLP)
  assert sent[REDUCED] == WHOLE * 3 / 4


def test_a_weight_that_is_whole_is_cut_and_its_products_are_summed():
  sent, flops, _ = read(lambda x, w: x @ w, ((ROWS, EMBED), X), ((EMBED, 2), P()))
  assert sent == {REDUCED: 2 * (ROWS // 2 * 2 * 4) * 3 / 4} and flops == 2 * (ROWS // 2) * (EMBED // 4) * 2


@pytest.mark.parametrize("spec, times", [(P("fsdp", None), 3), (P("fsdp", "tensor"), 0), (P("tensor", "fsdp"), 3 / 4)])
def test_a_constraint_gathers_or_exchanges(spec, times):
  sent, _, _ = read(lambda x: ask(x, spec), ((ROWS, EMBED), X))
  assert sent == ({MOVED: times * WHOLE / 4} if times else {})


def test_a_sum_and_rows_of_a_table_are_all_reduced():
  sent, _, _ = read(lambda x: x.sum(1), ((ROWS, EMBED), X))
  assert sent == {REDUCED: 2 * (ROWS // 2 * 4) * 3 / 4}
  of_rows = ((HIDDEN, EMBED), P("tensor", None)), ((ROWS,), P("fsdp"))
  sent, _, _ = read(lambda table, x: table[x.astype(int)], *of_rows)
  assert sent == {REDUCED: 2 * WHOLE * 3 / 4}


@pytest.mark.parametrize(
    "function, out, expected",
    [
        (lambda x: lax.psum(x, "tensor"), P("fsdp", None), 2 * WHOLE / 4 * 3 / 4),
        (lambda x: lax.all_gather(x, "tensor", axis=1, tiled=True), P("fsdp", None), WHOLE * 3 / 4),
        (lambda x: lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True), X, WHOLE / 4 * 3 / 4),
        (lambda x: x, X, 0.0),
    ],
    ids=["psum", "all_gather", "psum_scatter", "nothing"],
)
@pytest.mark.parametrize("times", [1, 3])
def test_collectives_of_a_shard_map_count_as_often_as_a_loop_runs(function, out, expected, times):
  def loop(x):
    body = jax.shard_map(function, mesh=MESH, in_specs=X, out_specs=out, check_vma=False)
    return lax.scan(lambda carry, _: (carry, body(x)), 0, length=times)[1] if times > 1 else body(x)

  sent, _, _ = read(loop, ((ROWS, EMBED), X))
  assert sent == ({MOVED: times * expected} if expected else {})


def test_what_a_shard_map_wants_whole_is_gathered():
  whole = lambda x: jax.shard_map(lambda x: x, mesh=MESH, in_specs=P("fsdp", None), out_specs=P("fsdp", None))(x)
  assert read(whole, ((ROWS, EMBED), X))[0] == {MOVED: WHOLE * 3 / 4}


def test_what_goes_over_axes_of_data_does_not_count():
  assert read(mlp, *OF_MLP, within=("fsdp",))[0] == {}


def layers(model="llama3-8b", **axes):
  keys = {"model_name": model, "per_device_batch_size": 1, "max_target_length": 2048, "attention": "flash"}
  argv = [f"{key}={value}" for key, value in (keys | axes).items()]
  config = run_config.read_without_run(argv, internal_compile=True, internal_compile_num_devices=8)
  found = layers_of(config)
  return config, found, found.sent(kept_by(config, None, found), apart=False)


# For each layer and token what is sent twice, three times, …, in parts of the residual stream.
POLICIES = {
    # Attention and the MLP gather their input, thrice, and scatter their output, of which the first is computed again.
    "full": 2 * 3 + 2 * 2 + 1,
    "minimal": 2 * 3 + 2 * 2,
    "save_qkv_proj": 2 * 3 + 2 * 2 + 1,
}


# Qwen3's layers constrain neither their inputs nor what they return, unless shard_mode is explicit.
@pytest.mark.parametrize("model, policy", [*(("llama3-8b", policy) for policy in POLICIES), ("qwen3-8b", "minimal")])
def test_tensor_parallelism_sends_what_megatron_with_sequence_parallelism_sends(model, policy):
  config, found, sent = layers(model, ici_tensor_parallelism=4, remat_policy=policy)
  stream = config.emb_dim * 2 * 3 / 4
  assert sent.keys() == {("tensor",)}
  # Sums of squares of norms go to all devices, too: 4 bytes for each token.
  assert sent["tensor",] == pytest.approx(config.num_decoder_layers * POLICIES[policy] * stream, rel=5e-3)
  assert found.rest["tensor",] == pytest.approx(2 * stream, rel=5e-3)  # the embedding and the logits


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-8b"])
def test_tensor_parallelism_divides_what_goes_from_layer_to_layer(model):
  keys = {"remat_policy": "custom", "decoder_layer_input": "device", "out_proj": "device"}
  config, found, _ = layers(model, ici_tensor_parallelism=4, **keys)
  stream = config.num_decoder_layers * config.emb_dim * 2 / 4
  assert kept_by(config, None, found).device == pytest.approx(2 * stream, rel=5e-3)


def test_a_scale_is_gathered_and_not_what_is_multiplied_by_it():
  of = ((4 * EMBED,), P("tensor")), ((ROWS, EMBED, 4 * EMBED), P("fsdp", "tensor", None))
  sent, _, axes = read(lambda scale, x: jnp.einsum("k,...k->...k", scale, x), *of)
  assert sent == {GATHERED: 4 * EMBED * 4 * 3 / 4} and axes == [(("fsdp",), ("tensor",), ())]


def test_where_gradients_are_computed_apart_both_operands_are_gathered_once_more():
  config, found, sent = layers(ici_tensor_parallelism=4)
  apart = found.sent(kept_by(config, None, found), apart=True)
  more = config.num_decoder_layers * 4 * config.emb_dim * 2 * 3 / 4
  assert apart["tensor",] - sent["tensor",] == pytest.approx(more, rel=5e-3)


def test_context_parallelism_gathers_keys_and_values():
  config, _, sent = layers(ici_context_parallelism=4)
  keys_and_values = 2 * config.num_kv_heads * config.head_dim * 2
  # Each of four devices has a quarter of the tokens, and gets the others' three.
  assert sent["context",] == pytest.approx(config.num_decoder_layers * 3 * 3 * keys_and_values, rel=5e-3)
  assert sent.keys() == {("context",)}


def test_axes_that_shard_the_batch_send_nothing_within_layers():
  _, found, sent = layers(ici_fsdp_parallelism=8)
  assert not sent and not found.rest
