# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in a pipeline: the load-balance loss is the layers' own, and expert weights stay where they are.

Routing is the same on both sides unless two experts' logits agree to within rounding, which random numbers do not.
"""

import collections
import math
import re

from flax import linen as nn
import jax
from maxtext.models.mixtral import MixtralDecoderLayer
import pytest

from maxtext_pp_ext.pipelines.circular import CircularBswPipeline
from maxtext_pp_ext.pipelines.stages import StageModule
from maxtext_pp_ext.sharding.resolve import mesh_axes
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity.common import LAYERS, make_config, make_pipeline

MOE = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 32,
    "load_balance_loss_weight": 0.1,
    "capacity_factor": -1.0,
    "megablox": False,
}
DENSE, SPARSE = {"sparse_matmul": False}, {"sparse_matmul": True}
MESHES = {
    "stage 2, expert 4": {"stages": 2, "ici_expert_parallelism": 4},
    "stage 4, expert 2": {"stages": 4, "ici_expert_parallelism": 2, "microbatch_size": 4},
    "stage 2, fsdp 2, expert 2": {"stages": 2, "ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2},
    "stage 4, context 2": {"stages": 4, "ici_context_parallelism": 2},
    "stage 4, tensor 2": {"stages": 4, "ici_tensor_parallelism": 2},
}


@pytest.fixture(autouse=True)
def mixtral(monkeypatch):
  monkeypatch.setitem(LAYERS, "mixtral", MixtralDecoderLayer)


def build(**keys):
  config = make_config(**({"repeats": 2, "microbatches": 4} | MOE | keys))
  mesh = parity.mesh_of(config)
  return config, mesh, make_pipeline(CircularBswPipeline, config, "mixtral", mesh)


def check(*, loss_per_shard=False, **keys):
  config = make_config(**({"repeats": 2, "microbatches": 4} | MOE | keys))
  mesh = parity.mesh_of(config) if loss_per_shard else None
  [result] = parity.assert_pipeline_parity(None, config, reference_mesh=mesh).values()
  assert "['moe_lb_loss'][0]" in result.sown


# Quick ones are a window's in test_windows.py, and that of experts with dispatch in test_experts.py.
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_dense_experts_train_as_the_layers_do_without_a_pipeline(mesh):
  check(**DENSE, **mesh)


WITHOUT_EXPERT_AXIS = {str(m): m for m in MESHES.values() if "ici_expert_parallelism" not in m}


@pytest.mark.parametrize("mesh", slow_but([], WITHOUT_EXPERT_AXIS))
def test_sparse_experts_train_as_the_layers_do_without_a_pipeline(mesh):
  """Sparse experts on an expert axis exchange tokens with ragged-all-to-all, which XLA does not have on CPUs."""
  check(loss_per_shard=True, **SPARSE, **mesh)


def engine_of(pipeline, config, mesh):
  """(the stage, its engine)."""
  batch = parity.Batch.random(config)
  run = pipeline.execution(deterministic=True, model_mode="train")
  stage = StageModule.of(pipeline.layers, run.schedule, run.stacking, run.call)
  split = lambda x: x.reshape(config.num_pipeline_microbatches, -1, *x.shape[1:])
  aux = stage.aux(split(batch.segment_ids), split(batch.positions))
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    return stage, run._engine(stage, aux, split(batch.inputs))


def layouts(pipeline, config, mesh):
  """(logical axes, WeightLayout) of each parameter."""
  stage, engine = engine_of(pipeline, config, mesh)
  return list(zip(stage.weight_axes, stage.weights, engine.layouts, strict=True))


ASYNC, ON_SPARSECORES = "async_ragged_all_to_all", "sparse_core_collective_offload_all_gather"


@pytest.mark.parametrize("flags, beside", [([ASYNC, ON_SPARSECORES], True), ([ASYNC], False), ([ON_SPARSECORES], False)])
def test_weights_travel_beside_experts_on_the_sparsecores_and_where_tokens_do_not_stop_compute(flags, beside):
  mesh = next(m for m in MESHES.values() if "ici_expert_parallelism" in m)
  config, devices, pipeline = build(
      **DENSE, **mesh, compile_xla_flags=" ".join(f"--xla_tpu_enable_{f}=true" for f in flags)
  )
  assert engine_of(pipeline, config, devices)[1].transfers_beside_experts is beside


@pytest.mark.parametrize("mesh", [m for m in MESHES.values() if "ici_expert_parallelism" in m], ids=str)
def test_expert_weights_stay_sharded_over_the_experts_and_nothing_else_does(mesh):
  config, devices, pipeline = build(**DENSE, **mesh)
  experts = 0
  for axes, _, layout in layouts(pipeline, config, devices):
    for name, stored, gathered in zip(axes[1:], layout.sharded, layout.gathered, strict=True):
      if name in ("exp", "exp_with_fsdp"):
        experts += 1
        assert "expert" in mesh_axes(stored) and gathered == stored
      else:
        assert not {"expert", "fsdp"} & set(mesh_axes(gathered))
  assert experts == 3  # two inputs and one output projection


def per_device(shape, spec, mesh):
  """The dimensions of a device's part of an array, without ones, sorted."""
  parts = [math.prod(mesh.shape[a] for a in mesh_axes(entry)) for entry in spec]
  return tuple(sorted(d // n for d, n in zip(shape, parts, strict=True) if d != n))


def gathers_by_depth(text):
  """Gathers in optimised HLO as (loop depth, the result's dimensions without ones, sorted, whether ours by name)."""
  computation, callers, found = "", {}, []
  for line in text.splitlines():
    if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
      computation = header[1]
    for kind, callee in re.findall(r"(body|condition|calls|to_apply)=%?([\w.\-]+)", line):
      callers[callee] = (computation, int(kind == "body"))
    if re.search(r" all-gather(-start)?\(", line):
      result = line.split(" all-gather")[0].split("=", 1)[1]
      for dims in re.findall(r"\w+\[([\d,]*)\]", result):
        dims = tuple(sorted(int(d) for d in dims.split(",") if d not in ("", "1")))
        found.append((computation, dims, "shard_map/all_gather" in line))
    elif re.search(r" collective-permute(-start)?\(", line) and re.search(r"/gather/[^\"]*ppermute", line):
      # Over two devices each sends its half.
      sent = re.search(r"\w+\[([\d,]*)\]", line.split(" collective-permute")[0].split("=", 1)[1])[1]
      found.append((computation, (2, *map(int, sent.split(","))), True))

  def depth(name):
    if name not in callers:
      return 0
    outer, loop = callers[name]
    return loop + depth(outer)

  return [(depth(name), dims, ours) for name, dims, ours in found]


def chunk_of(shape, layout, mesh, chunks):
  """The number of elements that a device has of one gathered piece of a weight [R, S, …]."""
  transfer = layout.transfer(mesh, shape, chunks)
  whole = math.prod(per_device(shape[1:], layout.gathered, mesh))
  return whole * transfer.cut.size // transfer.shard[transfer.cut.dim]


WITHOUT_TENSOR_AXIS = {str(m): m for m in MESHES.values() if "tensor" not in str(m)}


@pytest.mark.parametrize("mesh", slow_but([m for m in WITHOUT_TENSOR_AXIS if "fsdp" in m], WITHOUT_TENSOR_AXIS))
def test_a_weight_is_gathered_whole_before_the_loops_and_one_chunk_of_it_in_an_iteration(mesh):
  # With these sizes no activation has the dimensions of a weight.
  config, devices, pipeline = build(**DENSE, **mesh, repeats=3, microbatches=8, head_dim=12, base_emb_dim=24)
  batch = parity.Batch.random(config)
  pipelined, params = parity.function_of(pipeline)
  moving = [(w.shape, each) for _, w, each in layouts(pipeline, config, devices) if each.needs_gather]
  whole = collections.Counter(per_device(shape[1:], each.gathered, devices) for shape, each in moving)
  chunks = collections.Counter(chunk_of(shape, each, devices, chunks=8) for shape, each in moving)
  with jax.set_mesh(devices), nn.logical_axis_rules(config.logical_axis_rules):
    step = parity.with_gradients(pipelined, batch)
    text = step.lower(params, batch.inputs).compile().as_text()
  found = gathers_by_depth(text)
  assert moving and not [dims for depth, dims, _ in found if depth > 0 and dims in whole]
  assert collections.Counter(dims for depth, dims, _ in found if depth == 0 and dims in whole) <= whole
  # In one loop of the forward and two of the backward weights move, in none deeper.
  in_loops = [(depth, math.prod(dims)) for depth, dims, ours in found if depth > 0 and ours]
  assert collections.Counter(in_loops) == collections.Counter({(1, size): 3 * count for size, count in chunks.items()})
