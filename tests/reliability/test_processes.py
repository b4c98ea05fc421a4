# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training in 2 and 4 processes equals training in one: `stage` and `fsdp` are within processes, across them, or both.

Processes are also in virtual slices, over which are stages, FSDP shards or replicas.

Each process reads its share of the rows, so that a batch has the same rows in another order. The reference, in one
process without a pipeline, and how far apart runs may be, are those of `tests.trainer.cases`.
"""

from collections.abc import Mapping
import dataclasses
import itertools

from flax import nnx
import jax
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils
import numpy as np
from orbax import checkpoint as ocp
import pytest
import yaml

import maxtext_pp_ext
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.trainer_runs import trainer
from tests.reliability import sharded
from tests.reliability.common import over_slices, pipeline
from tests.trainer import cases as trainer_cases
from tests.trainer.runs import run_all

maxtext_pp_ext.install()
ROWS, STEPS = 12, 6


def fsdp_outermost():
  """MaxText's mesh axes with `fsdp` in front, so that its neighbours are in different processes and stages are not."""
  with open(run_config.base_yml(), encoding="utf-8") as base:
    axes = yaml.safe_load(base)["mesh_axes"]
  return ["fsdp", *(axis for axis in axes if axis != "fsdp")]


@dataclasses.dataclass(frozen=True)
class Case:
  """A pipelined run: `across` are the mesh axes that are not within one process."""

  model: str
  processes: int
  across: tuple[str, ...]
  devices: int
  keys: Mapping[str, object]
  slices: int = 1

  @property
  def name(self) -> str:
    of = lambda network, where: [f"{k[4:-12]} {v}{where}" for k, v in self.keys.items() if k.startswith(f"{network}_")]
    sizes = [f"{self.keys['pipeline_impl']}", *of("ici", ""), *of("dcn", f" over {self.slices} slices")]
    delayed = ["delayed"] * ("pipeline_delay_activation_forwarding" in self.keys)
    return f"{self.model}, {', '.join(sizes + delayed)}, in {self.processes} processes by {' and '.join(self.across)}"

  @property
  def run_name(self) -> str:
    return "".join(c if c.isalnum() else "_" for c in self.name)


OUTERMOST = {"mesh_axes": fsdp_outermost()}
DELAYED = {"pipeline_delay_activation_forwarding": True, "num_pipeline_microbatches": 4}
QUICK = Case("dense", 2, ("stage",), 4, pipeline(2, 3, fsdp=2))
CASES = [
    QUICK,
    Case("dense", 2, ("fsdp",), 4, pipeline(2, 3, fsdp=2) | OUTERMOST),
    Case("dense", 2, ("stage", "fsdp"), 6, pipeline(3, 2, fsdp=2)),  # the second stage has a device in each process
    Case("dense", 4, ("data", "stage"), 4, pipeline(2, 3, "circular", data=2)),
    Case("dense", 4, ("stage", "fsdp"), 4, pipeline(2, 3, fsdp=2)),
    Case("dense", 4, ("stage",), 4, pipeline(4, 1)),
    Case("dense", 4, ("stage", "fsdp"), 4, pipeline(2, 2, "circular_ag_once", fsdp=2)),
    Case("moe", 2, ("stage",), 4, pipeline(2, 3, fsdp=2)),
    Case("moe", 4, ("stage", "fsdp"), 4, pipeline(2, 3, "circular", fsdp=2)),
    Case("moe", 4, ("stage", "expert"), 4, pipeline(2, 3, fsdp=1, expert=2)),
    Case("dense", 2, ("stage",), 4, over_slices(2, pipeline(2, 3, fsdp=2)), 2),
    Case("dense", 4, ("stage", "fsdp"), 4, over_slices(2, pipeline(2, 3, fsdp=2)), 2),
    Case("dense", 2, ("stage",), 4, over_slices(2, pipeline(4, 1)), 2),  # two stages in each slice
    Case("dense", 2, ("stage",), 4, over_slices(2, pipeline(2, 2, fsdp=2) | DELAYED), 2),
    Case("dense", 2, ("fsdp",), 4, over_slices(2, pipeline(1, 1, fsdp=4), "fsdp"), 2),
    Case("dense", 2, ("data",), 4, over_slices(2, pipeline(2, 3, data=2), "data"), 2),
    Case("dense", 2, ("data",), 4, over_slices(2, pipeline(1, 1, fsdp=2, data=2), "data"), 2),  # a window
    Case("dense", 4, ("stage",), 4, over_slices(4, pipeline(4, 3)), 4),
    Case("moe", 2, ("stage",), 4, over_slices(2, pipeline(2, 3, fsdp=1, expert=2)), 2),
    Case("indexer", 2, ("stage",), 4, over_slices(2, pipeline(2, 3, fsdp=2)), 2),
]


def run(model, devices, keys, rounding=0.0):
  rows = {"per_device_batch_size": ROWS // devices, "eval_per_device_batch_size": ROWS // devices}
  steps = {"steps": STEPS, "eval_interval": STEPS // 2}
  return trainer_cases.run_of(model, trainer_cases.UNPACKED, rows | steps | keys, rounding)


def trained(folder, cases):
  """All references and cases, with the same data and initial weights; in one process per number of processes."""
  trainer_cases.write_data(folder)
  models = sorted({case.model for case in cases})
  alone = lambda devices, slices=1: over_slices(slices, {"ici_fsdp_parallelism": devices}, "fsdp")
  weights = lambda devices, slices=1: {model: run(model, devices, alone(devices, slices)).keys for model in models}
  references = {model: run(model, 4, alone(4)) for model in models}
  twins = {trainer_cases.twin_of(model): run(model, 4, alone(4), trainer_cases.ROUNDING) for model in models}
  runs = {}
  for case in cases:
    together = runs.setdefault((case.processes, case.slices, case.devices), {})
    together[case.run_name] = run(case.model, case.devices, case.keys)
  results = run_all(folder, references | twins, devices=4, weights=weights(4))
  for (processes, slices, devices), each in runs.items():
    run_all(folder, each, devices=devices, processes=processes, slices=slices, weights=weights(devices, slices))
  return results


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
  return trained(tmp_path_factory.mktemp("quick"), [QUICK])


@pytest.fixture(scope="module")
def within_a_slice(tmp_path_factory):
  return trained(tmp_path_factory.mktemp("within_a_slice"), [case for case in CASES if case.slices == 1])


@pytest.fixture(scope="module")
def on_slices(tmp_path_factory):
  return trained(tmp_path_factory.mktemp("on_slices"), [case for case in CASES if case.slices > 1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_axes_of_a_case_are_across_its_processes(case, monkeypatch):
  """Each process has successive devices. MaxText makes the mesh of all in their order, or of each slice's."""
  slice_of = property(lambda device: device.id // (case.devices // case.slices) % case.slices)
  monkeypatch.setattr(type(jax.devices()[0]), "slice_index", slice_of, raising=False)
  any_rows = {"per_device_batch_size": ROWS, "eval_per_device_batch_size": ROWS}  # this process may have more devices
  keys = run(case.model, case.devices, case.keys | any_rows).keys
  config = pyconfig.initialize(["", str(run_config.base_yml()), *keys])
  mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[: case.devices])
  process = np.vectorize(lambda device: device.id // (case.devices // case.processes))(mesh.devices)
  across = {axis for i, axis in enumerate(mesh.axis_names) if (process != np.take(process, [0], axis=i)).any()}
  assert across == set(case.across)


def check(results, case):
  assert len(results.metrics_files(case.run_name)) == case.processes
  compared = list(trainer_cases.compare(results, case.run_name, case.model, steps=STEPS))
  bad = [c for c in compared if not c.agrees]
  assert len(compared) == 3 and not bad, bad


@pytest.mark.slow
def test_two_processes_train_as_one(quick):
  check(quick, QUICK)


@pytest.mark.slow
def test_batches_differ_from_step_to_step_and_the_model_learns(quick):
  losses = [m["learning/loss"] for m in quick.metrics("dense", "learning/loss")]
  assert len(set(losses)) == STEPS and losses[-1] < 0.99 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_processes_train_as_one(case, request):
  check(request.getfixturevalue("on_slices" if case.slices > 1 else "within_a_slice"), case)


@pytest.mark.slow
def test_some_processes_load_the_rows_of_all(tmp_path):
  """With `expansion_factor_real_data`. MaxText 0.2.5 hangs in evaluations with it, without this package, too."""
  trainer_cases.write_data(tmp_path)
  processes, devices, model, steps = 2, 8, "dense", 4
  keys = {"expansion_factor_real_data": processes, "steps": steps, "eval_interval": -1}
  make = lambda own, *rounding: trainer_cases.run_of(model, trainer_cases.PRETRAIN, keys | own, *rounding)
  alone = {"ici_fsdp_parallelism": devices}
  runs = {model: make(alone), trainer_cases.twin_of(model): make(alone, trainer_cases.ROUNDING)}
  pipelines = {}
  for implementation, stages in itertools.product(trainer_cases.IMPLEMENTATIONS, (1, 2, 4)):
    own = {"pipeline_impl": implementation, "ici_fsdp_parallelism": devices // stages}
    pipelines[f"{implementation}-{stages}"] = make(trainer_cases.PIPELINES[stages] | own)
  weights = {model: make(alone).keys}
  results = run_all(tmp_path, runs | pipelines, devices=devices, processes=processes, weights=weights)
  for name in pipelines:
    for found in trainer_cases.compare(results, name, model, trainer_cases.TRAIN_METRICS, steps):
      assert found.agrees, (name, found)


def test_models_checkpoints_and_batches_come_sharded_over_processes(tmp_path, monkeypatch):
  monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which nobody is: processes do not ask it for each other
  with jax.set_mesh(jax.make_mesh((1, 1), ("stage", "fsdp"))), nnx.logical_axis_rules(sharded.RULES):
    model = sharded.make()
  ocp.PyTreeCheckpointer().save(tmp_path / "model", nnx.to_pure_dict(nnx.state(model)))
  np.save(tmp_path / "kernel.npy", np.asarray(model.kernel.get_value()))
  log = tmp_path / "log"
  trainer.run_python(["-m", "tests.reliability.sharded", str(tmp_path)], log, devices=4, processes=2)
  assert {"[0] sharded", "[1] sharded"} <= set(log.read_text(encoding="utf-8").splitlines())
