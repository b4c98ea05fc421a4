# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's trainers that train with Tunix (SFT, DPO, ORPO, distillation) train the same with a pipeline as without.

They need `pip install 'google-tunix>=0.1.7'`. The batch of DPO and ORPO has two rows for each that the config knows: an
answer that was chosen, and one that was rejected. DPO also runs a copy of the model forward, whose weights stay as they
are. Distillation runs a teacher forward, a model with a config and weights of its own.
"""

import random

from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR
import pytest
import yaml

from maxtext_pp_ext.trainer_runs import trainer
from tests.trainer import cases
from tests.trainer.runs import Run, run_all

pytest.importorskip("tunix")

STEPS, DEVICES, REFERENCE = 6, 4, "host"
# Losses move by a hundredth or more in these steps. Float32 rounding explains 1e-6.
BOUND = 1e-5
MODELS = {
    "dense": {"model_name": "llama3.1-8b", "base_mlp_dim": 48},
    "moe": {
        **{key: value for key, value in cases.MORE_MODELS["dropless"].items() if key != "decoder_block"},
        "model_name": "mixtral-8x7b",
    },
}
OF_PREFERENCES = {
    "train_data_columns": "['prompt','chosen','rejected']",
    "eval_data_columns": "['prompt','chosen','rejected']",
    "dpo.max_prompt_length": cases.LONGEST // 2,
}
TRAINERS = {
    "sft": ("sft.yml", "sft.train_sft", cases.SFT, cases.MODES[cases.SFT]),
    "dpo": ("dpo.yml", "dpo.train_dpo", "preferences", OF_PREFERENCES),
    "orpo": ("dpo.yml", "dpo.train_dpo", "preferences", {**OF_PREFERENCES, "dpo.algo": "orpo"}),
}
# MaxText 0.2.5 cannot train models with experts by DPO or ORPO (flax: "The graph structure of a node added to
# cached_partial was mutated"). By SFT it does, but its evaluation ends in KeyError: 'eval/avg_moe_lb_loss'.
CASES = [("dense", "sft"), ("dense", "dpo"), ("dense", "orpo"), ("moe", "sft")]
PIPELINES = {
    "window": {"pipeline_impl": "circular_bsw", "ici_fsdp_parallelism": DEVICES},
    "window-2": {"pipeline_impl": "circular_bsw", "ici_fsdp_parallelism": DEVICES, "num_pipeline_microbatches": 2},
    "circular_bsw": {"pipeline_impl": "circular_bsw", "ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2},
    "circular": {"pipeline_impl": "circular", "ici_pipeline_parallelism": 4},
    "circular_ag_once": {"pipeline_impl": "circular_ag_once", "ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2},
}


def _write_data(folder):
  cases.write_data(folder)
  numbers = random.Random(0)
  text = lambda: cases._words(cases._document(numbers, 2, cases.LONGEST // 2))
  for part in ("", "_eval"):
    rows = ({"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(400))
    trainer.write_records(folder / "data" / f"preferences{part}.array_record", rows)


@pytest.mark.slow
@pytest.mark.parametrize("model, of", CASES)
def test_tunix_trains_the_same_with_a_pipeline_and_without(model, of, tmp_path):
  _write_data(tmp_path)
  file, module, data, keys = TRAINERS[of]
  data = {"grain_train_files": f"data/{data}.array_record", "grain_eval_files": f"data/{data}_eval.array_record"}
  shared = cases.SHARED | MODELS[model] | keys | data | {"override_model_config": True, "steps": STEPS}
  shared |= {
      "eval_interval": -1 if model == "moe" else STEPS // 2,
      "base_num_decoder_layers": 4,
      "gradient_clipping_threshold": 1.0,
  }
  yml = f"{MAXTEXT_CONFIGS_DIR}/post_train/{file}"
  run = lambda keys: Run(
      keys=[yml, *trainer.as_arguments(shared | keys)],
      trainer=f"maxtext.trainers.post_train.{module}",
      weights="weights",
  )
  without = {"ici_fsdp_parallelism": DEVICES}
  runs = {REFERENCE: run(without)} | {name: run(own) for name, own in PIPELINES.items()}
  weights = [yml, *trainer.as_arguments(shared | without)]
  results = run_all(tmp_path, runs, devices=DEVICES, weights={"weights": weights})
  _agree(results, runs, ("learning/loss", "eval/avg_loss")[: 1 if model == "moe" else 2])


def _agree(results, runs, metrics):
  """All runs report what the first one does."""
  for metric in metrics:
    expected, *found = ([each[metric] for each in results.metrics(name, metric)] for name in runs)
    assert len(expected) > 1 and len(set(expected)) == len(expected)
    for name, values in zip(list(runs)[1:], found, strict=True):
      assert values == pytest.approx(expected, rel=BOUND), name


TEACHER_STEPS = 20
# Pipelines of the student alone, whose teacher has none; and one of both.
OF_STUDENT = {name: {"ici_fsdp_parallelism": 1} | keys for name, keys in PIPELINES.items()}
OF_BOTH = {"circular_bsw-both": OF_STUDENT["circular_bsw"], "window-both": OF_STUDENT["window"]}


@pytest.mark.slow
def test_a_student_learns_the_same_with_a_pipeline_and_without(tmp_path):
  cases.write_data(tmp_path)
  own = {"steps": TEACHER_STEPS, "eval_interval": -1, "base_num_decoder_layers": 4, "num_epoch": 1}
  shared = dict(arg.split("=", 1) for arg in cases.run_of("dense", cases.PRETRAIN, own).keys)
  without = {"ici_fsdp_parallelism": DEVICES}
  saves = {"enable_checkpointing": True, "async_checkpointing": False, "checkpoint_period": TEACHER_STEPS}
  teachers = {"none": without} | OF_BOTH
  teach = lambda keys: Run(keys=trainer.as_arguments(shared | saves | keys), weights="teacher")
  weights = {"teacher": trainer.as_arguments(shared | without)}
  runs = {f"teacher-{name}": teach(keys) for name, keys in teachers.items()}
  taught = run_all(tmp_path, runs, devices=DEVICES, weights=weights)

  def student(name, keys, of_both, teacher):
    file = tmp_path / f"{name}.yml"
    read = taught.checkpoints(f"teacher-{teacher}") / str(TEACHER_STEPS - 1) / "items"
    overrides = {"student_overrides": {}, "teacher_overrides": {"load_parameters_path": str(read)}}
    content = {key: yaml.safe_load(str(value)) for key, value in (shared | without | of_both).items()}
    own = {"base_config": "base.yml", "log_period": 1, "save_checkpoint_on_completion": False}
    file.write_text(yaml.safe_dump(content | own | overrides), encoding="utf-8")
    return Run(keys=[str(file), *trainer.as_arguments(keys)], trainer="tests.trainer.distillation", weights="student")

  runs = {REFERENCE: student(REFERENCE, {}, {}, "none")}
  runs |= {name: student(name, keys, {}, "none") for name, keys in OF_STUDENT.items()}
  runs |= {name: student(name, {}, keys, name) for name, keys in OF_BOTH.items()}
  weights = {"student": [*trainer.as_arguments(shared | without), "init_weights_seed=1"]}
  results = run_all(tmp_path, runs, devices=DEVICES, weights=weights)
  _agree(results, runs, ["learning/loss"])
