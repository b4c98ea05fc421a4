# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles MaxText's train step as its `train_compile` does, which does not return the compiled step; and runs it."""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import inspect
import time
from typing import Any

from flax import nnx
import jax

from maxtext_pp_ext import presets
from maxtext_pp_ext.config.derived import windowed
from maxtext_pp_ext.host.models import flops, run_config

# Prefixes of the names of the step's arguments: the batch, and the optimizer's state.
BATCH, OPTIMIZER = "data[", "state['optimizer']"


class RefusedError(ValueError):
  """MaxText or this package refuses the configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
  program: Any  # JAX's compiled step
  mesh: jax.sharding.Mesh  # of devices that need not be there; partition i of the program runs on the i-th of them
  config: Any  # MaxText's
  # Seconds that the compiler took: wall time, and that of all processors, which depends less on what else they do.
  times: dict[str, float]


def compile_train_step(arguments: Sequence[str], *, here: bool = False) -> CompiledStep:
  """Compiles a train step without arrays.

  `arguments` are MaxText's. The yml file may be left out, for base.yml, or be the name of a preset. `here` compiles for
  the devices of this process, not of `compile_topology`. Raises RefusedError if the configuration is refused.
  """
  from maxtext.trainers.pre_train import train_compile  # pylint: disable=import-outside-toplevel

  caught: list[CompiledStep] = []
  original = train_compile.jit_and_compile

  def catching(*args, **kwargs):
    start, cpu_start = time.monotonic(), time.process_time()
    executable = original(*args, **kwargs)
    wall, cpu = time.monotonic() - start, time.process_time() - cpu_start
    times = {"compile_s": round(wall, 1), "compile_cpu_s": round(cpu, 1)}
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    caught.append(CompiledStep(program=executable, mesh=given["mesh"], config=given["config"], times=times))
    return executable

  replaced: dict[str, Any] = {"jit_and_compile": catching}
  if here:
    replaced |= {"validate_config": lambda config: None, "get_topology_mesh": _mesh_of_this_process}
  with _replaced(train_compile, replaced), _replaced(train_compile.pyconfig, {"initialize": _initialize}):
    train_compile.main(["", *_with_yml(arguments)])
  return caught[-1]


def placement(step: CompiledStep) -> dict[str, Any]:
  """Where each partition of a step runs: `mesh`, sizes by name in order, and `devices`, [slice, x, y, z] of each."""
  places = [
      [getattr(device, "slice_index", 0), *(getattr(device, "coords", None) or (device.id, 0, 0))]
      for device in step.mesh.devices.flat
  ]
  return {"mesh": dict(step.mesh.shape), "devices": places}


def work(config: Any) -> dict[str, Any]:
  """What a step is counted as: `model_flops` of a device as MaxText's log has them, `tokens` of a device, and bubbles."""
  schedule = run_config.schedule_of(config) if config.using_pipeline_parallelism or windowed(config) else None
  return {
      "model_flops": flops.of_step(config),
      "tokens": config.per_device_batch_size * config.max_target_length * config.gradient_accumulation_steps,
      "bubble_fraction": schedule.bubble_fraction if schedule else 0.0,
      "microbatches": schedule.microbatches if schedule else 1,
      "iterations": schedule.iterations if schedule else 0,
  }


# Keys that differ for building a state. Nothing is loaded, since each implementation would need another layout.
# Parameters may be replicated, as in small models, which does not concern the step.
_STATE_ONLY = {"load_parameters_path": "", "load_full_state_path": "", "sharding_tolerance": 1.0}


class RunningStep:
  """A train step on the devices of this process, with the state that it trains and a batch of synthetic data."""

  def __init__(self, arguments: Sequence[str]):
    """Compiles a step, and initialises its state as MaxText's trainer does.

    The arguments are those of `compile_train_step`. The caller sets `dataset_type=synthetic` and turns off checkpoints.
    Raises RefusedError if the configuration is refused, or its step takes more than a state and a batch.
    """
    from maxtext.utils import train_utils  # pylint: disable=import-outside-toplevel

    self._step = compile_train_step(arguments, here=True).program
    shardings, _ = self._step.input_shardings
    if len(shardings) != 2:
      raise RefusedError("Steps that also take random numbers, such as those of DiLoCo, are compiled but not run.")
    config = run_config.read(_with_yml(arguments), **_STATE_ONLY)
    # The positions of the loader and the state in the returned tuple hold for MaxText 0.2.5.
    *_, loader, _, _, model_and_optimizer = train_utils.setup_train_loop(config, None)
    self._state = jax.device_put(nnx.state(model_and_optimizer), shardings[0])
    self._batch = jax.device_put(loader.load_next_batch(), shardings[1])
    self.losses: list[float] = []  # of each step so far

  def __call__(self) -> None:
    """Runs a step and waits for it."""
    # The state is donated: its memory becomes that of the new one.
    self._state, metrics = self._step(self._state, self._batch)
    jax.block_until_ready((self._state, metrics))
    self.losses.append(float(metrics["scalar"]["learning/loss"]))


@contextlib.contextmanager
def _replaced(module: Any, values: dict[str, Any]) -> Iterator[None]:
  before = {name: getattr(module, name) for name in values}
  try:
    vars(module).update(values)
    yield
  finally:
    vars(module).update(before)


def _with_yml(arguments: Sequence[str]) -> list[str]:
  if not arguments or "=" in arguments[0]:
    return list(arguments)  # MaxText then takes base.yml
  first, *rest = arguments
  return [first if first.endswith((".yml", ".yaml")) else presets.path(first), *rest]


def _initialize(argv: Sequence[str]) -> Any:
  """Replaces MaxText's own function, which logs problems and ends the process."""
  try:
    return run_config.read(argv[1:])
  except ValueError as error:
    raise RefusedError(str(error)) from error


def _mesh_of_this_process(config: Any) -> Any:
  from maxtext.utils import maxtext_utils  # pylint: disable=import-outside-toplevel

  # As in the replaced function, and in the trainer.
  jax.config.update("jax_remove_size_one_mesh_axis_from_type", config.remove_size_one_mesh_axis_from_type)
  return maxtext_utils.get_mesh_from_config(config, jax.devices())
