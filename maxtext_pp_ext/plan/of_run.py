# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The closed forms of `plan.costs` for a MaxText config."""

from __future__ import annotations

from collections.abc import Sequence
import functools

from jax.sharding import AbstractMesh

from maxtext_pp_ext import registry, sharding
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.host import topology
from maxtext_pp_ext.plan import costs, estimate, quantities
from maxtext_pp_ext.plan.weights import Weights
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy, Schedule


def gather_policy_with_formulas(impl: str) -> GatherPolicy | None:
  """The gather policy of an implementation; None where the closed forms do not hold: without one, or in another order.

  Raises:
    registry.UnknownImplementationError, registry.PluginError: there is no such implementation.
  """
  if impl == registry.HOST:
    return None
  contract = registry.get(impl).contract
  return contract.gather_policy if contract.schedule_class is CircularSchedule else None


def of_runs(
    config: DerivedKeys,
    runs: Sequence[tuple[str, Schedule | None]],
    parameters: sharding.Explanation,
    mesh: AbstractMesh,
    chip: chips.Chip | None = None,
) -> list[tuple[costs.Costs, estimate.Estimate | None] | None]:
  """Returns (costs per device and step, estimated seconds) of each implementation and schedule.

  The seconds are None without a chip, or without its slice. Where there are no formulas for an implementation or its
  schedule there is None. What the runs have in common is counted once.

  Raises:
    registry.UnknownImplementationError, registry.PluginError: there is no such implementation.
  """
  weights = Weights(config, parameters, mesh)
  sizes = functools.cache(lambda schedule: quantities.sizes(config, schedule, weights))
  work = functools.cache(lambda schedule: quantities.work(config, schedule, sizes(schedule), mesh))
  its_slice = topology.slice_of(chip.name, config.num_target_devices // config.num_slices) if chip else None

  def of(impl: str, schedule: Schedule | None) -> tuple[costs.Costs, estimate.Estimate | None] | None:
    circular = schedule if isinstance(schedule, CircularSchedule) else None
    gather_policy = gather_policy_with_formulas(impl) if schedule else None
    if circular is not None and gather_policy is not None:
      over_slices = config.dcn_pipeline_parallelism > 1
      found = costs.pipelined(circular, gather_policy, sizes(circular), over_slices=over_slices)
    elif schedule is None:
      found = costs.without(quantities.loop_length(config), sizes(None))
    else:
      return None
    if chip is None or its_slice is None:
      return found, None
    return found, estimate.estimate(chip, its_slice, work(circular), found, circular, gather_policy)

  return [of(*run) for run in runs]
