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


# The costs of a step per device, and the estimated seconds; these are None without a chip, or without its slice.
Found = tuple[costs.Costs, estimate.Estimate | None]


def of_run(
    config: DerivedKeys,
    impl: str,
    schedule: Schedule | None,
    parameters: sharding.Explanation,
    mesh: AbstractMesh,
    chip: chips.Chip | None = None,
) -> Found | None:
  """Returns the costs of a run; None if there are no formulas for its implementation `impl` or its schedule.

  Raises:
    registry.UnknownImplementationError, registry.PluginError: there is no such implementation.
  """
  return of_runs(config, [(impl, schedule)], parameters, mesh, chip)[0]


def of_runs(
    config: DerivedKeys,
    runs: Sequence[tuple[str, Schedule | None]],
    parameters: sharding.Explanation,
    mesh: AbstractMesh,
    chip: chips.Chip | None = None,
) -> list[Found | None]:
  """Returns `of_run` of each implementation and schedule. What they have in common is counted once."""
  weights = Weights(config, parameters, mesh)
  sizes = functools.cache(lambda schedule: quantities.sizes(config, schedule, weights))
  work = functools.cache(lambda schedule: quantities.work(config, schedule, sizes(schedule), mesh))
  its_slice = topology.slice_of(chip.name, config.num_target_devices // config.num_slices) if chip else None

  def of(impl: str, schedule: Schedule | None) -> Found | None:
    circular = schedule if isinstance(schedule, CircularSchedule) else None
    gather_policy = None if schedule is None else gather_policy_with_formulas(impl)
    if schedule is not None and (circular is None or gather_policy is None):
      return None
    if circular is None or gather_policy is None:
      found = costs.without(quantities.loop_length(config), sizes(None))
    else:
      over_slices = config.dcn_pipeline_parallelism > 1
      found = costs.pipelined(circular, gather_policy, sizes(circular), over_slices=over_slices)
    if chip is None or its_slice is None:
      return found, None
    return found, estimate.estimate(chip, its_slice, work(circular), found, circular, gather_policy)

  return [of(*run) for run in runs]
