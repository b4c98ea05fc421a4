# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which stage works on which item at which iteration: integer arithmetic, no JAX."""

from maxtext_pp_ext.schedule.circular import CircularSchedule, Phase, Schedule
from maxtext_pp_ext.schedule.gather_policy import GatherPolicy

__all__ = ["CircularSchedule", "Phase", "GatherPolicy", "Schedule"]
