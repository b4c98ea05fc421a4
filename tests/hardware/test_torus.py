# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The torus of each slice that MaxText's table of topologies has, and which of its axes are closed."""

import functools
import math
import subprocess
import sys

from maxtext.utils.accelerator_to_spec_map import UserFacingNameToSystemCharacteristics as TABLE
import pytest

from maxtext_pp_ext.compiled.projection import torus
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.hardware.torus import closed as closed_axes
from maxtext_pp_ext.hardware.torus import is_one_ring
from maxtext_pp_ext.host import topology

TPUS = {name: each for name, each in TABLE.items() if each.platform == "tpu"}


def lengths_of(name):
  return tuple(int(length) for length in TPUS[name].topology_name.split(":")[1].split("x"))


def closed_in_projections(lengths, dimensions):
  """Along which axes a projection sends from one end to the other by the link that closes the ring."""
  ends = [tuple((length - 1) * (axis == along) for axis, length in enumerate(lengths)) for along in range(len(lengths))]
  devices = [torus.Device(slice=0, at=at) for at in ((0,) * len(lengths), *ends)]
  grid = torus.Torus(devices, link=1.0, network=1.0, dimensions=dimensions)
  hops = [grid.permute([(0, end)]).hops for end in range(1, len(devices))]
  return tuple(length > 2 and count == 1 for length, count in zip(lengths, hops, strict=True))


def test_each_slice_of_maxtexts_table_has_the_chips_and_the_closed_axes_of_the_table():
  found, expected, projected = {}, {}, {}
  for name, each in TPUS.items():
    lengths, kind = lengths_of(name), name.partition("-")[0]
    cores = 2 if kind == "tpu7x" else 1
    its_slice = topology.slice_of(kind, math.prod(lengths) * cores)
    closed = each.wrap[: len(lengths)]
    expected[name] = (name, lengths, cores, closed)
    found[name] = (its_slice.name, its_slice.lengths, its_slice.cores, closed_axes(its_slice.lengths))
    projected[name] = (name, lengths, cores, closed_in_projections(lengths, chips.CHIPS[kind].links // 2))
  assert found == expected and projected == expected and len(found) > 100


@pytest.mark.parametrize(
    "kind, devices, nearest",
    [("v5p", 6, ["v5p-8", "v5p-16"]), ("v5e", 512, ["v5e-256"]), ("v6e", 2, ["v6e-1", "v6e-4"])],
)
def test_there_is_no_slice_that_the_table_does_not_have_but_those_next_to_it(kind, devices, nearest):
  assert topology.slice_of(kind, devices) is None and topology.nearest(kind, devices) == nearest


@pytest.mark.parametrize(
    "kind, devices, group, links",
    [
        ("v5p", 192, 16, 4),  # 4 × 4 × 12: two closed axes
        ("v5p", 192, 12, 2),
        ("v5p", 192, 48, 4),
        ("v5p", 32, 8, 2),  # 2 × 4 × 4: two open ones
        ("v6e", 128, 16, 2),  # 8 × 16
        ("v6e", 128, 8, 1),
        ("v6e", 256, 256, 4),
        ("tpu7x", 128, 2, math.inf),  # the two devices of a chip
        ("tpu7x", 128, 8, 2),  # chips along one axis of 4 × 4 × 4
        ("v6e", 64, 8 * math.sqrt(8), 1.5),  # three quarters of two axes
    ],
)
def test_a_group_gathers_over_the_links_of_the_axes_that_it_spans_or_a_share_by_logarithms(kind, devices, group, links):
  assert topology.slice_of(kind, devices).links_of(group) == pytest.approx(links)


@pytest.mark.parametrize(
    "kind, devices, group, links",
    [
        ("v5p", 256, 256, 2),  # 4 × 8 × 8: rings
        ("v5p", 32, 32, 1),  # 2 × 4 × 4: lines
        ("v6e", 128, 128, 127 / (7 + 8 * 15 / 2)),  # over 8 chips in a line, then over a ring of 16
        ("v6e", 128, 16, 2),
        ("v6e", 32, 32, 2),  # 4 × 8: along one ring
        ("v6e", 64, 64, 1),
        ("v6e", 16, 16, 2),  # 4 × 4
        ("v6e", 16, 4, 1),
        ("tpu7x", 128, 2, math.inf),
        ("v6e", 128, 32, 2),
    ],
)
def test_in_steps_a_group_gathers_over_the_links_of_one_axis_at_a_time(kind, devices, group, links):
  assert topology.slice_of(kind, devices).links_in_steps(group) == pytest.approx(links)


def test_what_goes_over_the_minor_axis_first_takes_longer_where_this_is_the_ring():
  links = functools.partial(topology.slice_of("v6e", 128).links_in_steps, 128)
  assert links(0.0) == pytest.approx(127 / (15 / 2 + 16 * 7))
  assert 2 / links(0.5) == pytest.approx(1 / links(0.0) + 1 / links(1.0))
  assert topology.slice_of("v6e", 256).links_in_steps(256, 0.0) == 2


@pytest.mark.parametrize(
    "kind, devices, longer",
    [("v6e", 128, 3 * (15 / 2 + 16 * 7) / 127), ("v6e", 64, 2), ("v6e", 256, 2), ("v5p", 256, 2), ("v6e", 1, 2)],
)
def test_in_two_steps_all_devices_scatter_over_half_of_the_links_or_over_the_major_axis_first(kind, devices, longer):
  assert topology.slice_of(kind, devices).slower_in_two_steps == pytest.approx(longer)


def test_arithmetic_imports_neither_jax_nor_what_reads_configs():
  modules = "maxtext_pp_ext.hardware.chips, maxtext_pp_ext.plan.estimate, maxtext_pp_ext.compiled.projection.timeline"
  code = f"import sys, {modules}; print([name for name in ('jax', 'pydantic', 'maxtext') if name in sys.modules])"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
  assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "lengths, expected",
    [
        ((2, 4), True),
        ((8, 4, 1), True),
        ((8, 16), False),
        ((4, 4), False),
        ((2, 2, 1), False),
        ((2, 2, 4), False),
        ((8, 1), False),
        ((), False),
    ],
)
def test_one_ring_goes_through_the_chips_of_a_rectangle_that_is_no_square_and_has_no_closed_axis(lengths, expected):
  assert is_one_ring(lengths) is expected


@pytest.mark.parametrize(
    "kind, devices, hops", [("v6e", 32, 3 + 7), ("v6e", 256, 2), ("v5p", 64, 3), ("v5p", 32, 1 + 3 + 3)]
)
def test_the_way_from_the_last_chip_to_the_first(kind, devices, hops):
  assert topology.slice_of(kind, devices).hops == hops
