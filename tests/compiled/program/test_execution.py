# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How often the parts of a program run: loops, branches by the share of the devices, and what depends on data."""

import pytest

from maxtext_pp_ext.compiled import compare, reading
from tests.compiled.projection import programs

KEYS = {"batch": "data[", "optimizer": "opt["}
WHOLE = 8 * 4  # bytes of f32[8], which two devices gather
GATHERS = """%gathers.N (p: f32[8]) -> f32[8] {
  %p.N = f32[8]{0} parameter(0)
  %h.N = f32[4]{0} slice(%p.N), slice={[0:4]}
  ROOT %g.N = f32[8]{0} all-gather(%h.N), GROUPS
}

""".replace("GROUPS", programs.GATHER)
BRANCHES = "true_computation=%gathers.1, false_computation=%gathers.2"


def figures(text):
  more = GATHERS.replace("N", "1") + GATHERS.replace("N", "2")
  return compare.of_step(reading.step(text.replace("\n%body", f"\n{more}%body"), **KEYS))


@pytest.mark.parametrize("choice", [programs.COPIES, '%p.3 = pred[] custom-call(%x), custom_call_target="f"\n  '])
def test_of_two_branches_that_gather_one_counts_in_all_figures(choice):
  found = figures(programs.loop(f"{choice}%y = f32[8]{{0}} conditional(%p.3, %x, %x), {BRANCHES}", trips=8))
  expected = 8 * WHOLE / 2
  assert sum(row["wire_bytes"] for row in found["transfers"]) == expected
  assert found["wire_total_GB"] == pytest.approx(expected / 1e9, abs=5e-4)
  assert found["count"] == {"all-gather": 8} and sum(row["count"] for row in found["transfers"]) == 8
  assert found["conditionals_unknown"] == ([] if choice == programs.COPIES else ["y"])


def test_a_branch_counts_by_the_share_of_the_devices_that_take_it():
  """One branch gathers. Of two stages each takes it in 2 of 8 iterations: a device gathers twice."""
  one = "true_computation=%gathers.1, false_computation=%keep"
  found = figures(programs.loop(f"{programs.COPIES}%y = f32[8]{{0}} conditional(%p.3, %x, %x), {one}", trips=8))
  assert found["count"] == {"all-gather": 2}
  assert sum(row["wire_bytes"] for row in found["transfers"]) == 2 * WHOLE / 2


def test_what_was_started_is_not_run_again_by_its_update_and_its_done():
  transfer = """%s = ((), f32[8]{0}, u32[]) call-start(), to_apply=%gathers.1
  %u = ((f32[8]{0}), f32[8]{0}, u32[]) call-update(%s, %x), to_apply=%gathers.1
  %y = f32[8]{0} call-done(%u), to_apply=%gathers.1"""
  found = figures(programs.loop(transfer, trips=8))
  assert found["count"] == {"all-gather": 8} and sum(row["count"] for row in found["transfers"]) == 8
