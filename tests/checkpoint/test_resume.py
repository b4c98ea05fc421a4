# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's trainer resumes from a converted checkpoint like the run that wrote it: weights, moments, step.

Each model is trained a few steps in one layout, converted by the command, and trained on in the others.
"""

import json
import re
import shlex
import shutil

from flax import nnx
import jax
import jax.numpy as jnp
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.utils import train_utils
import pytest

import maxtext_pp_ext
from maxtext_pp_ext import cli
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.trainer_runs import trainer
from tests.checkpoint import test_convert
from tests.trainer.runs import Results, Run, run_all

maxtext_pp_ext.install()

DEVICES, BEFORE, AFTER = 6, 3, 5
# float32 through a few layers and two updates; the loss moves by a hundred times as much from step to step.
BOUND = 2e-5
KEYS = (
    *("base_emb_dim=24", "base_num_query_heads=2", "base_num_kv_heads=2", "head_dim=8", "base_mlp_dim=48"),
    *("vocab_size=48", "max_target_length=8", "per_device_batch_size=2", "dataset_type=synthetic"),
    *("dtype=float32", "matmul_precision=highest", "attention=dot_product", "learning_rate=0.02"),
    *("learning_rate_schedule_steps=10", "enable_checkpointing=True", "async_checkpointing=False"),
    *("checkpoint_period=1000", "enable_goodput_recording=False", "enable_tensorboard=False", "log_config=False"),
    *("skip_jax_distributed_system=True", "override_model_config=True", "sparse_matmul=False"),
)


def pipeline(stages, per_stage=1, *more):
  return (
      f"ici_pipeline_parallelism={stages}",
      f"ici_fsdp_parallelism={DEVICES // stages}",
      f"num_layers_per_pipeline_stage={per_stage}",
      f"num_pipeline_microbatches={stages}",
      *(more or ("pipeline_impl=circular_bsw",)),
  )


SCANNED = ("pipeline_impl=circular", "scan_layers_per_stage=True")
OUTSIDE = ("pipeline_impl=circular_ag_once", "pipeline_parallel_layers=3")
DEEPSEEK = (
    *("model_name=deepseek3-tiny", "base_num_decoder_layers=7", "first_num_dense_layers=1", "base_moe_mlp_dim=24"),
    *("q_lora_rank=12", "kv_lora_rank=12", "qk_nope_head_dim=8", "qk_rope_head_dim=8", "v_head_dim=8", "num_experts=4"),
    *("num_experts_per_tok=2", "megablox=False", "routed_bias_update_rate=0.01"),
)
# name: (the model's keys, the layout that is trained first, layouts in which it goes on).
MODELS = {
    "from no pipeline": (
        ("base_num_decoder_layers=6",),
        (),
        {"scanned stages": pipeline(3, 2, *SCANNED), "outside": pipeline(3, 1, *OUTSIDE)},
    ),
    "from a pipeline": (
        ("base_num_decoder_layers=6",),
        pipeline(3),
        {"no pipeline": (), "single layers": ("scan_layers=False",), "other stages": pipeline(2, 3)},
    ),
    "biases of experts": (DEEPSEEK, (), {"repeats": pipeline(3), "scanned stages": pipeline(3, 2, *SCANNED)}),
    "blocks of layers": (
        ("model_name=gemma3-4b", "base_num_decoder_layers=12"),
        (),
        {"stages of a block": pipeline(2, 6), "single layers": ("scan_layers=False",)},
    ),
    "scales of fp8": (
        ("base_num_decoder_layers=6", "quantization=fp8", "use_qwix_quantization=False"),
        pipeline(3),
        {"no pipeline": (), "scanned stages": pipeline(3, 2, *SCANNED)},
    ),
}
CASES = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.fixture(scope="module", params=CASES)
def resumed(request, tmp_path_factory):
  """(results, names of the layouts). `same` resumed in its own layout; `wrong` found a checkpoint of another layout."""
  model, first, others = MODELS[request.param]
  folder = tmp_path_factory.mktemp("resumed")
  keys = (*KEYS, *model)
  run_all(folder, {"same": Run(keys=(*keys, *first, f"steps={BEFORE}"))}, devices=DEVICES).metrics("same")
  runs = {"same": Run(keys=(*keys, *first, f"steps={AFTER}"))}
  for name, layout in others.items():
    run = name.replace(" ", "-")
    places = [str(Results(folder).checkpoints(each)) for each in ("same", run)]
    assert cli.main(["convert", *places, str(run_config.base_yml()), *keys, *layout]) == 0
    runs[run] = Run(keys=(*keys, *layout, f"steps={AFTER}"))
  shutil.copytree(*(Results(folder).checkpoints(run) for run in ("same", "wrong")))
  runs["wrong"] = Run(keys=(*keys, *next(iter(others.values())), f"steps={AFTER}"))
  return run_all(folder, runs, devices=DEVICES), [run for run in runs if run not in ("same", "wrong")]


def losses(results, run):
  return [metrics["learning/loss"] for metrics in results.metrics(run, "learning/loss")]


def test_training_goes_on_as_it_would_have(resumed):
  results, runs = resumed
  everything = losses(results, "same")
  assert len(everything) == AFTER  # the first ones before it went on
  expected = everything[BEFORE:]
  assert abs(expected[1] - expected[0]) > 100 * BOUND * expected[0]  # so a step that was not made would be seen
  for run in runs:
    assert losses(results, run) == pytest.approx(expected, rel=BOUND), run


def test_a_checkpoint_of_another_layout_is_refused_with_the_command(resumed):
  results, _ = resumed
  error = results.error("wrong")
  assert "WrongLayoutError" in error and "has another layout than this run's model" in error
  assert "maxtext-pp convert " in error and "run_name=wrong-converted" in error


LAST = AFTER + 2
# name: (the optimizer's keys, the layout in which it goes on, before it comes back).
OPTIMIZERS = {
    "adamw with a moment in bfloat16": (("mu_dtype=bfloat16",), pipeline(2, 3)),
    "adamw that skips steps": (("skip_step_on_spikes=True",), pipeline(2, 3, *SCANNED)),
    "adam_pax": (("opt_type=adam_pax",), pipeline(2)),
    "sgd": (("opt_type=sgd", "learning_rate=0.5"), pipeline(2, 3)),
    # It is refused in pipelines.
    "muon": (("opt_type=muon",), ("scan_layers=False",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("keys, there", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimizer_goes_on_in_another_layout_and_back_as_in_a_run_that_nothing_interrupts(tmp_path, keys, there):
  keys = (*KEYS, "base_num_decoder_layers=6", *keys)
  begin = {
      "whole": Run(keys=(*keys, f"steps={LAST}")),
      "begin": Run(keys=(*keys, f"steps={BEFORE}")),
  }
  expected = losses(run_all(tmp_path, begin, devices=DEVICES), "whole")
  for source, run, layout, steps in (("begin", "there", there, AFTER), ("there", "back", (), LAST)):
    places = [str(Results(tmp_path).checkpoints(each)) for each in (source, run)]
    assert cli.main(["convert", *places, str(run_config.base_yml()), *keys, *layout]) == 0
    runs = {run: Run(keys=(*keys, *layout, f"steps={steps}"))}
    found = losses(run_all(tmp_path, runs, devices=DEVICES), run)
    first = BEFORE if run == "there" else AFTER
    assert found == pytest.approx(expected[first:steps], rel=BOUND), run
  # So a step that was not made, or was made with other moments, would be seen.
  after = expected[BEFORE - 1 :]  # the first step has a learning rate of 0
  assert min(abs(b - a) for a, b in zip(after, after[1:], strict=False)) > 100 * BOUND * expected[0]


@pytest.mark.slow
def test_the_command_in_the_trainers_message_makes_what_the_run_goes_on_with(tmp_path):
  """Started as a person starts it: the message takes the arguments from the command line."""
  keys = [*KEYS, "base_num_decoder_layers=4", f"base_output_directory={tmp_path}", "run_name=one"]

  def train(*more):
    metrics = tmp_path / f"{len(list(tmp_path.glob('*.jsonl')))}.jsonl"
    log, arguments = tmp_path / "log", [str(run_config.base_yml()), *keys, *more, f"metrics_file={metrics}"]
    try:
      trainer.run_python(["-m", "maxtext_pp_ext.train", *arguments], log, devices=2)
    except trainer.RunFailedError:
      return log.read_text()
    return [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]

  train(f"steps={BEFORE}", "param_scan_axis=1")
  said = train(f"steps={AFTER}", "param_scan_axis=0")
  assert "checkpoint: 4 layers stacked along param_scan_axis=1, no pipeline" in said
  assert "this run:   4 layers stacked along param_scan_axis=0, no pipeline" in said
  command = next(line for line in said.splitlines() if line.strip().startswith("maxtext-pp convert "))
  trainer.run_python(["-m", "maxtext_pp_ext.cli", *shlex.split(command)[1:]], tmp_path / "convert.log", devices=1)
  name = re.search(r"Then go on with (run_name=\S+)\.$", said, re.MULTILINE)[1]
  again = train(f"steps={AFTER}", "param_scan_axis=0", name)
  assert again == pytest.approx(train(f"steps={AFTER}", "param_scan_axis=1"), rel=BOUND) and len(again) == AFTER - BEFORE


WINDOW = ("pipeline_impl=circular_bsw", "num_pipeline_microbatches=2")


@pytest.mark.slow
def test_a_checkpoint_of_maxtexts_run_passes_through_a_window_without_a_changed_bit(tmp_path):
  """MaxText's trainer loads it with the window, saves what it has loaded, and loads that without the window again."""

  def moved(leaf):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return leaf
    return leaf + jax.random.normal(jax.random.key(leaf.size), leaf.shape, leaf.dtype)

  def saved(name, *keys, change=lambda leaf: leaf):
    own = (f"run_name={name}", f"base_output_directory={tmp_path}", "base_num_decoder_layers=3", *keys)
    config = pyconfig.initialize(["", str(run_config.base_yml()), *KEYS, *own])
    _, manager, *_, data, _, _, _, state = train_utils.setup_train_loop(config, None)
    state = jax.tree.map(change, nnx.split(state)[1])
    checkpointing.maybe_save_checkpoint(manager, state, config, data, step=0)
    return tmp_path / name / "checkpoints" / "0"

  host = saved("host", change=moved)
  window = saved("window", *WINDOW, f"load_full_state_path={host / 'items'}")
  back = saved("back", f"load_full_state_path={window / 'items'}")
  expected, *found = (test_convert.load(folder) for folder in (host, window, back))
  leaves = test_convert.by_path(expected)
  assert {path[0] for path in leaves} >= {"params", "opt_state", "step"}
  is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  bits = lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf
  for tree in found:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for path, leaf in test_convert.by_path(tree).items():
      assert test_convert.same_bits(bits(leaf), bits(leaves[path])), path


@pytest.mark.slow
def test_training_goes_on_in_a_window_and_back_as_it_would_have_without(tmp_path):
  after = lambda run, step: f"load_full_state_path={Results(tmp_path).checkpoints(run) / str(step - 1) / 'items'}"
  keys = (*KEYS, "base_num_decoder_layers=6")
  runs = {
      "begin": Run(keys=(*keys, f"steps={BEFORE}")),
      "same": Run(keys=(*keys, f"steps={AFTER + 2}", after("begin", BEFORE))),
      "window": Run(keys=(*keys, *WINDOW, f"steps={AFTER}", after("begin", BEFORE))),
      "back": Run(keys=(*keys, f"steps={AFTER + 2}", after("window", AFTER))),
  }
  results = run_all(tmp_path, runs, devices=DEVICES)
  expected = losses(results, "same")
  assert len(expected) == AFTER + 2 - BEFORE and abs(expected[1] - expected[0]) > 100 * BOUND * expected[0]
  assert losses(results, "window") + losses(results, "back") == pytest.approx(expected, rel=BOUND)


@pytest.mark.slow
def test_a_checkpoint_that_has_the_layout_already_is_not_written_anew(tmp_path, capsys):
  """Also tests wrong arguments, and the output for programs."""
  keys = (*KEYS, "base_num_decoder_layers=6")
  run_all(tmp_path, {"one": Run(keys=(*keys, "steps=1"))}, devices=DEVICES).metrics("one")
  places = [str(Results(tmp_path).checkpoints("one")), str(tmp_path / "new")]
  convert = lambda *more: cli.main(["convert", *places, str(run_config.base_yml()), *keys, *more])
  assert convert() == 2
  assert "already has the layout that these arguments ask for" in capsys.readouterr().err
  assert convert("base_mlp_dim=64") == 2
  assert "has the shape" in capsys.readouterr().err
  assert convert(*pipeline(4)) == 2  # 6 layers
  assert capsys.readouterr().out == "" and not (tmp_path / "new").exists()
  assert convert(*pipeline(3), "--dry-run", "--json") == 0
  assert json.loads(capsys.readouterr().out)["to"] == "pipeline of 3 stages × 2 repeats × 1 layer"
  assert not (tmp_path / "new").exists()
