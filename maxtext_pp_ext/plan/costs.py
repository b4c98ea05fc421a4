# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traffic and memory of a pipeline as closed forms; docs/how-it-works.md derives them.

Symbols as in `schedule`: S stages, M microbatches, R repeats, D forwarding delay, T iterations. All bytes are per
device. Traffic is what a device sends in one step, counted as `compiled.compare` counts that of compiled programs.
"""

from collections.abc import Mapping
import dataclasses
import enum
from typing import Any, NamedTuple

from maxtext_pp_ext.hardware.collective_matmul import CollectiveMatmul
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy
from maxtext_pp_ext.schedule.moves import transfers

# Where a tensor is kept for backward, as MaxText's keys of tensors have it; the last: nowhere.
DEVICE, OFFLOAD = "device", "offload"
PLACES = (DEVICE, OFFLOAD, "remat")


# Axes of a slice that a plan can be asked to choose.
AXES = ("tensor", "context")
# The keys of a batch: a device's sequences in a part of a step, and how many parts follow one another.
BATCH = ("per_device_batch_size", "gradient_accumulation_steps")
# The keys of remat policies other than those of tensors.
OF_POLICIES = ("remat_policy", "pipeline_remat_iterations", "pipeline_remat_tensors")


def is_of_policy(key: str, value: Any) -> bool:
  """Whether a key with this value is one of a remat policy."""
  return key in OF_POLICIES or value in PLACES


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnLoop(CircularSchedule):
  """MaxText's own loop over layers, or cycles of layers, without a pipeline or window. Each of these is a repeat."""

  stages: int = 1
  microbatches: int = 1


class Sent(enum.StrEnum):
  """What a device sends."""

  WEIGHTS = "weights"
  GRADIENTS = "gradients"
  ACTIVATIONS = "activations"  # to other stages, and their gradients
  OUTSIDE = "outside"  # weights outside the pipeline, and their gradients
  DISPATCH = "dispatch"  # tokens to experts, and their results
  WITHIN_LAYERS = "within_layers"  # activations over axes such as tensor and context, and their gradients


class Part(enum.StrEnum):
  """What takes memory."""

  PARAMETERS = "parameters"
  MOMENTS = "moments"  # the optimizer's
  COPIES = "copies"  # of weights, for loops that gather them
  GRADIENTS = "gradients"  # sharded
  DOUBLE_BUFFER = "double_buffer"  # of gathered weights: current and next
  ALL_WEIGHTS = "all_weights"  # gathered, of all repeats
  WEIGHTS_OF_ITERATION = "weights_of_iteration"  # gathered
  WEIGHTS_OF_LAYER = "weights_of_layer"  # gathered, of one layer without a window
  WEIGHTS_AT_LOGITS = "weights_at_logits"  # of the layers, that stay gathered meanwhile
  SUMS = "sums"  # of the gradients of a repeat
  UNREDUCED = "unreduced"  # gradients of the weights that are gathered
  GRADIENTS_OF_LAYER = "gradients_of_layer"  # which with one microbatch are no sums
  GRADIENTS_OF_PARTS = "gradients_of_parts"  # the sum over the parts that gradient accumulation makes of a step
  KEPT = "kept"  # for backward: inputs of layers, and what the remat policy keeps
  KEPT_AGAIN = "kept_again"  # copies of that in another layout
  TO_HOST = "to_host"  # what is on its way to the host's memory, or back
  WAITING = "waiting"  # microbatches, both directions
  WORK = "work"  # backward of a layer, of one microbatch
  WORK_OF_LAYER = "work_of_layer"  # the same of all rows at once
  OUTPUTS = "outputs"  # of all layers
  HEAD = "head"  # gathered weights of the logits
  LOGITS = "logits"
  AFTER_LOGITS = "after_logits"  # their gradient or their weights', and the latter's sum over parts


class Phase(enum.StrEnum):
  """A time of a step that may need most memory."""

  BACKWARD = "backward"  # of the pipeline, or of the layers
  LOGITS = "logits"
  OUTSIDE = "outside"  # backward of layers outside the pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of a model on one device, in bytes.

  A "repeat" is one repeat of one stage, or a layer of `OwnLoop`, whose whole batch is one microbatch.
  """

  # Of the whole model, sharded as stored.
  parameters: int
  gradients: int  # of layers in the dtype of the gather
  gradients_at_once: int  # the same if each gradient is reduced at once: of layers in the dtype of sums
  optimizer: int  # its moments
  # Of layers' weights without stages, in the dtype of compute and with the layers in front: so XLA copies weights before
  # the loop over layers, but not those of experts (`python -m benchmarks.held_back --model qwen2.5-7b qwen3-8b --hlo …`).
  copies: int = 0
  # Of a repeat's weights.
  gathered: int  # in the dtype of the gather
  summed: int  # their gradients, in the dtype of sums; with one microbatch as gathered, unless the config names a dtype
  gathered_of_kernels: int = 0  # of `gathered`, what Pallas kernels read
  gathered_within_products: int = 0  # of `gathered`, what collective matmuls gather
  summed_of_kernels: int = 0  # of `summed`, what they compute
  values: int = 0  # how many
  cast: int = 0  # those of the device's shards that are cast before they are gathered
  transposed: int = 0  # of `gathered_of_kernels`, what is transposed before they read it
  # What a device sends to gather these weights once, and to reduce their gradients once.
  sent_to_gather: int
  sent_to_reduce: int
  sent_to_gather_again: int = 0  # of `sent_to_gather`, what backward gathers twice without a pipeline; see `without`
  collective_matmuls: tuple[CollectiveMatmul, ...] = ()  # of all layers
  groups: tuple[tuple[float, int], ...] = ()  # (share of `sent_to_gather`, chips of a slice that gather it together)
  rings_last: float = 0.0  # share of `sent_to_gather` along the first dimension of a layer's weight; see `Slice`
  permuted: float = 0.0  # share of `sent_to_gather` that two devices gather from one another
  # Shares of `sent_to_reduce`:
  in_steps: float = 0.0  # of gradients that are scattered over all devices, through which no ring goes
  in_steps_of_kernels: float = 0.0  # of those among them that kernels compute
  all_reduced: float = 0.0  # of gradients that XLA would all-reduce: `Columns.all_reduced`
  all_reduced_of_kernels: float = 0.0  # of those among them that kernels compute
  # Of activations.
  activations: int  # of one microbatch, between two layers
  kept: int  # of a repeat's layers for one microbatch, for backward: their inputs, and what the remat policy keeps
  offloaded: int = 0  # the same in the host's memory
  on_the_way: int = 0  # of these on the device: those that are computed, and those of the iteration before, which travel
  kept_outside: int = 0  # of the layers outside of the pipeline, for the whole batch
  offloaded_outside: int = 0
  work: int  # what backward of a layer holds of one microbatch
  dispatched: int = 0  # what layers send in a step to dispatch one microbatch's tokens to experts, and to combine results
  # (what layers send in a step for one microbatch over axes such as tensor and context, the devices along these).
  within_layers: tuple[tuple[float, int], ...] = ()
  # Of what is outside the pipeline, for the whole batch.
  logits: int  # in the dtype of compute
  head: int  # weights, as they are gathered
  beside_logits: int  # of backward: their gradient or their weights'
  # Their gradient, if it is summed over parts of the logits: in float32, before and after it is reduced, whole each time.
  head_in_parts: int = 0
  head_sent: int  # what a device sends in a step for weights and their gradients
  work_outside: int = 0  # what backward of a layer keeps; 0 without such layers
  dispatched_outside: int = 0  # what layers send to dispatch tokens, and to combine results
  within_outside: tuple[tuple[float, int], ...] = ()  # as `within_layers`, the embedding and the logits included
  # Over the data-centre network: of `sent_to_gather`, of `sent_to_reduce`, and of `head_sent`.
  between_slices: tuple[int, int, int] = (0, 0, 0)
  # Where backward of the pipeline adds up the stages' gradients of the logits' weight: their size, and what is sent of
  # the last of `between_slices` while backward computes.
  of_logits: tuple[int, ...] = (0, 0)


class Transfer(NamedTuple):
  """What a device sends in a step."""

  sent: int  # bytes
  over_network: int = 0  # of those, bytes over the data-centre network
  # Share that may be sent while the pipeline computes; of what is outside the pipeline, only over that network.
  beside_compute: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Costs per device and step, in bytes."""

  transfers: Mapping[Sent, Transfer]
  offloaded: int  # bytes of activations that go to the host's memory in forward, and come back in backward
  always: Mapping[Part, int]  # memory that is taken throughout the step
  phases: Mapping[Phase, Mapping[Part, int]]  # memory that is taken in each phase that may be the worst
  on_host: int  # the host's memory that is taken at once
  copies_kept: bool = False  # whether what is kept may be copied if other arrays are in the host's memory

  def accumulated(self, parts: int, gradients: int) -> "Costs":
    """Of a step of so many parts, one after another. Each sends as much; their sum takes the memory of `gradients`."""
    if parts == 1:
      return self
    times = lambda each: Transfer(parts * each.sent, parts * each.over_network, each.beside_compute)
    return dataclasses.replace(
        self,
        transfers={what: times(each) for what, each in self.transfers.items()},
        offloaded=parts * self.offloaded,
        always={**self.always, Part.GRADIENTS_OF_PARTS: gradients},
    )

  @property
  def traffic(self) -> dict[Sent, int]:
    """The bytes sent."""
    return {what: each.sent for what, each in self.transfers.items()}

  @property
  def sent(self) -> int:
    return sum(self.traffic.values())

  @property
  def between_slices(self) -> int:
    """The bytes over the data-centre network."""
    return sum(each.over_network for each in self.transfers.values())

  @property
  def worst_phase(self) -> Phase:
    return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

  @property
  def memory(self) -> dict[Part, int]:
    """The memory that is taken in the worst phase."""
    return {**self.always, **self.phases[self.worst_phase]}

  @property
  def peak(self) -> int:
    return sum(self.memory.values())


def gathers(schedule: CircularSchedule, gather_policy: GatherPolicy) -> float:
  """Returns how often the weights of one repeat are gathered in a step, measured by what a device sends."""
  if not gather_policy.keeps_gathered:
    return 2.0 * schedule.iterations
  if gather_policy.gathers_first or schedule.repeats == 1:
    return float(schedule.repeats)
  # Backward begins with the weights that forward ended with. A piece is sent in each iteration in which any
  # stage needs one, and stages need them at different times.
  return 2 * schedule.repeats - 1 + 2 * _others_iterations(schedule)


def reductions(schedule: CircularSchedule, gather_policy: GatherPolicy) -> float:
  """Returns how often the gradients of one repeat are reduced in a step, measured by what a device sends."""
  if not gather_policy.keeps_gathered:
    return float(schedule.iterations)
  return schedule.repeats + (_others_iterations(schedule) if schedule.repeats > 1 else 0)


def _others_iterations(schedule: CircularSchedule) -> float:
  """Returns how long, in repeats, other stages work while one stage idles."""
  return schedule.delay * (schedule.stages - 1) / schedule.microbatches


def pipelined(schedule: CircularSchedule, gather_policy: GatherPolicy, sizes: Sizes) -> Costs:
  """Returns the costs of one of our pipelines."""
  gather, reduce = gathers(schedule, gather_policy), reductions(schedule, gather_policy)
  ring = 2 * schedule.iterations * sizes.activations if schedule.stages > 1 else 0
  whole = schedule.microbatches * sizes.activations
  # Into the pipeline and out of it, forward and backward.
  ends = 2 * transfers(schedule) * sizes.activations
  # XLA may reduce gradients of dense layers within the products that compute them, step by step. That sends them once.
  twice = 0.0 if gather_policy.keeps_gathered else sizes.all_reduced_of_kernels
  gathered_over, reduced_over, once_over = sizes.between_slices
  several = gather_policy.keeps_gathered and schedule.repeats > 1
  # Nothing computes before the first weights have come, nor after the last gradients. With D = 1 the next stage waits for
  # the activations. Over slices backward computes weights' gradients while cotangents travel.
  ahead = 1 - 1 / gather if several and gather_policy.prefetches else 0.0
  behind = 1 - 1 / reduce if several else 0.0
  hidden = ring if schedule.delay == 2 else ring / 2 if schedule.over_slices else 0
  around, beside = ring + ends, hidden / (ring + ends) if ring else 0.0
  sent = {
      Sent.WEIGHTS: Transfer(round(gather * sizes.sent_to_gather), round(gather * gathered_over), ahead),
      Sent.GRADIENTS: Transfer(round(reduce * sizes.sent_to_reduce * (1 + twice)), round(reduce * reduced_over), behind),
      Sent.ACTIVATIONS: Transfer(around, around if schedule.over_slices else 0, beside),
      Sent.OUTSIDE: Transfer(sizes.head_sent, once_over, sizes.of_logits[1] / max(once_over, 1)),
  }
  kept = _kept(schedule.iterations, sizes)
  backward = {
      Part.GRADIENTS: sizes.of_logits[0] + (sizes.gradients if gather_policy.keeps_gathered else sizes.gradients_at_once),
      **_double_buffer(schedule, gather_policy, sizes),
      **kept,
      Part.WAITING: 2 * whole,
      Part.WORK: sizes.work,
  }
  slots = 0 if not gather_policy.keeps_gathered else schedule.repeats if gather_policy.gathers_first else 1
  head = {**kept, Part.WEIGHTS_AT_LOGITS: slots * sizes.gathered, Part.OUTPUTS: whole}
  phases = {Phase.BACKWARD: backward, Phase.LOGITS: head | _head(sizes)}
  if sizes.work_outside:
    layer = {Part.WEIGHTS_OF_LAYER: sizes.gathered, Part.UNREDUCED: sizes.gathered}
    phases[Phase.OUTSIDE] = head | layer | {Part.WORK_OF_LAYER: sizes.work_outside}
  offloaded = schedule.iterations * sizes.offloaded + sizes.offloaded_outside
  return Costs(
      transfers=sent | _within_layers(schedule.iterations, sizes),
      offloaded=offloaded,
      on_host=offloaded,
      always=_always(sizes),
      phases=phases,
  )


def _double_buffer(schedule: CircularSchedule, gather_policy: GatherPolicy, sizes: Sizes) -> dict[Part, int]:
  if gather_policy.prefetches:
    weights = {Part.DOUBLE_BUFFER: min(2, schedule.repeats) * sizes.gathered}
  elif gather_policy.gathers_first:
    weights = {Part.ALL_WEIGHTS: schedule.repeats * sizes.gathered}
  else:
    # In a window XLA gathers the weights of the next layer ahead, and an all-reduce does not work in place (`maxtext-pp
    # plan model_name=deepseek2-16b compile_topology=v5p-32 per_device_batch_size=4 max_target_length=2048 --validate 5`).
    alone = schedule.stages == 1 and schedule.repeats > 1
    return {
        Part.WEIGHTS_OF_ITERATION: (2 if alone else 1) * sizes.gathered,
        # not summed over microbatches before
        Part.UNREDUCED: round(sizes.gathered * (1 + alone * sizes.all_reduced)),
    }
  if schedule.microbatches > 1:  # finished sums wait in the double buffer
    return weights | {Part.SUMS: sizes.summed}
  # Gradients of dense layers are reduced as weights leave the buffers. Those of kernels are taken to have memory of their
  # own: without it Llama 4 Scout, Qwen3 235B and gpt-oss are 8 to 13 % too low (`python -m benchmarks.plan_error`).
  behind = sizes.gathered_of_kernels if schedule.repeats > 1 else 0
  return weights | {Part.GRADIENTS_OF_LAYER: sizes.summed + behind}


def without(layers: int, sizes: Sizes) -> Costs:
  """Returns the costs of the same model without a pipeline: its layers run one after another in a loop, with remat.

  A layer's weights are gathered in forward, in backward for what is recomputed, and some of them in backward for the
  gradients. With remat the compiler shares the last two for weights of Pallas kernels, as experts have, and for those
  that all devices of the mesh shard. The gradients of the latter go by an all-reduce, unless one ring goes through all
  devices (`python -m benchmarks.compiler_figures --impl none --shape llama3-70b llama3-8b-v6e llama3-8b-dcn`). A
  collective matmul is neither: forward and both products of backward have a loop each, and gather or reduce in it, so
  that no device has the whole gradient.

  `layers` counts the layers, or cycles of layers, that the loop runs. In `sizes` each of these is a repeat.
  """
  gathered_over, reduced_over, once_over = sizes.between_slices
  gathered = layers * (2 * sizes.sent_to_gather + sizes.sent_to_gather_again)
  reduced = round(layers * sizes.sent_to_reduce * (1 + sizes.all_reduced))
  sent = {
      # Nothing computes before the first layer has its weights, forward and backward. Gradients go by an all-reduce.
      Sent.WEIGHTS: Transfer(gathered, 3 * layers * gathered_over, 1 - 1 / layers),
      Sent.GRADIENTS: Transfer(reduced, layers * reduced_over),
      Sent.ACTIVATIONS: Transfer(0),
      Sent.OUTSIDE: Transfer(sizes.head_sent, once_over),
  }
  kept = _kept(layers, sizes)
  # Where it offloads, XLA copies between the two loops what else they keep, to other layouts. Llama 3 8B on v6e-16, four
  # sequences of 2048, which keeps mlpwi_0, query_proj, context and out_proj, needs 27.4 GB, and with two more arrays on
  # the host 31.6, or 33.7 with SparseCores: two and three of these four.
  if sizes.offloaded:
    kept |= {Part.KEPT_AGAIN: max(layers * (sizes.kept - sizes.activations), 0)}
  backward = {
      Part.GRADIENTS: sizes.parameters,
      Part.WEIGHTS_OF_LAYER: sizes.gathered,
      # Those of kernels are taken to have the dtype of sums, for the same reason as in `_double_buffer`.
      Part.UNREDUCED: sizes.gathered
      - sizes.gathered_within_products
      - sizes.gathered_of_kernels
      + sizes.summed_of_kernels,
      **kept,
      Part.WORK_OF_LAYER: sizes.work,
  }
  return Costs(
      transfers=sent | _within_layers(layers, sizes),
      offloaded=layers * sizes.offloaded,
      on_host=layers * sizes.offloaded,
      copies_kept=True,
      always=_always(sizes),
      phases={Phase.BACKWARD: backward, Phase.LOGITS: kept | _head(sizes)},
  )


def _kept(times: int, sizes: Sizes) -> dict[Part, int]:
  """What is kept of so many iterations. An iteration's arrays travel while another one computes."""
  on_the_way = {Part.TO_HOST: sizes.on_the_way} if sizes.on_the_way else {}
  return {Part.KEPT: times * sizes.kept + sizes.kept_outside} | on_the_way


def _within_layers(times: int, sizes: Sizes) -> dict[Sent, Transfer]:
  """What layers send in so many iterations."""
  within = times * sum(size for size, _ in sizes.within_layers) + sum(size for size, _ in sizes.within_outside)
  dispatched = times * sizes.dispatched + sizes.dispatched_outside
  sent = {Sent.DISPATCH: dispatched, Sent.WITHIN_LAYERS: round(within)}
  return {what: Transfer(size) for what, size in sent.items() if size}


def _always(sizes: Sizes) -> dict[Part, int]:
  copies = {Part.COPIES: sizes.copies} if sizes.copies else {}
  return {Part.PARAMETERS: sizes.parameters, Part.MOMENTS: sizes.optimizer} | copies


def _head(sizes: Sizes) -> dict[Part, int]:
  after = sizes.beside_logits + sizes.head_in_parts
  return {Part.HEAD: sizes.head, Part.LOGITS: sizes.logits, Part.AFTER_LOGITS: after}
