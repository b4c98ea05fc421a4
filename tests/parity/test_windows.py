# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Without a pipeline, our implementations train what MaxText's scan over the layers trains, parameter by parameter.

The reference is MaxText's own model on one device, with its own loss; the window's model is on 8. Of models whose layers
come in cycles, a block of one cycle is a repeat.
"""

import itertools

import jax
from jax.experimental import mesh_utils
import pytest

from maxtext_pp_ext.engine.programs import partial, segments
from maxtext_pp_ext.engine.transfers import transfer
from maxtext_pp_ext.engine.weights import layout
from maxtext_pp_ext.pipelines import execution
from tests.marks import slow_but
from tests.parity import windows
from tests.parity.blocks import PIPELINED, WINDOWED
from tests.trainer.cases import IMPLEMENTATIONS, OTHERS

# Of layers that are not scanned over, there is no window. Gemma 3 has none below 6 layers.
CASES = {
    case.name: case
    for case in [*PIPELINED, *WINDOWED]
    if case.keys.get("scan_layers", True) and case.name != "gemma3: fewer than 6 layers"
}
# llama2 is quick with what surrounds the layers, and with gathers in steps.
QUICK = [("deepseek", 2)]
MESHES = {
    "fsdp 8": {},
    "fsdp 2, tensor 2, data 2": {"ici_tensor_parallelism": 2, "ici_data_parallelism": 2},
    "fsdp 4, fsdp_transpose 2": {"ici_fsdp_transpose_parallelism": 2},
    "fsdp 4, context 2": {"ici_context_parallelism": 2},
    "fsdp 4, expert 2": {"ici_expert_parallelism": 2},
    "2 slices of fsdp 4": {"num_slices": 2, "dcn_data_parallelism": 2, "ici_fsdp_parallelism": 4},
    "fsdp 8 over 2 slices": {"num_slices": 2, "dcn_fsdp_parallelism": 2, "ici_fsdp_parallelism": 4},
    "fsdp 8, no axis of stages": {"custom_mesh_and_rule": "pure-fsdp"},
}


def check(case, implementations, repeats=None, **keys):
  """Compares a window over two repeats, or more; `keys` are arguments of `windows.compare`."""
  outside = sum(case.keys.get(key, 0) for key in ("first_num_dense_layers", "first_num_hash_layers"))
  # MaxText adds updates to biases as if both were stacked along the first axis.
  axis = {"param_scan_axis": 0} if "routed_bias_update_rate" in case.keys else {}
  # One microbatch at a time, iterations are looped over in pairs: two pairs and one more iteration.
  repeats = repeats or (6 if keys.get("num_pipeline_microbatches", 0) == -1 and case.cycle == 1 else 2)
  windows.compare(
      implementations,
      layers=outside + repeats * case.cycle,
      decoder_block=case.block,
      amplification=case.amplification,
      unused=case.unused,
      **{**case.keys, **axis, **keys},
  )


def of_cases(*numbers):
  """(name of a case, number of microbatches) for all of these numbers that the case takes."""
  takes = lambda name, microbatches: microbatches <= (CASES[name].most_microbatches or microbatches)
  return [each for each in itertools.product(CASES, numbers) if takes(*each)]


@pytest.mark.parametrize("name, microbatches", slow_but(QUICK, of_cases(-1, 2), spread=True))
def test_a_window_over_the_layers_equals_the_scan_over_them(name, microbatches):
  check(CASES[name], ["circular_bsw"], num_pipeline_microbatches=microbatches)


@pytest.mark.parametrize("silent", ["loss", "gradient"])
def test_a_loss_or_a_gradient_that_is_zero_is_no_comparison(silent, monkeypatch):
  own = windows.train.loss_fn

  def loss_fn(*args, **kwargs):
    loss, aux = own(*args, **kwargs)
    return (0 * loss if silent == "loss" else jax.lax.stop_gradient(loss)), aux

  monkeypatch.setattr(windows.train, "loss_fn", loss_fn)
  with pytest.raises(AssertionError):
    windows.compare([], decoder_block="simple")


OPTIONS = {
    "the output projection in parts": {"num_vocab_tiling": 2, "vocab_tiling_ag_once": True},
    "multi-token prediction": {"mtp_num_layers": 1},
    "a loss of the logits' size": {"z_loss_multiplier": 1e-3},
}


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [-1, 2])
@pytest.mark.parametrize("keys", OPTIONS.values(), ids=OPTIONS)
def test_what_surrounds_the_layers_gets_the_same_from_them(keys, microbatches):
  check(CASES["llama2"], ["circular_bsw"], num_pipeline_microbatches=microbatches, **keys)


OFFLOADING = {
    "minimal_offloaded": {"remat_policy": "minimal_offloaded"},
    "custom": {"remat_policy": "custom", "decoder_layer_input": "offload", "query_proj": "offload"},
}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("microbatches", [-1, 2])
@pytest.mark.parametrize("keys", OFFLOADING.values(), ids=OFFLOADING.keys())
def test_what_is_offloaded_to_the_host_comes_back_unchanged(keys, microbatches, implementation):
  # So many that loops are compiled, two iterations at a time, and one is left.
  keys = {"num_pipeline_microbatches": microbatches, "layers": 7, **keys}
  model = windows.build(windows.make_config(pipeline_impl=implementation, **keys))
  assert "MemorySpace.Host" in windows.program(model)
  windows.compare([implementation], **keys)


def gather_in_steps(monkeypatch, *steps, rings=()):
  """Weights are gathered in these steps. On CPU devices no torus is known, and no weight of a test is worth them."""
  monkeypatch.setattr(layout, "rings", lambda mesh: rings)
  monkeypatch.setattr(execution, "gathers_on_sparsecores", lambda config: True)
  monkeypatch.setattr(execution, "steps_of", lambda mesh: steps)
  monkeypatch.setattr(transfer, "_least_in_steps", lambda chunks: 0)


@pytest.mark.parametrize(
    "steps, rings",
    [
        ((2, 4), ("fsdp",)),
        pytest.param((2, 4), (), marks=pytest.mark.slow),
        pytest.param((8,), (), marks=pytest.mark.slow),
    ],
    ids=["along a ring last", "two", "one"],
)
@pytest.mark.parametrize(
    "name", slow_but(["llama2"], ["llama2", "mixtral", *(name for name in CASES if "olmo3" in name)])
)
def test_a_window_whose_weights_are_gathered_in_steps_equals_the_scan(name, steps, rings, monkeypatch):
  gather_in_steps(monkeypatch, ("fsdp", steps), rings=rings)
  postponed = []
  own = segments.with_last_gradients
  monkeypatch.setattr(partial, "with_last_gradients", lambda *args: postponed.append(own(*args)) or postponed[-1])
  check(CASES[name], ["circular_bsw"], num_pipeline_microbatches=-1)
  assert any(not each[-1].inputs and each[-1].done for each in postponed)


@pytest.mark.slow
@pytest.mark.parametrize("name, microbatches", of_cases(-1, 2))
def test_every_implementation_equals_the_scan_over_the_layers(name, microbatches):
  check(CASES[name], OTHERS, num_pipeline_microbatches=microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama2", "mixtral"])
def test_every_implementation_equals_the_scan_with_four_microbatches(name):
  check(CASES[name], IMPLEMENTATIONS, num_pipeline_microbatches=4)


def put_into_slices(monkeypatch, slices):
  """Lets each axis go over as many slices as `slices` says; CPU devices are in none."""
  sizes = lambda ici, dcn: [i * d for i, d in zip(ici, dcn, strict=True)]
  hybrid = lambda ici, dcn, devices, **_: mesh_utils.create_device_mesh(sizes(ici, dcn), devices)
  monkeypatch.setattr(mesh_utils, "create_hybrid_device_mesh", hybrid)
  over = lambda mesh, axis: slices.get(axis, 1) if mesh.shape[axis] > 1 else 1
  monkeypatch.setattr(layout, "slices_along", over)


@pytest.mark.parametrize("microbatches", slow_but([-1], [-1, 2]))
@pytest.mark.parametrize("name", slow_but(["simple_mlp"], ["simple_mlp", "llama2"]))
def test_a_window_with_replicas_in_several_slices_equals_the_scan(name, microbatches, monkeypatch):
  put_into_slices(monkeypatch, {"data": 2})
  mesh = MESHES["2 slices of fsdp 4"]
  # In backward two pairs of iterations are left between three that are apart and the last.
  check(CASES[name], ["circular_bsw"], repeats=8, num_pipeline_microbatches=microbatches, **mesh)


@pytest.mark.parametrize("shard_mode", slow_but(["explicit"], ["auto", "explicit"]))
@pytest.mark.parametrize("mesh", slow_but(["fsdp 4, context 2"], MESHES.keys()))
def test_a_window_on_a_mesh_equals_the_scan_on_one_device(mesh, shard_mode, monkeypatch):
  put_into_slices(monkeypatch, {"fsdp": MESHES[mesh].get("dcn_fsdp_parallelism", 1)})
  check(CASES["mixtral"], ["circular_bsw"], num_pipeline_microbatches=2, shard_mode=shard_mode, **MESHES[mesh])
