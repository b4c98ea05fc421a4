# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized layers in a pipeline compute and learn the same as a loop over the layers.

Flax's fp8 operations scale by the values of earlier steps. Within a step the scale does not depend on the batch, so the
reference is the loop over the layers with the whole batch, and next scales and histories are compared like gradients.
Other quantizers calibrate on their operands. If the product sums over tokens, as in weight gradients, the result depends
on which tokens are multiplied together. Then the reference is the loop over microbatches and layers.

Bound. Float32 rounding of 1e-7 is all that should differ, but a value next to the boundary of two quantized values may
fall to either side. Of N > 500 values of an activation of size √N, one of size up to 3 then changes by up to its eighth
(e4m3 has three bits after the first one, int8 has more): 3/8/√500 < 2e-2. A wrong scale moves all of them. Without such
a value, as with most of these seeds, differences are below 1e-5.
"""

import math
import re

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from maxtext.layers import quantizations
from maxtext.models.mixtral import MixtralDecoderLayer
import pytest
import qwix
from qwix._src.core import numerics

from maxtext_pp_ext import registry
from maxtext_pp_ext.pipelines import execution
from maxtext_pp_ext.pipelines.circular import CircularBswPipeline
from maxtext_pp_ext.pipelines.stages import Differentiated, Overwritten
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity import windows
from tests.parity.common import LAYERS, make_config, make_pipeline
from tests.trainer.cases import IMPLEMENTATIONS, OTHERS

BOUND = 2e-2
FP8 = {"quantization": "fp8"}
NANOO = {"quantization": "nanoo_fp8"}
# Quantizers that calibrate on what they multiply. AQT divides the rows of a microbatch into that many parts.
AQT = {
    "aqt int8": {"quantization": "int8", "quantization_local_shard_count": 2},
    "aqt int8, no parts": {"quantization": "int8", "quantization_local_shard_count": 0},
}
QWIX = {
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "fp8_full": {"quantization": "fp8_full"},
    "fp8_full, fixed ranges": {
        "quantization": "fp8_full",
        "weight_quantization_calibration_method": "fixed,-1,1",
        "act_quantization_calibration_method": "fixed,-4,4",
    },
}
CALIBRATED = AQT | {f"qwix {name}": {**keys, "use_qwix_quantization": True} for name, keys in QWIX.items()}


@pytest.fixture(autouse=True)
def no_ties(monkeypatch):
  """Moves the largest value of every channel away from the boundary of two integers.

  Qwix scales this value to 127.5, up to the last bit. So rounding upstream would decide between -127 and -128.
  """
  bound = numerics.get_symmetric_bound
  monkeypatch.setattr(numerics, "get_symmetric_bound", lambda qtype: math.floor(bound(qtype)))


class Loop(nnx.Module):
  """Runs stacked layers one after the other, on one part of the batch after the other."""

  def __init__(self, layers, repeats, parts):
    self.layers, self.repeats, self.parts = layers, repeats, parts

  def __call__(self, x, segment_ids, positions, deterministic, model_mode):
    graphdef, state = nnx.split(self.layers)
    if self.repeats > 1:  # [repeat, stage, …] -> [layer, …]
      state = jax.tree.map(lambda a: a.reshape((-1,) + a.shape[2:]), state)

    def part(args):
      k, x, segment_ids, positions = args

      def layer(x, state):
        state = jax.tree.map(lambda a: _fold(a, k) if _is_key(a) else a, state)  # new noise for each part
        return nnx.merge(graphdef, state)(x, segment_ids, positions, deterministic, model_mode)[0], None

      return jax.lax.scan(layer, x, state)[0]

    split = lambda a: a.reshape((self.parts, -1) + a.shape[1:])
    return jax.lax.map(part, (jnp.arange(self.parts), split(x), split(segment_ids), split(positions))).reshape(x.shape)


def _is_key(a):
  return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def _fold(keys, k):
  return jax.vmap(lambda key: jax.random.fold_in(key, k))(keys.reshape(-1)).reshape(keys.shape)


class Model(nnx.Module):
  """The parts of a model that MaxText's rules for qwix name."""

  def __init__(self, pipeline):
    self.decoder = nnx.Module()
    self.decoder.pipeline_module = pipeline

  def __call__(self, *args):
    return self.decoder.pipeline_module(*args)


def quantized(module, config, batch):
  """The module in a model, quantized as MaxText quantizes models."""
  if not config.use_qwix_quantization:
    return Model(module)
  arguments = (batch.inputs, batch.segment_ids, batch.positions, True, "train")
  return qwix.quantize_model(Model(module), quantizations.get_qt_provider(config), *arguments, skip_nnx_init=True)


def build(implementation, *, parts, layer="llama", **keys):
  """(config, mesh, batch, the pipeline in a model, the loop in a model, with the same weights)."""
  config = make_config(**({"stages": 2, "repeats": 2, "microbatches": 4} | keys))
  mesh = parity.mesh_of(config)
  cls = implementation if isinstance(implementation, type) else registry.get(implementation).load()
  pipeline = make_pipeline(cls, config, layer, mesh)
  loop = Loop(nnx.clone(pipeline.layers), config.num_pipeline_repeats, parts)
  batch = parity.Batch.random(config)
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    return config, mesh, batch, quantized(pipeline, config, batch), quantized(loop, config, batch)


def with_gradients(model, batch):
  """(params, inputs) -> (outputs, (gradients of params, gradient of inputs))."""
  graphdef, _, rest = nnx.split(model, Differentiated, ...)

  def run(params, x):
    forward = lambda p, x: nnx.merge(graphdef, p, rest, copy=True)(x, batch.segment_ids, batch.positions, True, "train")
    outputs, vjp_fn = jax.vjp(forward, params, x)
    return outputs, vjp_fn(batch.cotangent)

  return jax.jit(run)


def difference(actual, expected):
  of_params = jax.tree.map(parity.relative_error, nnx.to_pure_dict(actual[1][0]), nnx.to_pure_dict(expected[1][0]))
  by_path = {jax.tree_util.keystr(path): error for path, error in jax.tree_util.tree_leaves_with_path(of_params)}
  wanted = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(expected[1][0]))
  return parity.Parity(
      outputs=parity.relative_error(actual[0], expected[0]),
      gradients={**by_path, "inputs": parity.relative_error(actual[1][1], expected[1][1])},
      without_gradient=tuple(jax.tree_util.keystr(path) for path, gradient in wanted if not gradient.any()),
  )


def check(implementation="circular_bsw", *, parts, steps=1, **keys):
  """Compares outputs and gradients in each of several steps of training; returns the learnt parameters."""
  config, mesh, batch, model, loop = build(implementation, parts=parts, **keys)
  params = nnx.state(loop, Differentiated)
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    run, run_loop = with_gradients(model, batch), with_gradients(loop, batch)
    assert all(_is_quantized(fn, params, batch.inputs) for fn in (run, run_loop))
    for _ in range(steps):
      expected = run_loop(params, batch.inputs)
      result = difference(run(params, batch.inputs), expected)
      result.check(BOUND)
      params = jax.tree.map(_next, params, expected[1][0], is_leaf=lambda v: isinstance(v, nnx.Variable))
  return params


def _is_quantized(fn, *args):
  return re.search(r"\b(i8|f8_e4m3(fn|fnuz))\[", str(fn.trace(*args).jaxpr)) is not None


def _next(variable, gradient):
  value = gradient[...] if isinstance(variable, Overwritten) else variable[...] - 0.01 * gradient[...]
  return variable.replace(value)


# Stages, repeats, microbatches / stages, delay.
SCHEDULES = [(1, 2, 2, 1), (2, 3, 2, 2), (3, 1, 2, 1), (4, 2, 1, 1)]


@pytest.mark.parametrize("stages, repeats, rounds, delay", slow_but([(2, 3, 2, 2)], SCHEDULES, spread=True))
def test_fp8_layers_learn_scales_and_histories_as_without_a_pipeline(stages, repeats, rounds, delay):
  delayed = {"pipeline_delay_activation_forwarding": delay == 2}
  learnt = check(parts=1, steps=3, stages=stages, repeats=repeats, microbatches=rounds * stages, **delayed, **FP8)
  histories = [variable[...] for path, variable in nnx.to_flat_state(learnt) if "amax_history" in path[-1]]
  assert histories and all(((history > 0).sum(-1) == 3).all() for history in histories)  # one value per step


@pytest.mark.slow
@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize("keys", [FP8, NANOO], ids=["fp8", "nanoo_fp8"])
def test_fp8_layers_learn_scales_and_histories_with_other_gather_policies(implementation, keys):
  check(implementation, parts=1, steps=2, stages=3, microbatches=3, **keys)


VARIATIONS = {
    "fsdp": {"ici_fsdp_parallelism": 4},
    "tensor": {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 2},
    "several layers per stage": {"layers_per_stage": 2},
    "layers per stage in a scan": {"layers_per_stage": 2, "scan_layers_per_stage": True},
    "no remat of iterations": {"set_remat_policy_on_pipeline_iterations": False},
    "gradients added in bfloat16": {"pipeline_grad_accum_dtype": "bfloat16"},
    "gathered in the compute dtype": {"pipeline_gather_dtype": "compute", "dtype": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("keys", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_fp8_layers_learn_scales_and_histories_with(keys):
  check(parts=1, steps=2, **FP8, **keys)


MOE = {
    "layer": "mixtral",
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 32,
    "capacity_factor": -1.0,
    "megablox": False,
    "sparse_matmul": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("parts, keys", [(1, FP8), (4, AQT["aqt int8"])], ids=["fp8", "aqt int8"])
def test_quantized_experts_compute_and_learn_as_without_a_pipeline(monkeypatch, parts, keys):
  monkeypatch.setitem(LAYERS, "mixtral", MixtralDecoderLayer)
  check(parts=parts, microbatch_size=4, **MOE, **keys)


class HugeInBubbles(CircularBswPipeline):
  bubble_fill = 1e6


class NaNInBubbles(CircularBswPipeline):
  bubble_fill = math.nan


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [HugeInBubbles, NaNInBubbles])
@pytest.mark.parametrize("repeats", [1, 2])
def test_what_is_in_bubbles_reaches_no_scale_and_no_history(implementation, repeats):
  check(implementation, parts=1, steps=2, stages=3, repeats=repeats, microbatches=3, **FP8)


@pytest.mark.slow
def test_the_comparison_notices_histories_that_were_added_up(monkeypatch):
  monkeypatch.setattr(execution, "MAX", execution.SUM)
  with pytest.raises(AssertionError, match="amax_history"):
    check(parts=1, **FP8)


@pytest.mark.slow
@pytest.mark.parametrize("keys", CALIBRATED.values(), ids=CALIBRATED.keys())
def test_quantizers_that_calibrate_see_one_microbatch_of_one_layer(keys):
  check(parts=3, stages=3, repeats=2, microbatches=3, microbatch_size=4, **keys)


@pytest.mark.slow
def test_quantizers_that_calibrate_see_one_microbatch():
  check(parts=4, **CALIBRATED["qwix int8"])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("keys", [CALIBRATED["aqt int8"], CALIBRATED["qwix int8"]], ids=["aqt", "qwix"])
def test_quantizers_that_calibrate_see_one_microbatch_of_weights_sharded_over_fsdp(implementation, keys):
  check(implementation, parts=2, stages=2, repeats=2, microbatches=2, ici_fsdp_parallelism=4, **keys)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [FP8, CALIBRATED["qwix fp8_full"]], ids=["fp8", "qwix fp8_full"])
def test_gathering_in_the_compute_dtype_changes_no_bit_of_what_quantized_layers_compute(keys):
  """Weight gradients differ by the rounding to the dtype in which they are reduced."""
  results = []
  for dtype in ("weight", "auto"):
    given = {"pipeline_gather_dtype": dtype, "dtype": "bfloat16", "ici_fsdp_parallelism": 4, "microbatches": 2}
    config, mesh, batch, model, _ = build("circular_bsw", parts=1, **keys, **given)
    with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
      results.append(with_gradients(model, batch)(nnx.state(model, Differentiated), batch.inputs))
  (outputs, (params, inputs)), (other_outputs, (other_params, other_inputs)) = results
  assert (outputs == other_outputs).all() and (inputs == other_inputs).all()
  is_variable = lambda v: isinstance(v, nnx.Variable)
  for a, b in zip(*(jax.tree.leaves(p, is_leaf=is_variable) for p in (params, other_params)), strict=True):
    error = parity.relative_error(a[...], b[...])
    assert error <= (0 if isinstance(a, Overwritten) else 2**-8)


# Quantizers that calibrate see one microbatch, so only one of them sees what they see in the scan.
IN_A_WINDOW = [
    *((name, "circular_bsw", -1) for name in ("fp8", "nanoo_fp8", *CALIBRATED)),
    *(("fp8", name, 2) for name in IMPLEMENTATIONS),
    ("nanoo_fp8", "circular_bsw", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, implementation, microbatches", IN_A_WINDOW)
def test_quantized_layers_compute_and_learn_in_a_window_as_in_the_scan(monkeypatch, name, implementation, microbatches):
  windows.with_own_keys(monkeypatch)
  keys = {"fp8": FP8, "nanoo_fp8": NANOO, **CALIBRATED}[name]
  windows.compare([implementation], num_pipeline_microbatches=microbatches, bound=5e-3, **keys)
