# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A training that is interrupted and resumed, and the values that must then be equal."""

import dataclasses
import signal

from maxtext_pp_ext.checkpoint import files
from maxtext_pp_ext.trainer_runs import trainer
from tests.reliability.dying import Death
from tests.trainer import cases as trainer_cases

STEPS, PERIOD, LAYERS = 9, 3, 6  # checkpoints of steps 0, 3, 6, and the last
_KEYS = {
    "steps": STEPS,
    "eval_interval": -1,
    "base_num_decoder_layers": LAYERS,
    "enable_checkpointing": True,
    "checkpoint_period": PERIOD,
    "per_device_batch_size": 3,
}


def run(keys, model="dense"):
  """MaxText draws the initial weights itself, and its data iterator's state is in the checkpoint."""
  made = trainer_cases.run_of(model, trainer_cases.PRETRAIN, _KEYS | keys)
  return dataclasses.replace(made, weights=None)


def pipeline(stages, per_stage=1, implementation="circular_bsw", **axes):
  """A pipeline's keys; `axes` are the sizes of other mesh axes."""
  return {
      "pipeline_impl": implementation,
      "ici_pipeline_parallelism": stages,
      "num_layers_per_pipeline_stage": per_stage,
      "num_pipeline_microbatches": stages,
      **{f"ici_{axis}_parallelism": size for axis, size in axes.items()},
  }


def over_slices(slices, keys, axis="pipeline"):
  """These keys, with `axis` over this many slices."""
  within = keys[f"ici_{axis}_parallelism"] // slices
  return keys | {f"dcn_{axis}_parallelism": slices, f"ici_{axis}_parallelism": within}


def at_metrics(number, step, process=0):
  """A signal when this step's metrics are written. A later step is computed then, maybe a checkpoint written."""
  return Death(signal=number, event="open", path=f"/{process}.jsonl", count=step + 1, process=process)


# While the checkpoint of step 6 is written, in the order in which Orbax does this; arrays come before _METADATA.
WHILE_WRITING = {
    name: Death(signal=signal.SIGKILL, event=event, path=path)
    for name, (event, path) in {
        "folder": ("os.mkdir", "/6.orbax-checkpoint-tmp"),
        "arrays": ("os.mkdir", "/6.orbax-checkpoint-tmp/items.orbax-checkpoint-tmp/array_metadatas"),
        "metadata": ("open", "/6.orbax-checkpoint-tmp/items.orbax-checkpoint-tmp/_METADATA"),
        "commit of the arrays": ("os.rename", "/6.orbax-checkpoint-tmp/items.orbax-checkpoint-tmp"),
        "commit file": ("open", "/6.orbax-checkpoint-tmp/commit_success.txt"),
        "commit": ("os.rename", "/6.orbax-checkpoint-tmp"),
    }.items()
}


def by_step(results, name, process=0):
  """(step, metrics that begin with `learning/`) in the order in which a process wrote them."""
  if error := results.error(name):
    raise AssertionError(error)
  learnt = lambda metrics: {k: v for k, v in metrics.items() if k.startswith("learning/")}
  lines = trainer.read_metrics([results.metrics_files(name)[process]], "learning/loss")
  return [(int(metrics["step"]), learnt(metrics)) for metrics in lines]


def check_resumed(results, name, expected, last, processes=1, steps=STEPS):
  """The run `name` went on after step `last` and is the run `expected`, bit for bit, and twice where steps were lost.

  Args:
    results: of both runs.
    name: the run that was interrupted.
    expected: the run that was not.
    last: step of the last checkpoint that was whole, or -1.
    processes: of each run; each of them has to report this.
    steps: of each run.
  """
  whole = dict(by_step(results, expected))
  assert sorted(whole) == list(range(steps))
  for process in range(processes):
    found = by_step(results, name, process)
    reported = [step for step, _ in found]
    assert reported[-(steps - 1 - last) :] == list(range(last + 1, steps)), reported
    for step, learnt in found:
      assert len(learnt) > 5 and learnt == whole[step], (name, process, step)
  # The last checkpoint has what the last step did: parameters, moments, step, and where the data is read on.
  ours, theirs = (results.checkpoints(run) / str(steps - 1) for run in (name, expected))
  ours_open, theirs_open = (files.open_checkpoint(folder) for folder in (ours, theirs))
  assert ours_open.shapes == theirs_open.shapes and len(ours_open.shapes) > 20
  for path, array in ours_open.arrays.items():
    values = (each.store.read().result().tobytes() for each in (array, theirs_open.arrays[path]))
    assert len(set(values)) == 1, (name, path)
  iterators = [[file.read_bytes() for file in sorted((folder / "iter").glob("*.json"))] for folder in (ours, theirs)]
  assert iterators[0] == iterators[1] and len(iterators[0]) == processes
