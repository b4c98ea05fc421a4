# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step from closed forms, at the rates that the TPU compiler's programs reach; docs/seconds.md.

It adds up matrix products, attention, elementwise work, sums of gradients and the optimizer, each of which waits for the
others, and the transfers for which compute waits. All is of one device and step.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import numpy as np

from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.hardware.kernels import ATTENTION, EFFICIENCY, GROUPED_PRODUCT, SPLASH
from maxtext_pp_ext.hardware.torus import Slice
from maxtext_pp_ext.plan.costs import Costs, gathers, OwnLoop, reductions, Sent, Sizes
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy

_LARGE_VMEM_KIB = 49152  # of scoped VMEM, with which products have large tiles (`hardware/chips.py`)
# The logits' three products take longer than at the peak, too: 8192 × 5120 × 202048 in Llama 4 Scout on v5p takes 43, 41
# and 45 ms, 37 at the peak. With 48 MiB of scoped VMEM they do not.
_LOGITS = 1.17
# The cross-entropy reads the logits. Backward reads them again and writes their gradient, or computes it in both products
# that read it.
_PASSES_OF_LOGITS = 3
# The product that computes a gradient adds it to the float32 sum. In Llama 3 70B on v5p it takes 6.1 ms instead of 4.7,
# as long as four HBM round trips of the sum: its tiles leave less VMEM to the operands, and nothing hides what is read
# and written. With 48 MiB of scoped VMEM or more both take 4.2 ms. So it is where VMEM holds a microbatch's activations:
# 4096 × 5120 × 17408 takes 1.635 ms with and without a sum on v5p, whose VMEM has 64 MiB, and 8192 × 4096 × 14336, for
# which they do not suffice, 2.77 and 2.33; on v5e and v6e, with 128, 5.08 and 5.03, and 1.24 and 1.19. Kernels of grouped
# products do not add: always four.
_SUM_ROUND_TRIPS = 4
# Weights that are gathered in each iteration of several microbatches are copied between the layouts of gathers and
# products, in HBM round trips of each gathered and each reduced repeat: `--impl circular`, and `--shape llama3-8b-dcn`.
_ITERATION_ROUND_TRIPS = 4
# How often an iteration of several microbatches, or stages, reads or writes activations of one more than that of a
# window with one: forward writes them to where microbatches are, backward reads them there and writes them for the stage.
# On v5p each takes 0.07 ms for 67 MB in Llama 3 70B (`--shape llama3-70b --impl circular_bsw --hlo …`).
_PASSES_OF_RING = 3
# With all weights gathered at once, a kernel reads a copy of its weights, cut out of those of all repeats; of a window it
# reads the buffer. Copies took 0.15 s more of a step of Mixtral 8x7B on v5p (`--shape mixtral-8x7b-dropless --impl
# circular_bsw circular_ag_once`), as long as 8 HBM round trips of the experts' weights in each iteration.
_KERNEL_COPY_ROUND_TRIPS = 8
# A kernel reads weights with their last axis in lanes of 128. Where a shard of that axis is no multiple of 128 the TPU
# stores another axis in lanes. What is gathered is then transposed before a kernel reads it, and so is its gradient. In
# Llama 4 Scout over 16 devices, whose shards have 320 of 5120, it takes 1.64 ms for 336 MB, and 1.13 for the gradient; in
# DeepSeek-V3 3.12 ms for 940 MB: as long as 9 to 13 HBM round trips (`--shape llama4-17b-16e deepseek3-671b-4096`).
_TRANSPOSE_ROUND_TRIPS = 10
# The share of forward in which transfers to the host's memory run in MaxText's own loop. The compiler starts those of an
# iteration late in it: of Mistral 7B on v6e-8, whose transfers take as long as forward, compute waits for 45 %
# (`python -m benchmarks.published --run mistral-7b-v6e-8 --impl none`). Our loops send them in the next iteration.
_WHILE_SENT = 0.5
# The share of backward in which they return there, and in windows that replace weights in each iteration, where the
# compiler fetches an iteration's arrays late in the one before. Two layers of Llama 3 70B on v5p-256, with queries and a
# product of the MLP offloaded, compute for 151 ms. That hides 50 of the 76 ms of fetches (`maxtext-pp compare …
# query_proj=offload mlpwi_0=offload --trace`). Our other loops fetch beside a whole iteration.
_WHILE_FETCHED = 1 / 3
# The share of gathers that run beside compute on chips whose compiler lets them without flags. On v5e windows wait for 14
# to 23 % of theirs (Qwen2.5 7B, Llama 2 7B, Qwen3 4B), and MaxText's own loop, which gathers a layer's weights when it
# begins with the layer, for 65 % (Qwen2.5 14B; `python -m benchmarks.held_back`).
_AHEAD, _AHEAD_IN_OWN_LOOP = 0.8, 0.35
# Bytes of zeros that a core fills in a cycle, by the compiler's estimate: 23.4 cycles for each tile of 2 × 128 values of
# 16 bits. A ragged exchange has its buffers in such tiles. DeepSeek2 16B and Mixtral 8x7B on v5p: 10.5 ms for 805 MB, 3.5
# ms for 268. On v6e it is 21.4 cycles, on v5e 23.6 (gpt-oss-20b's buffers).
_FILLED_PER_CYCLE = 2 * 128 * 2 / 23.4
OPTIMIZER = "optimizer"  # a part of the seconds of a step
# The share of the dispatch that compute hides where it may travel overlapped with compute, and where the parts of a
# microbatch take turns, too. In MaxText's layers little can compute before the tokens arrive. 34 to 49 % of it in
# DeepSeek-V3, 44 to 81 % in Mixtral 8x7B, 62 % with two parts (`--shape deepseek3-671b-4096 mixtral-8x7b-dropless
# deepseek3-671b-batch-split --flags ENABLE_ASYNC_RAGGED_ALL_TO_ALL`).
_HIDDEN, _HIDDEN_OF_PARTS = 0.4, 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
  """What experts cost one device, forward and backward: of one layer and one microbatch, or of all."""

  sent: float = 0.0  # bytes of the buffers that receive tokens, or weights, from the other devices of the expert axis
  routed: float = 0.0  # bytes of tokens that go to experts, its own included, and of results, if routing is balanced
  gathered: float = 0.0  # with a capacity, bytes sent to gather the experts' weights twice and to add up their gradients
  held: float = 0.0  # bytes that backward holds at once
  moved: float = 0.0  # bytes read and written outside of products
  filled: float = 0.0  # bytes of zeros into which backward receives gradients
  flops: float = 0.0  # FLOPs of grouped products, without those that are computed again

  def times(self, number: float) -> "Experts":
    """Of so many layers and microbatches."""
    return Experts(**{name: number * each for name, each in dataclasses.asdict(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What a device computes in a step, without bubbles."""

  sizes: Sizes
  flops: float  # FLOPs in the layers, rematerialisation included
  products: float  # those of matrix products other than attention's and grouped ones
  moved: float  # bytes that these products read and write
  grouped: float  # those of grouped products, of tokens with their experts
  outside: float  # FLOPs outside the layers
  logit_values: float  # how many logits there are
  attention: float  # FLOPs of one product of attention in all layers
  recomputed: float  # share of attention's forward that backward computes again
  again: float  # and of products
  elementwise: float  # values that the layers read or write between products
  itemsize: int  # bytes of a value of activations
  experts: Experts  # of all layers and microbatches
  dispatches_beside: bool  # whether XLA's flags let these travel overlapped with compute
  parts: int  # parts of a microbatch, of which one computes while another's tokens travel (batch-split schedule)
  experts_devices: int  # the devices that share the experts
  vmem_kib: int | None  # XLA's --xla_tpu_scoped_vmem_limit_kib; None if it is not given
  on_sparsecores: bool  # whether XLA's flags put gathers on the SparseCores, where they overlap with compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """The seconds of a step."""

  parts: dict[str, float]  # what -> seconds, one after another; transfers only those for which compute waits
  beside: dict[str, float]  # lane -> seconds of the transfers that run beside the pipeline's compute
  pipeline: float  # of the parts, seconds that the pipeline computes
  to_host: float  # seconds in which activations go to the host's memory, and in which they come back
  while_sent: float  # the share of forward in which they can go there
  while_fetched: float  # the share of backward in which they can come back
  at_peak: dict[str, float]  # "compute", "interconnect" and "network" -> seconds of each at the vendor's peak rate

  @property
  def seconds(self) -> float:
    return sum(self.parts.values()) + max(0.0, max(self.beside.values()) - self.pipeline)

  def accumulated(self, parts: int) -> "Estimate":
    """Of a step of so many parts, one after another, behind which the optimizer works once."""
    times = lambda seconds: {what: parts * each for what, each in seconds.items()}
    return dataclasses.replace(
        self,
        parts=times(self.parts) | {OPTIMIZER: self.parts[OPTIMIZER]},
        beside=times(self.beside),
        pipeline=parts * self.pipeline,
        to_host=parts * self.to_host,
        at_peak=times(self.at_peak),
    )

  @property
  def at_least(self) -> float:
    """The seconds if transfers and compute overlap fully, at their peak rates."""
    return max(self.at_peak.values())

  @property
  def at_most(self) -> float:
    """The seconds if compute waits for every transfer."""
    return sum(self.parts.values()) + sum(self.beside.values())


def estimate(
    chip: chips.Chip,
    its_slice: Slice,
    work: Work,
    costs: Costs,
    schedule: CircularSchedule,
    gather_policy: GatherPolicy | None,
) -> Estimate:
  """Returns the estimate of a chip in a slice, which does this work and has these costs; `OwnLoop` has no policy."""
  with_bubbles = 1 / (1 - schedule.bubble_fraction)
  of_splash = SPLASH["fwd"] * (1 + work.recomputed) + SPLASH["dkv"] + SPLASH["dq"]
  own_loop, microbatches = isinstance(schedule, OwnLoop), schedule.microbatches
  keeps_gathered = gather_policy is not None and gather_policy.keeps_gathered
  adds_for_free = _has_large_vmem(work) or work.sizes.activations < chip.vmem_bytes
  added = work.sizes.summed_of_kernels if adds_for_free else work.sizes.summed
  summed = schedule.iterations * added if keeps_gathered and microbatches > 1 else 0.0
  dispatch = _dispatch(chip, its_slice, work) * with_bubbles
  hidden = dispatch * (_HIDDEN if work.parts == 1 else _HIDDEN_OF_PARTS) if work.dispatches_beside else 0.0
  vmem = max(chip.vmem_bytes - 1024 * (work.vmem_kib or 0), 0)
  over_peak = _over_peak(chip, work)
  matmuls = (each.seconds(chip, vmem, over_peak, costs.peak) for each in work.sizes.collective_matmuls)
  longer, waiting, within = np.sum([(0.0,) * 3, *matmuls], 0)
  layers = {
      "products": _products(chip, work) * with_bubbles + longer,
      "grouped products": work.grouped / (chip.flops * EFFICIENCY[GROUPED_PRODUCT]) * with_bubbles,
      "attention": of_splash * work.attention / (chip.flops * EFFICIENCY[ATTENTION]) * with_bubbles,
      "elementwise": _elementwise(chip, work) * with_bubbles + _ring(chip, work, schedule),
      "sums of gradients": _SUM_ROUND_TRIPS * summed / chip.hbm_bandwidth,
      "dispatch": dispatch - hidden,
      "copies of weights": _copied(chip, work, schedule, gather_policy),
  }
  # Forward takes one part of what forward, its recomputation and backward compute, weights' gradients another one.
  pipeline, parts = sum(layers.values()), 3 + work.again
  room = pipeline if own_loop or schedule.delay == 2 else pipeline / parts
  # Whether MaxText's own loop or a window computes all of a layer's gradients at once.
  at_once, backward = own_loop or keeps_gathered and microbatches == 1, pipeline * (1 - 1 / parts)
  behind = (0.0 if costs.transfers[Sent.WEIGHTS].over_network else backward) if at_once else None
  waits, beside = _transfers(
      chip,
      its_slice,
      work,
      costs,
      slower=_slower(its_slice, work, gather_policy),
      room=room,
      behind=behind,
      ahead=(_AHEAD_IN_OWN_LOOP if own_loop else _AHEAD) if chip.gathers_beside_compute else 0.0,
  )
  state = 3 * work.sizes.parameters + 2 * work.sizes.optimizer  # bytes that the optimizer reads and writes
  # Weights and moments are taken to have 32 bits.
  others = {
      "outside the layers": (1.0 if _has_large_vmem(work) else _LOGITS) * work.outside / chip.flops
      + chip.moves(_PASSES_OF_LOGITS * work.logit_values),
      OPTIMIZER: state / chip.elementwise,
      "transfers": sum(waits.values()) + waiting + _within_layers(chip, its_slice, work, costs, schedule),
  }
  to_host = costs.offloaded / chip.host_bandwidth
  while_sent, while_fetched = _WHILE_SENT if own_loop else 1.0, _WHILE_FETCHED if at_once else 1.0
  sending, fetching = while_sent * pipeline / parts, while_fetched * backward
  others["to the host's memory"] = float(waiting_for_host(to_host, sending, fetching))
  at_peak = _at_peak(chip, work, costs, with_bubbles)
  beside |= {"dispatch": hidden, "collective matmuls": within}
  return Estimate(
      parts=layers | others,
      beside=beside,
      pipeline=pipeline,
      to_host=to_host,
      while_sent=while_sent,
      while_fetched=while_fetched,
      at_peak=at_peak,
  )


def waiting_for_host(to_host: Any, sending: Any, fetching: Any) -> Any:
  """Seconds in which compute waits for the host, beside `sending` seconds of forward and `fetching` of backward."""
  return np.maximum(to_host - sending, 0.0) + np.maximum(to_host - fetching, 0.0)


def _at_peak(chip: chips.Chip, work: Work, costs: Costs, with_bubbles: float) -> dict[str, float]:
  return {
      "compute": (work.flops * with_bubbles + work.outside) / chip.flops,
      "interconnect": max(costs.sent - costs.between_slices, 0) / chip.interconnect,
      "network": costs.between_slices / chip.network,
  }


def _copied(chip: chips.Chip, work: Work, schedule: CircularSchedule, gather_policy: GatherPolicy | None) -> float:
  """Seconds of copies of weights and their gradients."""
  sizes = work.sizes
  if gather_policy is None:  # backward gathers once for what it recomputes and for gradients
    return _TRANSPOSE_ROUND_TRIPS * sizes.transposed * (2 + work.again) * schedule.repeats / chip.hbm_bandwidth
  gathered, reduced = gathers(schedule, gather_policy), reductions(schedule, gather_policy)
  copied = _TRANSPOSE_ROUND_TRIPS * sizes.transposed * (gathered + reduced)
  if gather_policy.gathers_first:
    copied += _KERNEL_COPY_ROUND_TRIPS * schedule.iterations * sizes.gathered_of_kernels
  if schedule.microbatches > 1 and not gather_policy.keeps_gathered:
    copied += _ITERATION_ROUND_TRIPS * (gathered + reduced) * sizes.gathered
  # Shards are cast before they are gathered. With several microbatches each chunk that arrives is copied into its buffer;
  # the first repeat is gathered whole. Chunks of the gradients' sums are cut out before they are reduced.
  values = gathered * sizes.cast
  if schedule.microbatches > 1 and gather_policy.keeps_gathered:
    copied += 2 * (gathered - 1) * sizes.gathered if gather_policy.prefetches else 0
    values += reduced * sizes.values
  return copied / chip.hbm_bandwidth + chip.moves(2 * values)


def _ring(chip: chips.Chip, work: Work, schedule: CircularSchedule) -> float:
  """Seconds in which activations are put to where stages read them."""
  if schedule.stages == schedule.microbatches == 1:
    return 0.0
  return chip.moves(_PASSES_OF_RING * schedule.iterations * work.sizes.activations / work.itemsize)


def _products(chip: chips.Chip, work: Work) -> float:
  """Seconds of the products in the layers, and of what the compiler fuses into them."""
  takes, moved = _over_peak(chip, work) * work.products / chip.flops, work.moved / chip.hbm_bandwidth
  return takes + chip.bytes_not_hidden * moved if _has_large_vmem(work) else max(takes, moved)


def _over_peak(chip: chips.Chip, work: Work) -> float:
  return chip.over_peak_with_vmem if _has_large_vmem(work) else chip.over_peak


def _elementwise(chip: chips.Chip, work: Work) -> float:
  """Seconds of what is between products and kernels."""
  moved = chip.moves(work.elementwise) + work.experts.moved / chip.hbm_bandwidth
  return moved + work.experts.filled / (chip.cores * chip.clock * _FILLED_PER_CYCLE)


def _has_large_vmem(work: Work) -> bool:
  return (work.vmem_kib or 0) >= _LARGE_VMEM_KIB


def _transfers(
    chip: chips.Chip,
    its_slice: Slice,
    work: Work,
    costs: Costs,
    slower: Mapping[Sent, float],  # how many times as long as their bytes say
    room: float,
    behind: float | None,
    ahead: float,
) -> tuple[dict[str, float], dict[str, float]]:
  """Seconds by lane of the transfers for which compute waits, and of those beside it.

  What two devices gather or reduce they permute, and permutations overlap with compute. A collective matmul's transfers
  are not among these. Activations, and what is sent outside of the pipeline, have `room` seconds of compute to overlap
  with. Sums over slices have `behind` seconds of backward, if MaxText's own loop or a window computes it; others wait. Of
  gathers within a slice the compiler lets a share of `ahead` run beside compute without any flags.
  """
  rates = {
      "links": _links(its_slice, work.sizes, its_slice.links_of) * _link(chip),
      "links to the next stage": _link(chip),  # one way over one of them
      "network": chip.network_measured or chip.network,
  }
  within_products = sum(each.sent for each in work.sizes.collective_matmuls)
  of_matmuls = {Sent.WEIGHTS: 2 * within_products, Sent.GRADIENTS: within_products}
  waits, beside = dict.fromkeys(rates, 0.0), dict.fromkeys(rates, 0.0)
  for what, (sent, between, beside_compute) in costs.transfers.items():
    if what in (Sent.DISPATCH, Sent.WITHIN_LAYERS):  # the layers wait for these
      continue
    moves, gathers = what == Sent.ACTIVATIONS, what == Sent.WEIGHTS
    within = max(sent - between - of_matmuls.get(what, 0.0), 0.0) * slower.get(what, 1.0)
    links = "links to the next stage" if moves else "links"
    for lane, size, exchanged in ((links, within, work.sizes.permuted), ("network", between, 0.0)):
      overlaps, takes = 1.0 if moves or work.on_sparsecores else exchanged, size / rates[lane]
      if gathers and lane == "links":
        overlaps = max(overlaps, ahead)
      if what == Sent.OUTSIDE:
        overlaps = float(lane == "network")
      hidden = min(beside_compute * overlaps * takes, room if moves or what == Sent.OUTSIDE else takes)
      if what == Sent.GRADIENTS and lane == "network" and behind is not None:
        hidden = min(takes, behind)
      waits[lane] += takes - hidden
      beside[lane] += hidden
  return waits, beside


def _slower(torus: Slice, work: Work, gather_policy: GatherPolicy | None) -> dict[Sent, float]:
  """How many times as long as their bytes say weights and gradients take, of which some go in steps.

  The engine gathers on SparseCores along one axis of the torus after another. A window scatters in two steps what all
  devices share, over half of the axes each. Where weights are gathered in each iteration, gradients that no kernel
  computes are taken to go by an all-reduce, as XLA reduces most of them. The bytes have all other all-reduces.
  """
  if gather_policy is None:
    return {}
  sizes = work.sizes
  if not gather_policy.keeps_gathered:
    return {Sent.GRADIENTS: (1 + sizes.in_steps) / (1 + sizes.in_steps_of_kernels)}
  slower = {Sent.GRADIENTS: 1 + sizes.in_steps * (torus.slower_in_two_steps - 1)}
  if work.on_sparsecores and (links := _links(torus, sizes, torus.links_of)) < math.inf:
    in_steps = lambda group: torus.links_in_steps(group, sizes.rings_last)
    slower[Sent.WEIGHTS] = links / _links(torus, sizes, in_steps)
  return slower


def _links(torus: Slice, sizes: Sizes, links_of: Callable[[int], float]) -> float:
  """Over how many links a device gathers weights, on average over their groups."""
  shares, groups = zip(*sizes.groups or [(1.0, torus.devices)], strict=True)
  return sum(shares) / takes if (takes := sum(np.divide(shares, [*map(links_of, groups)]))) else math.inf


def _within_layers(chip: chips.Chip, its_slice: Slice, work: Work, costs: Costs, schedule: CircularSchedule) -> float:
  """Seconds of what layers send over axes such as tensor and context, for which they wait."""
  if not (sent := costs.traffic.get(Sent.WITHIN_LAYERS, 0)):
    return 0.0
  sizes = [(schedule.iterations * size, devices) for size, devices in work.sizes.within_layers]
  sizes += work.sizes.within_outside
  takes = sum(size / its_slice.links_of(devices) for size, devices in sizes)
  return sent * takes / sum(size for size, _ in sizes) / _link(chip)


def _dispatch(chip: chips.Chip, its_slice: Slice, work: Work) -> float:
  """Seconds on the busiest link between the devices that share the experts: of tokens, or of weights gathered instead.

  Half of all tokens cross the middle of the slowest axis of these devices, one half of them in each direction. Devices
  that span no whole axes are taken to be as long as the longest axis.
  """

  def seconds(length: int, links: int) -> float:
    crossing = (length // 2) * (length - length // 2) / length
    return (work.experts.gathered + work.experts.routed * crossing) / (links * _link(chip))

  lengths, links = its_slice.lengths, its_slice.links
  if not (spanned := its_slice.spanned(work.experts_devices)):
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    return seconds(min(work.experts_devices, lengths[longest]), links[longest])
  return min(max((seconds(lengths[axis], links[axis]) for axis in axes), default=0.0) for axes in spanned)


def _link(chip: chips.Chip) -> float:
  """Bytes per second over one link, in one direction."""
  return chip.link * chips.LINK_EFFICIENCY
