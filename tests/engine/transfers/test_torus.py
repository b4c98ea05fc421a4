# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gathers in steps: the steps follow the torus' axes, and together they gather what one gather does."""

import dataclasses
import functools
import itertools
import math
import types
from unittest import mock

import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.config.derived import gathers_on_sparsecores
from maxtext_pp_ext.engine.transfers import torus, transfer
from maxtext_pp_ext.engine.transfers.torus import groups, sizes_along, slices_along, steps_of
from maxtext_pp_ext.engine.weights import layout, of_all
from maxtext_pp_ext.engine.weights.layout import WeightLayout
from maxtext_pp_ext.engine.weights.of_all import weights_of
from maxtext_pp_ext.hardware import torus as hardware_torus
from maxtext_pp_ext.hardware.torus import is_one_ring
from maxtext_pp_ext.host import topology
from maxtext_pp_ext.schedule import GatherPolicy
from maxtext_pp_ext.sharding import constrain

F32 = jnp.dtype(jnp.float32)
OFFLOADED = "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true"


@pytest.mark.parametrize("torus", [(4, 4, 8), (4, 1, 8), (2, 2), (8,), (2, 3, 1)])
def test_there_is_a_step_for_each_axis_of_the_torus(torus):
  line = list(itertools.product(*map(range, torus)))
  assert sizes_along(line) == (tuple(n for n in torus if n > 1) or (1,))
  backwards = list(itertools.product(*(range(n)[::-1] for n in torus)))
  assert sizes_along(backwards) == sizes_along(line)


@pytest.mark.parametrize(
    "line",
    [
        [(0, 0)],
        [(0,), (0,), (1,), (1,)],  # two cores of a chip
        [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1), (2, 2)],  # rows of different lengths
        [(0, 0), (0, 1), (1, 0), (5, 7)],
    ],
)
def test_a_line_that_is_no_box_is_one_step(line):
  assert sizes_along(line) == (len(line),)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2, 2), (8,)])
def test_each_device_is_in_one_group_of_each_step_and_steps_from_minor_to_major_reach_all_in_order(sizes):
  reached = {device: [device] for device in range(math.prod(sizes))}
  for step in reversed(groups(sizes)):
    assert sorted(itertools.chain(*step)) == list(range(math.prod(sizes)))
    group_of = {device: group for group in step for device in group}
    reached = {device: [x for other in group_of[device] for x in reached[other]] for device in reached}
  assert all(all_ == sorted(reached) for all_ in reached.values())


def test_axes_over_slices_and_devices_without_a_torus_have_no_steps():
  assert steps_of(Mesh(np.array(jax.devices()).reshape(2, -1), ("stage", "a"))) == ()
  assert steps_of(AbstractMesh((2, 4), ("stage", "a"))) == ()
  chips = [
      types.SimpleNamespace(coords=(x, y, 0), slice_index=number) for number in (0, 1) for x in (0, 1) for y in (0, 1, 2)
  ]
  array = np.empty(len(chips), object)
  array[:] = chips
  mesh = types.SimpleNamespace(devices=array.reshape(2, 1, 6), axis_names=("data", "stage", "fsdp"))
  assert [torus._line(mesh, axis) for axis in ("data", "stage")] == [[], [(0, 0, 0)]]
  assert sizes_along(torus._line(mesh, "fsdp")) == (2, 3)


@pytest.mark.parametrize(
    ("numbers", "slices"), [([0, 0, 1, 1], 2), ([0, 1, 0, 1], 1), ([3, 3, 3, 3], 1), ([0, 0, 0, 1], 1)]
)
def test_an_axis_goes_over_slices_one_after_another_or_they_do_not_count(numbers, slices):
  mesh = mock.create_autospec(Mesh, instance=True)
  mesh.devices = np.array([[types.SimpleNamespace(slice_index=number)] for number in numbers])
  mesh.axis_names = ("fsdp", "tensor")
  assert [slices_along(mesh, axis) for axis in mesh.axis_names] == [slices, 1]
  assert slices_along(AbstractMesh((4, 1), ("fsdp", "tensor")), "fsdp") == 1


STEPS = {
    "two steps": (("a", (2, 2)), ("b", (2,))),
    "each axis of the mesh along one of the torus": (("a", (4,)), ("b", (2,))),
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    "shape, spec, count",
    [
        ((16, 5), P(None, ("a", "b"), None), [3, 2]),
        ((16, 5), P(None, ("b", "a"), None), [3, 2]),
        ((6, 24), P(None, "b", "a"), [3, 2]),
        ((16,), P(None, "a"), [2, 1]),
    ],
)
def test_a_repeat_gathered_in_steps_is_the_repeat(monkeypatch, shape, spec, count, chunks, steps):
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 2), ("stage", "a", "b"))
  params = constrain(jax.random.normal(jax.random.key(0), (3, 1, *shape)), P(None, *spec), mesh)
  of_steps = WeightLayout(
      sharded=spec,
      gathered=P(*(None for _ in spec)),
      partial_axes=("a", "b"),
      compute_dtype=F32,
      accumulation_dtype=F32,
      steps=steps,
  )
  weight = weights_of([of_steps], [params], mesh, GatherPolicy.REPEAT, chunks)[0]
  at, following = jnp.array([1]), jnp.array([2])

  def prefetch(params):
    weights = [weight.load(params).first().open(0)]
    for k in range(chunks):
      chunk = jnp.array([k])
      weights = of_all.place(of_all.gather(weights, following, chunk), at, chunk)
    return of_all.use(weights, following)[0]

  # As many transfers as there are steps; without steps, which a small weight is not worth, one for each dimension.
  def counted():
    program = jax.jit(lambda x: prefetch(x)).lower(params).as_text()
    return sum(program.count(f"stablehlo.{kind}") for kind in ("all_gather", "collective_permute")) / chunks

  at_once = sum(entry is not None for entry in spec)
  assert counted() == at_once
  monkeypatch.setattr(transfer, "_least_in_steps", lambda chunks: 0)
  assert counted() == count[list(STEPS.values()).index(steps)]
  np.testing.assert_array_equal(jax.jit(lambda x: prefetch(x))(params), params[2])


def test_the_lengths_of_a_torus_are_those_of_its_devices():
  assert torus.lengths(Mesh(np.array(jax.devices()).reshape(2, -1), ("stage", "a"))) == []
  assert torus.lengths(AbstractMesh((2, 4), ("stage", "a"))) == []
  assert torus.lengths(mesh_of_chips((4, 8), slices=1)) == [4, 8, 1]
  assert torus.lengths(mesh_of_chips((4, 8), slices=2)) == []


def mesh_of_chips(lengths, slices, sizes=None, third=(0,)):
  """A mesh of TPUs that are not there; its axes are "data" and "fsdp" if no sizes are given."""
  chips = np.empty((slices, math.prod(lengths)), object)
  for number in range(slices):
    for k, at in enumerate(itertools.product(*map(range, lengths))):
      chips[number, k] = types.SimpleNamespace(coords=(*at, *third), slice_index=number)
  mesh = object.__new__(Mesh)
  object.__setattr__(mesh, "devices", chips.reshape(sizes or chips.shape))
  object.__setattr__(mesh, "axis_names", ("data", "fsdp", "tensor")[: mesh.devices.ndim])
  return mesh


RING = {
    "all chips": ((8, 16), 1, None, ("fsdp",)),
    "on each of two slices": ((8, 16), 2, None, ("fsdp",)),
    "of a part of the lines": ((8, 16), 1, (4, 32), ("fsdp",)),
    "of a part of the rings": ((8, 16), 1, (1, 32, 4), ()),  # 8 × 4 chips
    "one axis each": ((8, 16), 1, (8, 16), ()),
    "the ring is the major one": ((16, 8), 1, None, ()),
    "two rings": ((16, 16), 1, None, ()),
    "a line and a ring of three axes": ((2, 8, 16), 1, (2, 128), ()),
    "no ring": ((4, 8), 1, None, ()),
}


@pytest.mark.parametrize("chips, slices, sizes, found", RING.values(), ids=RING.keys())
def test_an_axis_along_a_line_and_a_ring_is_found_where_the_ring_is_minor(chips, slices, sizes, found):
  assert torus.rings(mesh_of_chips(chips, slices, sizes)) == found


@pytest.mark.parametrize(
    "name, kind", [("v5e", "TPU v5 lite"), ("v6e", "TPU v6 lite"), ("v5p", "TPU v5"), ("tpu7x", "TPU7x")]
)
@pytest.mark.parametrize("devices", [2**k for k in range(2, 9)])
def test_all_devices_of_a_slice_have_one_step_where_plan_says_so(name, kind, devices):
  if (its_slice := topology.slice_of(name, devices)) is None:
    pytest.skip("MaxText has no such slice.")
  # As JAX lists devices: along the first axis first.
  places = (
      (*at[::-1], core) for *at, core in itertools.product(*map(range, (*its_slice.lengths[::-1], its_slice.cores)))
  )
  chip = functools.partial(types.SimpleNamespace, platform="tpu", device_kind=kind, process_index=0, slice_index=0)
  given = [chip(coords=(*at, 0)[:3], core_on_chip=core, id=k) for k, (*at, core) in enumerate(places)]
  ordered = mesh_utils.create_device_mesh((devices,), given, allow_split_physical_axes=True)
  has_one = len(sizes_along([each.coords for each in ordered])) == 1
  assert has_one == ((its_slice.lengths, its_slice.cores) in hardware_torus._NO_BOX) or is_one_ring(its_slice.lengths)


def test_devices_without_a_torus_have_no_rings():
  assert torus.rings(Mesh(np.array(jax.devices()).reshape(2, -1), ("stage", "a"))) == ()
  assert torus.rings(AbstractMesh((2, 4), ("stage", "a"))) == ()
  assert torus.rings(mesh_of_chips((4, 4, 8), 1, (4, 32), third=())) == ()  # all are rings
  assert torus.rings(mesh_of_chips((1, 1), 1)) == ()


def test_the_two_devices_of_a_chip_are_no_ring():
  mesh = mesh_of_chips((8, 16), 1)
  object.__setattr__(mesh, "devices", np.repeat(mesh.devices, 2, axis=1))
  assert torus.steps_of(mesh) == (("data", (1,)), ("fsdp", (8, 32))) and torus.rings(mesh) == ()


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_along_a_line_and_a_ring_most_of_a_weight_is_sent_along_the_ring(monkeypatch, dim, chunks):
  monkeypatch.setattr(layout, "rings", lambda mesh: ("a", "b"))
  monkeypatch.setattr(transfer, "_least_in_steps", lambda chunks: 0)
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 8), ("stage", "a"))
  spec = [None, None]
  spec[dim] = "a"
  of_steps = WeightLayout(
      sharded=P(None, *spec),
      gathered=P(None, None, None),
      partial_axes=("a",),
      compute_dtype=F32,
      accumulation_dtype=F32,
      steps=(("stage", (1,)), ("a", (2, 4))),
  )
  of = of_steps.transfer(mesh, (2, 1, 48, 48), chunks)
  assert of.rings == ("a",) and of.in_steps and of.scatters_in_steps
  x = jax.random.normal(jax.random.key(0), (2, 48, 48))
  summands = jax.random.normal(jax.random.key(1), (8, 48, 48))

  def transferred(x, summand):
    first, buffers, stored = jnp.array(0), jnp.zeros((1, 1, 48, 48)), jnp.zeros((1, *of.shard))
    for k in range(chunks):
      chunk = jnp.array(k)
      buffers = of.place(of.gather(x, jnp.array(1), chunk, F32), buffers, first, chunk)
      part = of.scatter(of.cut_out(summand[None], first, chunk)[0], ("a",))
      stored = of.put(part, stored, first, chunk)
    return buffers[0, 0], stored[0]

  run = jax.shard_map(
      transferred, mesh=mesh, in_specs=(P(None, *spec), P("a")), out_specs=(P(), P(*spec)), check_vma=False
  )
  gathered, scattered = jax.jit(run)(x, summands)
  np.testing.assert_array_equal(gathered, x[1])
  np.testing.assert_allclose(scattered, summands.sum(0), rtol=1e-5, atol=1e-5)
  (inner,) = [eqn.params["jaxpr"] for eqn in jax.make_jaxpr(run)(x, summands).eqns]
  steps = [
      (e.primitive.name, list(e.params["axis_index_groups"][0]), e.invars[0].aval.size)
      for e in inner.eqns
      if "axis_index_groups" in e.params
  ]
  line, ring, own = [0, 4], [0, 1, 2, 3], 48 * 48 // 8 // chunks
  gathers = [("all_gather", line, own), ("all_gather", ring, 2 * own)]
  if dim:  # the compiler would copy what it gathered
    gathers = [("all_gather", ring, own), ("all_gather", line, 4 * own)]
  scatters = [("reduce_scatter", line, 8 * own), ("reduce_scatter", ring, 4 * own)]
  assert steps == [*gathers, *scatters] * chunks


@pytest.mark.parametrize(
    "chips, rows, along_ring, scatters_in_steps",
    [
        ([4, 8], 2**14, True, False),  # shards of 1 MiB
        ([4, 8], 2**13, False, False),
        ([8, 8], 2**14, False, True),
        ([], 2**14, False, True),
    ],
)
def test_all_devices_along_one_ring_gather_and_add_up_in_one_step(
    monkeypatch, chips, rows, along_ring, scatters_in_steps
):
  monkeypatch.setattr(layout, "lengths", lambda mesh: chips)
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 8), ("stage", "a"))
  of_steps = WeightLayout(
      sharded=P(None, "a", None),
      gathered=P(None, None, None),
      partial_axes=("a",),
      compute_dtype=F32,
      accumulation_dtype=F32,
      steps=(("stage", (1,)), ("a", (2, 4))),
  )
  of = of_steps.transfer(mesh, (3, 1, rows, 128), 1)
  assert (of.along_ring, of.scatters_in_steps) == (along_ring, scatters_in_steps)
  x = jnp.arange(rows * 128, dtype=F32).reshape(1, rows, 128)
  program = jax.jit(
      jax.shard_map(
          lambda x: of.gather(x, jnp.array(0), jnp.array(0), F32),
          mesh=mesh,
          in_specs=P(None, "a"),
          out_specs=P(),
          check_vma=False,
      )
  )
  assert program.lower(x).as_text().count("stablehlo.all_gather") == (1 if along_ring else 2)
  np.testing.assert_array_equal(program(x), x[0])
  # Where a part of the devices holds a weight, no ring is known.
  part = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("stage", "a"))
  of = dataclasses.replace(of_steps, steps=(("a", (2, 2)),)).transfer(part, (3, 2, rows, 128), 1)
  assert (of.along_ring, of.scatters_in_steps) == (False, False)


def test_a_smaller_weight_is_gathered_in_steps_if_it_comes_in_one_chunk():
  of = lambda chunks: transfer.Transfer(
      axes=(("fsdp",), ()), shard=(2**19, 1), chunks=chunks, devices=(8, 1), steps=(("fsdp", (2, 4)),)
  )
  assert of(1).in_steps and not of(2).in_steps
  assert of(1).on_sparsecores and of(2).on_sparsecores


@pytest.mark.parametrize(
    "axes, steps", [((("fsdp",), ()), ()), (((), ()), (("fsdp", (8,)),)), ((("data",),), (("fsdp", (8,)),))]
)
def test_a_weight_is_not_on_the_sparsecores_if_no_steps_of_its_axes_are_known(axes, steps):
  of = transfer.Transfer(axes=axes, shard=(2**19, 1)[: len(axes)], chunks=1, devices=(8, 1)[: len(axes)], steps=steps)
  assert not of.on_sparsecores and not of.in_steps


def test_the_last_flag_of_the_process_and_the_config_decides_whether_gathers_run_on_sparsecores(monkeypatch):
  def offloaded(process, config):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", process)
    return gathers_on_sparsecores(types.SimpleNamespace(compile_xla_flags=config))

  assert offloaded("", OFFLOADED) and offloaded(f"--xla_a=1 {OFFLOADED}", "") and offloaded(OFFLOADED, None)
  assert not offloaded("", "") and not offloaded(OFFLOADED, OFFLOADED.replace("true", "false"))
