# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Routes over a torus: arithmetic, no devices."""

import itertools

import pytest

from maxtext_pp_ext.compiled.projection import torus


def grid(*shape, slices=1, dimensions=None):
  at = [(number, *place) for number in range(slices) for place in itertools.product(*map(range, shape))]
  devices = [torus.Device(slice=place[0], at=place[1:]) for place in at]
  return torus.Torus(devices, link=1.0, network=0.1, dimensions=dimensions or len(shape))


def test_a_ring_gathers_over_two_links_and_a_line_over_one():
  assert grid(4, 4, 4).route(range(4)) == torus.Route(lanes=("z+", "z-"), rate=2.0, hops=1)
  assert grid(2, 2, 4).route(range(4)) == torus.Route(lanes=("z+", "z-"), rate=1.0, hops=3)


def test_a_group_over_several_axes_uses_the_links_of_all_of_them():
  assert grid(4, 4, 4).route(range(64)).rate == 6.0
  assert grid(2, 2, 4).route(range(16)) == torus.Route(lanes=("x+", "x-", "y+", "y-", "z+", "z-"), rate=3.0, hops=5)


def test_groups_of_every_second_chip_share_the_links_between_them():
  assert grid(4, 4, 8).route([0, 2, 4, 6]).rate == 1.0


def test_part_of_a_ring_is_a_line():
  assert grid(4, 4, 8).route(range(4)).rate == 1.0


@pytest.mark.parametrize("length, rate", [(16, 2.0), (8, 1.0)])
def test_in_two_dimensions_only_axes_of_sixteen_chips_are_rings(length, rate):
  assert grid(4, length).route(range(length)).rate == rate


def test_between_slices_everything_goes_over_the_network():
  assert grid(2, 2, slices=2).route([0, 4]) == torus.Route(lanes=(torus.DCN,), rate=0.1, hops=1)
  assert grid(2, 2, slices=2).permute([(0, 4), (4, 0)]).lanes == (torus.DCN,)


def test_a_shift_by_one_along_a_ring_has_each_link_for_itself():
  ring = [(i, (i + 1) % 4) for i in range(4)]
  assert grid(4, 4, 4).permute(ring) == torus.Route(lanes=("z+",), rate=1.0, hops=1)


def test_the_way_back_along_a_line_goes_in_the_other_direction():
  ring = [(i, (i + 1) % 4) for i in range(4)]
  assert grid(2, 2, 4).permute(ring) == torus.Route(lanes=("z+", "z-"), rate=1.0, hops=3)


def test_shifts_by_two_share_links():
  assert grid(4, 4, 8).permute([(i, (i + 2) % 8) for i in range(8)]).rate == 0.5


def test_nothing_is_sent_from_a_chip_to_itself():
  assert grid(4, 4, 4).permute([(0, 0)]).lanes == ()


def test_mesh_axes_of_a_group_are_those_along_which_its_partitions_differ():
  mesh = {"data": 2, "stage": 4, "fsdp": 8}
  assert torus.axes_of_groups(range(8), mesh) == ("fsdp",)
  assert torus.axes_of_groups([0, 8, 16, 24], mesh) == ("stage",)
  assert torus.axes_of_groups([0, 1, 32, 33], mesh) == ("data", "fsdp")


@pytest.mark.parametrize(
    "shape, members, rate",
    [
        ((2, 2, 2), [0, 1], 1.0),  # each sends half of its array over the one link
        ((2, 2, 4), [0, 1, 2, 3], 3 / 4),  # of 3/4 of four arrays, one array's worth crosses the middle
        ((4, 4, 4), [0, 1, 2, 3], 3 / 2),
        ((2, 2, 2), list(range(8)), 7 / 4),
    ],
)
def test_an_all_to_all_is_as_fast_as_the_middle_of_its_slowest_axis(shape, members, rate):
  assert grid(*shape).all_to_all_rate(members) == pytest.approx(rate)
