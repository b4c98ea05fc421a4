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
  schedule = CircularSchedule(stages=stages, microbatches=microbatches, repeats=repeats, delay=delay)
  return Ring(schedule=schedule, mesh=mesh, activation_spec=P("fsdp"), over_slices=over_slices, bubble_fill=float("nan"))


def forward(ring, factors, inputs):
  """Outputs of stages [S] that multiply by factors [S, 1, …]."""
  store, held = ring.enter(inputs)
  for t in range(ring.schedule.iterations):
    y = ring.pass_on(t, store, factors * ring.read(t, store))
    leaving, held = (y, None) if held is None else (held, y)
    store = ring.write(t, ring.rotate(leaving), store)
  return ring.leave(store if held is None else ring.write(ring.schedule.iterations, ring.rotate(held), store))


def backward(ring, factors, doutputs):
  dstore, in_transfer = ring.leave_back(doutputs)
  dheld, arrived = (in_transfer, None) if ring.schedule.delay == 2 else (None, in_transfer)
  for t in reversed(range(ring.schedule.iterations)):
    dleaving = ring.rotate_back(ring.write_back(t, dstore)) if arrived is None else arrived
    dy, dheld = (dleaving, None) if dheld is None else (dheld, dleaving)
    of_stages = jnp.where(ring.is_bubble(t, dy.ndim), jnp.nan, factors * dy)
    dstore = ring.read_back(t, ring.pass_on_back(t, dy, of_stages), dstore)
    arrived = ring.rotate_back(ring.write_back(t - 1, dstore)) if ring.sends_back_at_once else None
  return ring.enter_back(dstore, dheld)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
  """Slots that nothing has moved to are NaN."""
  monkeypatch.setattr(ring_module, "_unset", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


@pytest.mark.parametrize(
    "stages, sharded", [(4, True), (3, False), (1, False)], ids=["4 on devices", "3 on one device", "one"]
)
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("delay, times", [(1, 1), (1, 2), (1, 3), (2, 1), (2, 1.5)])
@pytest.mark.parametrize("over_slices", [False, True])
def test_each_microbatch_passes_all_stages_and_comes_back_to_its_place(
    stages, delay, times, repeats, sharded, over_slices
):
  """What stages compute in bubbles is NaN, of activations and of cotangents."""
  ring = ring_of(stages, int(times * delay * stages), repeats, delay, sharded=sharded, over_slices=over_slices)
  factors = jnp.arange(2.0, 2.0 + stages).reshape(-1, 1, 1, 1)
  x = jnp.arange(1.0, 1.0 + 4 * ring.schedule.microbatches).reshape(-1, 2, 2, 1)
  expected = x * jnp.prod(factors) ** repeats
  np.testing.assert_array_equal(jax.jit(lambda x: forward(ring, factors, x))(x), expected)
  np.testing.assert_array_equal(jax.jit(lambda x: backward(ring, factors, x))(x), expected)


@pytest.mark.parametrize("delay, times, entering, leaving", [(1, 1, 0, 1), (2, 1, 0, 1), (1, 2, 3, 3)])
def test_what_rides_in_bubbles_has_no_transfers_of_its_own(delay, times, entering, leaving):
  """With M = D·S inputs begin where they are, and outputs are one stage off. Others go to stage 0, and come from it."""
  ring = ring_of(4, times * delay * 4, 2, delay, sharded=True, over_slices=True)
  x = jnp.zeros((ring.schedule.microbatches, 2, 2, 1))
  store, held = jax.eval_shape(ring.enter, x)
  programs = [
      (entering, jax.make_jaxpr(ring.enter)(x)),
      (entering, jax.make_jaxpr(ring.enter_back)(store, held)),
      (leaving, jax.make_jaxpr(ring.leave)(store)),
      # The last rotation and the move are one.
      (leaving + (times > 1 or delay == 2), jax.make_jaxpr(ring.leave_back)(x)),
  ]
  for count, program in programs:
    assert str(program).count("ppermute[") == count and "all_gather" not in str(program)
