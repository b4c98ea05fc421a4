# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a pipeline's activations move, and how their buffers and those of residuals are laid out."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.engine import ring as ring_module
from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.schedule import CircularSchedule
from maxtext_pp_ext.schedule.moves import numbers
from tests.marks import slow_but

ITERATIONS, DEVICES = 5, 4


def laid_out(stages, devices_axis):
  """The shape that each device has of a buffer [T, stages or devices, 3]."""
  mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(stages, -1), ("stage", "fsdp"))
  schedule = CircularSchedule(stages=stages, microbatches=4, repeats=1)
  ring = Ring(schedule=schedule, mesh=mesh, activation_spec=P("fsdp"))
  axes, size = (("stage", "fsdp"), DEVICES) if devices_axis else (None, stages)
  buffer = jax.device_put(jnp.zeros((ITERATIONS, size, 3)), NamedSharding(mesh, P(None, axes)))
  result = jax.jit(ring.constrain_iterations)(buffer)
  return result.sharding.shard_shape(result.shape)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("devices_axis", [False, True], ids=["stages", "devices"])
def test_a_residual_lies_on_the_devices_that_computed_it(stages, devices_axis):
  """A kernel's residual, such as the logarithms of attention's sums, has an axis of all devices: none holds it whole."""
  assert laid_out(stages, devices_axis) == (ITERATIONS, 1, 3)


def ring_of(stages, microbatches, repeats, delay, *, sharded, over_slices=False):
  mesh = Mesh(np.array(jax.devices()[: stages if sharded else 1]).reshape(-1, 1), ("stage", "fsdp"))
  schedule = CircularSchedule(
      stages=stages, microbatches=microbatches, repeats=repeats, delay=delay, over_slices=over_slices
  )
  return Ring(schedule=schedule, mesh=mesh, activation_spec=P("fsdp"), bubble_fill=float("nan"))


def factors(ring, t):
  """What the stages multiply by at iteration t, [S, 1, …], of each microbatch something else."""
  stages = jnp.arange(ring.schedule.stages)
  number = jnp.asarray(numbers(ring.schedule))[ring.schedule.microbatch(t, stages)]
  return (1.0 + (stages + number) % 3).reshape(-1, 1, 1, 1)


def forward(ring, inputs):
  store, held = ring.enter(inputs)
  for t in range(ring.schedule.iterations):
    y = ring.pass_on(t, store, factors(ring, t) * ring.read(t, store))
    leaving, held = (y, None) if held is None else (held, y)
    store = ring.write(t, ring.rotate(leaving), store)
  return ring.leave(store if held is None else ring.write(ring.schedule.iterations, ring.rotate(held), store))


def backward(ring, doutputs):
  (dstore, arrived), dheld = ring.leave_back(doutputs), None
  if ring.schedule.delay == 2:
    dheld = ring.rotate_back(ring.write_back(ring.schedule.iterations, dstore))
  for t in reversed(range(ring.schedule.iterations)):
    dleaving = ring.rotate_back(ring.write_back(t, dstore)) if arrived is None else arrived
    dy, dheld = (dleaving, None) if dheld is None else (dheld, dleaving)
    of_stages = jnp.where(ring.is_bubble(t, dy.ndim), jnp.nan, factors(ring, t) * dy)
    dstore = ring.read_back(t, ring.pass_on_back(t, dy, of_stages), dstore)
    arrived = ring.rotate_back(ring.write_back(t - 1, dstore)) if ring.sends_back_at_once else None
  return ring.enter_back(dstore, dheld)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
  """Slots that nothing has moved to are NaN."""
  monkeypatch.setattr(ring_module, "_unset", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


@pytest.mark.parametrize(
    "stages, sharded",
    slow_but(
        ["4 on devices", "one"],
        {"4 on devices": (4, True), "3 on one device": (3, False), "one": (1, False)},
        spread=True,
    ),
)
@pytest.mark.parametrize("repeats", slow_but([2], [1, 2]))
@pytest.mark.parametrize(
    "delay, times, over_slices",
    [
        pytest.param(1, 1, False, marks=pytest.mark.slow),
        (1, 3, False),
        (2, 1.5, False),
        (1, 1, True),
        pytest.param(1, 2, True, marks=pytest.mark.slow),
        (1, 3, True),
        (2, 1, True),
        (2, 1.5, True),
    ],
)
def test_each_microbatch_passes_all_stages_and_comes_back_to_its_place(
    stages, delay, times, repeats, sharded, over_slices
):
  """What stages compute in bubbles is NaN, of activations and of cotangents."""
  ring = ring_of(stages, int(times * delay * stages), repeats, delay, sharded=sharded, over_slices=over_slices)
  x = jnp.arange(1.0, 1.0 + 4 * ring.schedule.microbatches).reshape(-1, 2, 2, 1)
  stage, number = np.ogrid[:stages, : ring.schedule.microbatches]
  expected = x * np.prod(1.0 + (stage + number) % 3, axis=0).reshape(-1, 1, 1, 1) ** repeats
  np.testing.assert_array_equal(jax.jit(lambda x: forward(ring, x))(x), expected)
  np.testing.assert_array_equal(jax.jit(lambda x: backward(ring, x))(x), expected)


@pytest.mark.parametrize("delay, times, entering, leaving, back", [(1, 1, 0, 1, 1), (2, 1, 0, 1, 1), (1, 2, 3, 3, 4)])
def test_what_rides_in_bubbles_has_no_transfers_of_its_own(delay, times, entering, leaving, back):
  """With M = D·S inputs begin where they are, and outputs are one stage off. Others go to stage 0, and come from it."""
  ring = ring_of(4, times * delay * 4, 2, delay, sharded=True, over_slices=True)
  x = jnp.zeros((ring.schedule.microbatches, 2, 2, 1))
  store, held = jax.eval_shape(ring.enter, x)
  programs = [
      (entering, jax.make_jaxpr(ring.enter)(x)),
      (entering, jax.make_jaxpr(ring.enter_back)(store, held)),
      (leaving, jax.make_jaxpr(ring.leave)(store)),
      (back, jax.make_jaxpr(ring.leave_back)(x)),  # with D = 1 the rotation before is among them
  ]
  for count, program in programs:
    assert str(program).count("ppermute[") == count and "all_gather" not in str(program)


def test_within_a_slice_all_stages_gather_the_inputs_once_and_scatter_the_outputs_once():
  ring = ring_of(4, 8, 2, 1, sharded=True)
  x = jnp.zeros((ring.schedule.microbatches, 2, 2, 1))
  store, held = jax.eval_shape(ring.enter, x)
  programs = [(jax.make_jaxpr(each)(x), "all_gather") for each in (ring.enter, ring.leave_back)]
  back = lambda dstore: ring.enter_back(dstore, held)
  programs += [(jax.make_jaxpr(each)(store), "reduce_scatter") for each in (back, ring.leave)]
  for program, collective in programs:
    assert str(program).count(f"{collective}[") == 1 and "ppermute[" not in str(program)
