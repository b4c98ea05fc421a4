# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traffic and memory of a pipeline as closed forms; docs/how-it-works.md derives them.

Symbols as in `schedule`: S stages, M microbatches, R repeats, D forwarding delay, T iterations. All bytes are per
device. Traffic is what a device sends in one step, counted as `compiled.traffic` counts that of compiled programs.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from maxtext_pp_ext.schedule import CircularSchedule, Residency


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of a model on one device, in bytes.

  A "repeat" is one repeat of one stage. Without a pipeline it is one layer, and the whole batch is one microbatch.

  Attributes:
    parameters: the whole model, sharded as stored.
    gradients: the gradients of the whole model, sharded as stored, those of layers in the dtype of the gather.
    gradients_at_once: the same if each gradient is reduced at once: those of layers in the dtype of sums.
    optimizer: the optimizer's moments.
    gathered: the gathered weights of a repeat, in the dtype of the gather.
    summed: the gradients of these weights, in the dtype in which they are summed over microbatches. With one microbatch
      there is no sum: it is the dtype of the gather, unless pipeline_grad_accum_dtype names another.
    gathered_of_kernels, summed_of_kernels: of these two, those of weights that Pallas kernels read.
    sent_to_gather, sent_to_reduce: what a device sends to gather these weights once, and to reduce these gradients once.
    transposed: of gathered_of_kernels, those that are transposed before kernels read them.
    groups: (share of what is sent to gather, the chips of a slice that gather it from one another).
    permuted: share of sent_to_gather that two devices gather from one another.
    over_all_devices: share of sent_to_reduce that belongs to gradients that are scattered over all devices of the mesh.
    over_all_of_kernels: share of it that belongs to those of them that kernels compute.
    all_reduced: share of it that belongs to gradients that XLA would all-reduce: these, and those of weights whose shards
      do not fill the tiles in which a TPU stores them.
    all_reduced_of_kernels: share of it that belongs to those of these gradients that kernels compute.
    activations: the activations of one microbatch between two layers.
    kept: the inputs of a repeat's layers for one microbatch, as far as they stay in the device's memory for backward:
      none if MaxText offloads them.
    work: what backward of a layer holds of one microbatch.
    logits: the logits of the device's share of the batch.
    head: weights outside the pipeline, as they are gathered.
    head_sent: what a device sends in a step for weights outside the pipeline, and their gradients.
    work_outside: what backward of a layer outside the pipeline keeps, for the whole batch; 0 without such layers.
    sent_to_gather_again: of sent_to_gather, those of weights that the compiler gathers twice in backward without a
      pipeline: for what is recomputed, and for the gradients. It does so but for weights of Pallas kernels, and for those
      that all devices shard.
    dispatched: what layers send in a step to dispatch one microbatch's tokens to experts, and to combine the results.
    dispatched_outside: the same of layers outside the pipeline, for the whole batch.
    between_slices: bytes over the data-centre network: those of sent_to_gather, those of sent_to_reduce, and those sent
      once per step for weights outside the pipeline.
  """

  parameters: int
  gradients: int
  gradients_at_once: int
  optimizer: int
  gathered: int
  summed: int
  sent_to_gather: int
  sent_to_reduce: int
  activations: int
  kept: int
  work: int
  logits: int
  head: int
  head_sent: int
  work_outside: int = 0
  gathered_of_kernels: int = 0
  summed_of_kernels: int = 0
  transposed: int = 0
  sent_to_gather_again: int = 0
  groups: tuple[tuple[float, int], ...] = ()
  permuted: float = 0.0
  over_all_of_kernels: float = 0.0
  all_reduced: float = 0.0
  all_reduced_of_kernels: float = 0.0
  over_all_devices: float = 0.0
  dispatched: int = 0
  dispatched_outside: int = 0
  between_slices: tuple[int, int, int] = (0, 0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Costs per device and step, in bytes.

  Attributes:
    traffic: what -> bytes sent.
    over_network: what -> of those, bytes over the data-centre network.
    beside_compute: what -> share of those that may be sent while the pipeline computes.
    always: what -> memory that is taken throughout the step.
    phases: phase that may be the worst -> what -> memory that is taken in it.
  """

  traffic: dict[str, int]
  over_network: dict[str, int]
  beside_compute: dict[str, float]
  always: dict[str, int]
  phases: dict[str, dict[str, int]]

  @property
  def sent(self) -> int:
    return sum(self.traffic.values())

  @property
  def between_slices(self) -> int:
    """The bytes over the data-centre network."""
    return sum(self.over_network.values())

  @property
  def worst_phase(self) -> str:
    return max(self.phases, key=lambda name: sum(self.phases[name].values()))

  @property
  def memory(self) -> dict[str, int]:
    """The memory that is taken in the worst phase."""
    return self.always | self.phases[self.worst_phase]

  @property
  def peak(self) -> int:
    return sum(self.memory.values())


def gathers(schedule: CircularSchedule, residency: Residency) -> float:
  """Returns how often the weights of one repeat are gathered in a step, measured by what a device sends."""
  if not residency.has_slots:
    return 2.0 * schedule.iterations
  if residency.gathers_first or schedule.repeats == 1:
    return float(schedule.repeats)
  # Backward begins with the weights that forward ended with. A piece is sent in each iteration in which any
  # stage needs one, and stages need them at different times.
  return 2 * schedule.repeats - 1 + 2 * _others_iterations(schedule)


def reductions(schedule: CircularSchedule, residency: Residency) -> float:
  """Returns how often the gradients of one repeat are reduced in a step, measured by what a device sends."""
  if not residency.has_slots:
    return float(schedule.iterations)
  return schedule.repeats + (_others_iterations(schedule) if schedule.repeats > 1 else 0)


def _others_iterations(schedule: CircularSchedule) -> float:
  """Returns how long, in repeats, other stages work while one stage idles."""
  return schedule.delay * (schedule.stages - 1) / schedule.microbatches


def pipelined(schedule: CircularSchedule, residency: Residency, sizes: Sizes, *, over_slices: bool = False) -> Costs:
  """Returns the costs of one of our pipelines.

  Args:
    schedule: the schedule.
    residency: how long gathered weights stay.
    sizes: sizes of the model with this schedule's stages.
    over_slices: whether stages are on different slices.
  """
  gather, reduce = gathers(schedule, residency), reductions(schedule, residency)
  ring = 2 * schedule.iterations * sizes.activations if schedule.stages > 1 else 0
  whole = schedule.microbatches * sizes.activations
  # Into the pipeline and out of it, forward and backward.
  ends = 4 * whole * (schedule.stages - 1) // schedule.stages
  # XLA may reduce gradients of dense layers within the products that compute them, step by step. That sends them once.
  twice = 0.0 if residency.has_slots else sizes.all_reduced_of_kernels
  traffic = {
      "weights": round(gather * sizes.sent_to_gather),
      "gradients": round(reduce * sizes.sent_to_reduce * (1 + twice)),
      "activations": ring + ends,
      "outside the pipeline": sizes.head_sent,
      **_dispatch(schedule.iterations, sizes),
  }
  gathered_over, reduced_over, once_over = sizes.between_slices
  over_network = {
      "weights": round(gather * gathered_over),
      "gradients": round(reduce * reduced_over),
      "activations": traffic["activations"] if over_slices else 0,
      "outside the pipeline": once_over,
  }
  several = residency.has_slots and schedule.repeats > 1
  # Nothing computes before the first weights have come, nor after the last gradients; with D = 1 the next stage waits for
  # the activations.
  beside_compute = {
      "weights": 1 - 1 / gather if several and residency.prefetches else 0.0,
      "gradients": 1 - 1 / reduce if several else 0.0,
      "activations": ring / (ring + ends) if schedule.delay == 2 and ring else 0.0,
  }
  names = _PIPELINE if schedule.stages > 1 else _LAYERS
  kept = {_KEPT: schedule.iterations * sizes.kept}
  gradients = sizes.gradients if residency.has_slots else sizes.gradients_at_once
  backward = {"gradients, sharded": gradients, **_window(schedule, residency, sizes, names), **kept}
  backward["waiting microbatches, both directions"] = 2 * whole
  backward[_WORK] = sizes.work
  slots = 0 if not residency.has_slots else schedule.repeats if residency.gathers_first else 1
  head = {**kept, "weights that stay gathered": slots * sizes.gathered, "outputs": whole}
  phases = {names.backward: backward, "at the logits": head | _head(sizes, names)}
  if sizes.work_outside:
    layer = {"gathered weights of a layer": sizes.gathered, "their gradients, not reduced yet": sizes.gathered}
    phases["in the backward of layers outside"] = head | layer | {"one layer outside, backward": sizes.work_outside}
  return Costs(
      traffic=traffic,
      over_network=over_network,
      beside_compute=beside_compute,
      always=_always(sizes),
      phases=phases,
  )


_KEPT, _WORK = "layers' inputs, kept for backward", "one microbatch in a layer, backward"


class _Names(NamedTuple):
  """What the parts of memory are called: one stage and its repeats are a model's layers."""

  backward: str
  sums: str
  all_weights: str
  outside: str


_PIPELINE = _Names(
    backward="in the pipeline's backward",
    sums="sums of the gradients of a repeat",
    all_weights="gathered weights of all repeats",
    outside="gathered weights outside the pipeline",
)
_LAYERS = _Names(
    backward="in the layers' backward",
    sums="sums of the gradients of a layer",
    all_weights="gathered weights of all layers",
    outside="gathered weights outside the layers",
)


def _window(schedule: CircularSchedule, residency: Residency, sizes: Sizes, names: _Names) -> dict[str, int]:
  if residency.prefetches:
    weights = {"weight window: slot and prefetch buffer": min(2, schedule.repeats) * sizes.gathered}
  elif residency.gathers_first:
    weights = {names.all_weights: schedule.repeats * sizes.gathered}
  else:
    # In a window XLA gathers the weights of the next layer ahead, and an all-reduce does not work in place (`maxtext-pp
    # plan model_name=deepseek2-16b compile_topology=v5p-32 per_device_batch_size=4 max_target_length=2048 --validate 5`).
    alone = schedule.stages == 1 and schedule.repeats > 1
    return {
        "gathered weights of one iteration": (2 if alone else 1) * sizes.gathered,
        # not summed over microbatches before
        "their gradients, not reduced yet": round(sizes.gathered * (1 + alone * sizes.all_reduced)),
    }
  if schedule.microbatches > 1:  # finished sums wait in the window
    return weights | {names.sums: sizes.summed}
  reducing = sizes.gathered if schedule.repeats > 1 else 0
  return weights | {"gradients of a layer": sizes.summed, "gradients of the layer behind, being reduced": reducing}


def without(layers: int, sizes: Sizes) -> Costs:
  """Returns the costs of the same model without a pipeline: its layers run one after another in a loop, with remat.

  A layer's weights are gathered in forward, in backward for what is recomputed, and some of them in backward for the
  gradients. With remat the compiler shares the last two for weights of Pallas kernels, as experts have, and for those
  that all devices of the mesh shard. The gradients of the latter go by an all-reduce (`python -m
  benchmarks.compiler_figures --impl none --shape llama3-70b llama3-8b-v6e llama3-8b-dcn`).

  Args:
    layers: the layers, or cycles of layers, that a loop runs one after another.
    sizes: sizes of the model, where such a layer is a repeat.
  """
  traffic = {
      "weights": layers * (2 * sizes.sent_to_gather + sizes.sent_to_gather_again),
      "gradients": round(layers * sizes.sent_to_reduce * (1 + sizes.all_reduced)),
      "activations": 0,
      "outside the pipeline": sizes.head_sent,
      **_dispatch(layers, sizes),
  }
  gathered_over, reduced_over, once_over = sizes.between_slices
  kept = {_KEPT: layers * sizes.kept}
  backward = {
      "gradients, sharded": sizes.parameters,
      "gathered weights of one layer": sizes.gathered,
      "their gradients, not reduced yet": sizes.summed,
      **kept,
      "one layer, backward": sizes.work,
  }
  return Costs(
      traffic=traffic,
      over_network={
          "weights": 3 * layers * gathered_over,
          "gradients": layers * reduced_over,
          "outside the pipeline": once_over,
      },
      beside_compute={},
      always=_always(sizes),
      phases={_LAYERS.backward: backward, "at the logits": kept | _head(sizes, _LAYERS)},
  )


def _dispatch(times: int, sizes: Sizes) -> dict[str, int]:
  sent = times * sizes.dispatched + sizes.dispatched_outside
  return {"dispatch": sent} if sent else {}


def _always(sizes: Sizes) -> dict[str, int]:
  return {"parameters": sizes.parameters, "optimizer's moments": sizes.optimizer}


def _head(sizes: Sizes, names: _Names) -> dict[str, int]:
  return {names.outside: sizes.head, "logits": sizes.logits}
