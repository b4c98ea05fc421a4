# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimated seconds are between their bounds, and longer with more bubbles, work and bytes."""

import dataclasses
import math

import pytest

from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.hardware.collective_matmul import CollectiveMatmul
from maxtext_pp_ext.host import topology
from maxtext_pp_ext.plan import costs, estimate
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy

# A layer of Llama 3 8B on v6e-64 with 4 stages, a sequence of 4096 for each microbatch; bytes and FLOPs of a device.
SIZES = costs.Sizes(
    parameters=500_000_000,
    gradients=250_000_000,
    gradients_at_once=250_000_000,
    optimizer=1_000_000_000,
    gathered=436_000_000,
    values=218_000_000,
    cast=13_000_000,
    summed=872_000_000,
    sent_to_gather=409_000_000,
    sent_to_reduce=409_000_000,
    activations=33_000_000,
    kept=33_000_000,
    work=500_000_000,
    logits=1_000_000_000,
    head=1_000_000_000,
    beside_logits=1_000_000_000,
    head_sent=1_500_000_000,
    groups=((1.0, 16),),
)
WORK = estimate.Work(
    sizes=SIZES,
    flops=4.83e14,
    products=4.6e14,
    moved=1e11,
    grouped=0.0,
    outside=2.6e13,
    logit_values=1e9,
    attention=2.9e12,
    recomputed=1.0,
    again=1.0,
    elementwise=6.5e10,
    itemsize=2,
    experts=estimate.Experts(),
    experts_devices=1,
    vmem_kib=None,
    on_sparsecores=False,
    dispatches_beside=False,
    parts=1,
)
SCHEDULE = CircularSchedule(stages=4, microbatches=8, repeats=8)
OWN_LOOP = costs.OwnLoop(repeats=32)


def work_with(sizes=SIZES, **changed):
  """WORK with other values, of its sizes, too."""
  of_sizes = {name: changed.pop(name) for name in {*changed} & {each.name for each in dataclasses.fields(SIZES)}}
  return dataclasses.replace(WORK, sizes=dataclasses.replace(sizes, **of_sizes), **changed)


def of(
    chip="v5p",
    *,
    gather_policy=GatherPolicy.REPEAT,
    schedule=SCHEDULE,
    sizes=SIZES,
    devices=64,
    **work,
):
  sent = costs.pipelined(schedule, gather_policy, sizes) if gather_policy else costs.without(schedule.repeats, sizes)
  its_slice = topology.slice_of(chip, devices)
  return estimate.estimate(chips.CHIPS[chip], its_slice, work_with(sizes, **work), sent, schedule, gather_policy)


def test_at_the_peak_rates_a_step_takes_as_long_as_the_slowest_of_three():
  chip = dataclasses.replace(chips.CHIPS["v5p"], flops=100.0, link=5.0, links=2, network=2.0)
  work = dataclasses.replace(WORK, flops=300.0, outside=100.0)
  sent = costs.Costs(
      offloaded=0,
      on_host=0,
      transfers={costs.Sent.WEIGHTS: costs.Transfer(35, over_network=5)},
      always={},
      phases={},
  )
  takes = estimate._at_peak(chip, work, sent, with_bubbles=1 / (1 - 0.25))
  assert takes == pytest.approx({"compute": 5.0, "interconnect": 3.0, "network": 2.5})
  assert chips.of_topology("v5p-256") is chips.CHIPS["v5p"] and chips.of_topology("a3") is None


@pytest.mark.parametrize("chip", chips.CHIPS)
@pytest.mark.parametrize("gather_policy", GatherPolicy)
def test_fewer_bytes_are_not_slower_and_more_bubbles_are_slower(chip, gather_policy):
  whole = of(chip, gather_policy=gather_policy)
  for name in ("sent_to_gather", "sent_to_reduce", "activations", "head_sent"):
    half = dataclasses.replace(SIZES, **{name: getattr(SIZES, name) // 2})
    assert of(chip, gather_policy=gather_policy, sizes=half).seconds <= whole.seconds
  assert whole.at_least < whole.seconds <= whole.at_most
  delayed = of(chip, gather_policy=gather_policy, schedule=dataclasses.replace(SCHEDULE, delay=2))
  assert delayed.at_least < delayed.seconds <= delayed.at_most
  for part in ("products", "attention", "elementwise"):
    assert delayed.parts[part] > whole.parts[part]


def test_weights_are_gathered_over_the_links_of_the_axes_that_their_devices_span():
  waits = lambda *groups: of(devices=32, groups=groups).parts["transfers"]
  whole, two_axes, one_axis = waits((1.0, 32)), waits((1.0, 8)), waits((1.0, 4))  # of 2 × 4 × 4
  assert one_axis - two_axes == pytest.approx(3 * (two_axes - whole)) and two_axes > whole  # 1, 1/2 and 1/3 of a time
  assert waits((0.5, 32), (0.5, 8)) == pytest.approx((whole + two_axes) / 2)
  assert waits((1.0, 16)) == pytest.approx(two_axes)


def test_a_closed_axis_gathers_over_two_links_and_an_open_one_beside_it_over_one():
  sizes = dataclasses.replace(SIZES, head_sent=0, activations=0)
  waits = lambda devices: of("v6e", devices=128, groups=((1.0, devices),), sizes=sizes).parts["transfers"]
  closed, unclosed, both = waits(16), waits(8), waits(128)  # of 8 × 16
  assert unclosed == pytest.approx(2 * closed) == pytest.approx(3 * both)


def test_what_the_devices_of_a_chip_gather_takes_no_link():
  sizes = dataclasses.replace(SIZES, head_sent=0, activations=0)
  waits = lambda devices: of("tpu7x", groups=((1.0, devices),), sizes=sizes).parts["transfers"]
  assert waits(2) == 0.0 < waits(64) < waits(4)  # of 2 × 4 × 4 chips of two devices


def test_products_are_nearer_to_the_peak_with_more_vector_memory_and_attention_has_its_own_share_of_it():
  small = of(vmem_kib=16384).parts
  large = of(vmem_kib=98304).parts
  assert large["products"] < small["products"] and large["attention"] == small["attention"]
  peak = WORK.products / (1 - SCHEDULE.bubble_fraction) / chips.CHIPS["v5p"].flops
  assert peak < large["products"] < 1.02 * peak


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=lambda chip: chip.name)
def test_products_take_as_much_longer_as_the_compiler_says_or_as_long_as_memory_gives_them_arrays(chip):
  takes = lambda moved=0.0, **changes: estimate._products(chip, dataclasses.replace(WORK, moved=moved, **changes))
  peak = WORK.products / chip.flops
  assert 1.0 <= chip.over_peak_with_vmem < chip.over_peak and takes() == pytest.approx(chip.over_peak * peak)
  assert takes(vmem_kib=98304) == pytest.approx(chip.over_peak_with_vmem * peak)
  assert takes(3 * takes() * chip.hbm_bandwidth) == pytest.approx(3 * takes())  # of few rows
  more = takes(chip.hbm_bandwidth, vmem_kib=98304) - takes(vmem_kib=98304)
  assert more == pytest.approx({128: 0.25, 256: 0.4}[chip.matrix_unit])


def test_the_cross_entropy_reads_the_logits_twice_and_writes_their_gradient():
  outside = lambda values: of(logit_values=values).parts["outside the layers"]
  assert outside(2e9) - outside(1e9) == pytest.approx(3 * 1e9 * 4 / chips.CHIPS["v5p"].elementwise)


def test_with_large_vector_memory_products_add_to_sums_in_no_time_and_kernels_do_not():
  vmem = chips.CHIPS["v5p"].vmem_bytes
  sums = lambda activations=vmem, **work: of(activations=activations, **work).parts["sums of gradients"]
  assert sums(vmem_kib=98304) == sums(vmem - 1) == 0.0 < sums(vmem_kib=16384) == sums()
  of_kernels = pytest.approx(sums() * 1e8 / SIZES.summed)
  assert sums(vmem_kib=98304, summed_of_kernels=1e8) == sums(vmem - 1, summed_of_kernels=1e8) == of_kernels


def test_values_are_read_and_written_and_buffers_are_filled_at_a_rate_of_their_own():
  chip, window = chips.CHIPS["v5p"], CircularSchedule(stages=1, microbatches=1, repeats=32)
  takes = lambda **work: of(schedule=window, **work).parts["elementwise"]
  longer = lambda **work: takes(**work) - takes()
  assert longer(elementwise=WORK.elementwise + 1e9) == pytest.approx(4 * 1e9 / chip.elementwise)
  assert longer(experts=estimate.Experts(moved=1e9)) == pytest.approx(1e9 / chip.hbm_bandwidth)
  # 805 MB in 10.5 ms, by the compiler's estimate for DeepSeek2 16B
  assert longer(experts=estimate.Experts(filled=805e6)) == pytest.approx(10.5e-3, rel=0.01)


def test_dispatch_takes_as_long_as_what_crosses_the_middle_of_the_experts_longest_axis():
  routed, gathered = estimate.Experts(routed=1e9), estimate.Experts(gathered=1e9)
  takes = lambda devices, size=32: of(devices=size, experts=routed, experts_devices=devices).parts["dispatch"]
  assert 0.0 < takes(2) == takes(4) / 2  # 1/2 and 1 of what a device sends, on axes of 2 × 4 × 4
  assert takes(4) == takes(8) == takes(16) == takes(32)
  assert takes(8, 512) == 2 * takes(4, 512)  # 8 × 8 × 8
  along = lambda devices: of("v6e", devices=128, experts=routed, experts_devices=devices).parts["dispatch"]
  assert along(8) == along(16) == along(128)  # of 8 × 16: the long axis has twice the links
  whole = of(experts=routed, experts_devices=8)
  for parts, most in ((1, 0.7), (2, 0.5)):
    flag = of(experts=routed, experts_devices=8, dispatches_beside=True, parts=parts)
    assert 0.0 < flag.parts["dispatch"] < most * whole.parts["dispatch"]
    assert flag.at_most == pytest.approx(whole.at_most)
  gathers = of(experts=gathered, devices=32, experts_devices=8).parts["dispatch"]
  assert gathers == pytest.approx(takes(8))


@pytest.mark.parametrize("gather_policy", GatherPolicy)
def test_gradients_take_longer_if_they_are_scattered_over_all_devices(gather_policy):
  def waits(share):
    sizes = dataclasses.replace(SIZES, all_reduced_of_kernels=share)
    return of(gather_policy=gather_policy, sizes=sizes, in_steps=share).parts["transfers"]

  assert waits(1.0) > waits(0.5) > waits(0.0)


def test_a_window_gathers_on_sparsecores_along_one_axis_of_the_torus_after_another():
  def links(topology, devices, group=None, **work):
    sizes = dataclasses.replace(SIZES, groups=((1.0, group or devices),))
    each = of(topology, devices=devices, sizes=sizes, gather_policy=GatherPolicy.REPEAT, **work)
    return each.beside["links"] + each.parts["transfers"]

  longer = lambda *where, **work: links(*where, on_sparsecores=True, **work) / links(*where)
  assert longer("v6e", 64) > 1.2  # 8 × 8; gradients take as long as they did
  assert longer("v6e", 32) == longer("v6e", 128, 16) == 1.0  # along one ring through all, and along one axis
  assert longer("v6e", 128, rings_last=0.0) > longer("v6e", 128, rings_last=0.5) > longer("v6e", 128, rings_last=1.0)


@pytest.mark.parametrize("gather_policy", GatherPolicy)
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_one_chip_waits_for_nothing(chip, gather_policy):
  sizes = dataclasses.replace(SIZES, groups=(), sent_to_gather=0, sent_to_reduce=0)
  assert math.isfinite(of(chip, devices=1, sizes=sizes, gather_policy=gather_policy, on_sparsecores=True).seconds)


def test_weights_are_gathered_beside_compute_on_sparsecores_if_the_pipeline_prefetches():
  waiting = {
      gather_policy: of(on_sparsecores=True, gather_policy=gather_policy).parts["transfers"]
      for gather_policy in GatherPolicy
  }
  assert waiting[GatherPolicy.REPEAT] < waiting[GatherPolicy.ONCE] < waiting[GatherPolicy.ITERATION]
  assert of(on_sparsecores=True).beside["links"] > 0 and of("v6e").beside["links"] == 0
  # More than the pipeline computes does not hide.
  slow = of("v6e", on_sparsecores=True, sizes=dataclasses.replace(SIZES, sent_to_gather=10**11))
  assert slow.seconds == pytest.approx(sum(slow.parts.values()) + slow.beside["links"] - slow.pipeline)


def test_maxtexts_own_loop_gathers_beside_compute_on_v5e_within_a_slice():
  none = {"schedule": OWN_LOOP, "gather_policy": None}
  assert of("v5e", **none).beside["links"] > 0 == of("v6e", **none).beside["links"]
  sizes = dataclasses.replace(SIZES, between_slices=(10**8, 0, 0))
  over_slices = of("v5e", **none, sizes=sizes)
  assert over_slices.beside["network"] == 0 < over_slices.parts["transfers"]


@pytest.mark.parametrize(
    "loop, share, name",
    [({"schedule": OWN_LOOP, "gather_policy": None}, 0.35, "_AHEAD_IN_OWN_LOOP"), ({}, 0.8, "_AHEAD")],
)
def test_compute_hides_a_share_of_the_gathers_on_v5e(loop, share, name, monkeypatch):
  hidden = lambda: of("v5e", **loop).beside["links"]
  before = hidden()
  monkeypatch.setattr(estimate, name, 1.0)
  assert before == pytest.approx(share * hidden())


def test_what_two_devices_gather_they_exchange_beside_compute_but_not_over_the_network():
  waits = lambda share, **more: of(permuted=share, **more).parts["transfers"]
  assert waits(1.0) < waits(0.5) < waits(0.0)
  assert waits(1.0) < waits(0.0, on_sparsecores=True) < waits(0.5)  # along one axis after another
  assert of(permuted=1.0).beside["links"] > 0.0 == of(permuted=0.0).beside["links"]
  sizes = dataclasses.replace(SIZES, between_slices=(0, 10**8, 0))
  assert of(sizes=sizes, permuted=1.0).beside["network"] == 0.0


@pytest.mark.parametrize(
    "loop",
    [
        {"schedule": OWN_LOOP, "gather_policy": None},
        {"schedule": dataclasses.replace(SCHEDULE, stages=1, microbatches=1)},
    ],
)
def test_sums_over_slices_hide_behind_backward_unless_slices_share_weights(loop):
  of_slices = lambda gathered, summed: of(
      "v6e", **loop, sizes=dataclasses.replace(SIZES, between_slices=(gathered, summed, 0))
  )
  much = of_slices(0, 10**12)
  assert 0 < much.beside["network"] < much.pipeline
  assert of_slices(0, 10**12 + 10**9).beside["network"] == much.beside["network"]
  assert of_slices(1, 10**12).beside["network"] == pytest.approx(0.0, abs=1e-6)


def test_activations_are_waited_for_unless_they_have_an_iteration_of_their_own_or_backward_hides_cotangents():
  by_delay = lambda over_slices: (
      of("v6e", schedule=dataclasses.replace(SCHEDULE, delay=delay, over_slices=over_slices)) for delay in (1, 2)
  )
  at_once, delayed = by_delay(True)
  assert 0 < at_once.beside["network"] < delayed.beside["network"]
  assert delayed.parts["transfers"] < at_once.parts["transfers"]
  at_once, delayed = by_delay(False)
  assert at_once.beside["links to the next stage"] == 0 < delayed.beside["links to the next stage"]


def test_weights_that_each_iteration_gathers_are_copied_with_several_microbatches():
  copied = lambda microbatches: of(
      gather_policy=GatherPolicy.ITERATION, schedule=dataclasses.replace(SCHEDULE, microbatches=microbatches, stages=1)
  ).parts["copies of weights"]
  assert copied(2) > 2 * copied(1)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("repeats", [1, SCHEDULE.repeats])
def test_shards_are_cast_and_with_several_microbatches_chunks_are_copied_and_sums_are_cut_out(
    stages, microbatches, repeats
):
  schedule = dataclasses.replace(SCHEDULE, stages=stages, microbatches=microbatches, repeats=repeats)
  gathered, chip = costs.gathers(schedule, GatherPolicy.REPEAT), chips.CHIPS["v5p"]
  copied, chunks = SIZES.cast * gathered, 0.0
  if microbatches > 1:
    copied += SIZES.values * costs.reductions(schedule, GatherPolicy.REPEAT)
    chunks = SIZES.gathered * (gathered - 1)  # the first repeat is gathered whole
  # Each value, or byte, is read and written.
  expected = 2 * 4 * copied / chip.elementwise + 2 * chunks / chip.hbm_bandwidth
  assert of(schedule=schedule).parts["copies of weights"] == pytest.approx(expected)


def test_activations_go_around_the_ring_unless_there_is_one_stage_and_one_microbatch():
  def ring(**sizes):
    schedule = dataclasses.replace(SCHEDULE, **sizes)
    size = SIZES.activations
    longer = of(schedule=schedule, activations=2 * size).parts["elementwise"] - of(schedule=schedule).parts["elementwise"]
    return longer * chips.CHIPS["v5p"].elementwise / (4 * size / 2 * schedule.iterations)

  assert ring(stages=1, microbatches=1) == 0.0
  assert ring(stages=1, microbatches=2) == pytest.approx(ring(stages=2, microbatches=2)) == pytest.approx(3)


@pytest.mark.parametrize("schedule", [OWN_LOOP, SCHEDULE, dataclasses.replace(SCHEDULE, stages=1, microbatches=1)])
def test_what_is_gathered_in_other_lanes_than_kernels_read_is_transposed(schedule):
  sent = costs.pipelined(SCHEDULE, GatherPolicy.REPEAT, SIZES)
  copied = lambda size: estimate.estimate(
      chips.CHIPS["v5p"],
      topology.slice_of("v5p", 64),
      work_with(transposed=size),
      sent,
      schedule,
      None if schedule is OWN_LOOP else GatherPolicy.REPEAT,
  ).parts["copies of weights"]
  times = 3 * OWN_LOOP.repeats
  if schedule is not OWN_LOOP:
    times = costs.gathers(schedule, GatherPolicy.REPEAT) + costs.reductions(schedule, GatherPolicy.REPEAT)
  expected = estimate._TRANSPOSE_ROUND_TRIPS * times * 1e8 / chips.CHIPS["v5p"].hbm_bandwidth
  assert copied(1e8) - copied(0.0) == pytest.approx(expected)


def test_kernels_read_copies_of_weights_that_are_all_gathered_at_once():
  copied = lambda gather_policy, size: of(gather_policy=gather_policy, gathered_of_kernels=size).parts[
      "copies of weights"
  ]
  of_kernels = lambda size: copied(GatherPolicy.ONCE, size) - copied(GatherPolicy.ONCE, 0.0)
  assert 0.0 < of_kernels(1e8) == pytest.approx(2 * of_kernels(5e7))
  assert copied(GatherPolicy.REPEAT, 1e8) == copied(GatherPolicy.REPEAT, 0.0)


def test_what_travels_within_products_does_not_travel_beside_them():
  each = CollectiveMatmul(count=6e9, along=4096, others=14336.0, devices=32, hops=7, tokens=4096.0, itemsize=2)
  chip, its_slice = chips.CHIPS["v5p"], topology.slice_of("v5p", 32)

  def of_sizes(sizes, flag=None):
    work = work_with(sizes, vmem_kib=flag)
    return estimate.estimate(chip, its_slice, work, costs.without(32, sizes), OWN_LOOP, None)

  sizes = dataclasses.replace(SIZES, groups=((1.0, 32),), sent_to_gather_again=SIZES.sent_to_gather)
  within, beside = of_sizes(dataclasses.replace(sizes, collective_matmuls=(each,))), of_sizes(sizes)
  longer, waits, hidden = each.seconds(chip, chip.vmem_bytes, chip.over_peak)
  assert within.parts["products"] - beside.parts["products"] == pytest.approx(longer) and longer > 0
  # Of gathers two, and of reductions one; what backward computes again is gathered as before.
  rate = estimate._links(its_slice, sizes, its_slice.links_of) * estimate._link(chip)
  assert 3 * each.sent < 32 * (2 * sizes.sent_to_gather + sizes.sent_to_reduce)
  assert within.parts["transfers"] - beside.parts["transfers"] == pytest.approx(waits - 3 * each.sent / rate)
  assert within.beside["collective matmuls"] == pytest.approx(hidden) and within.seconds <= within.at_most
  # What a flag gives to products is not left to arrays, nor is less than nothing.
  all_to_products = of_sizes(dataclasses.replace(sizes, collective_matmuls=(each,)), flag=1 << 20)
  assert all_to_products.parts["products"] - of_sizes(sizes, flag=1 << 20).parts["products"] == pytest.approx(
      each.seconds(chip, 0.0, chip.over_peak_with_vmem)[0]
  )
