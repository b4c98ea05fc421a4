# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which step is the base, and which has no time. tests/cli/test_compare.py runs real steps."""

import pytest

from maxtext_pp_ext.compiled.measured import step_times


def test_the_first_step_that_ran_is_the_base():
  steps = {
      "none": {"failure": "RefusedError: no"},
      "host": {"seconds": [2.0, 4.0, 3.0], "losses": [5.0] * 5},
      "circular": {"seconds": [1.0, 2.0, 3.0], "losses": [5.0] * 5},
  }
  found = step_times.compared(steps)
  assert found["base"] == "host" and found["steps"]["none"] == steps["none"]
  assert found["steps"]["host"]["ratio"]["median"] == 1.0 and found["steps"]["host"]["median_s"] == 3.0
  assert found["steps"]["circular"]["ratio"] == {"median": 0.5, "lower_quartile": 0.5, "upper_quartile": 0.75}
  assert step_times.compared({"none": steps["none"]}) == {"base": None, "steps": {"none": steps["none"]}}


@pytest.mark.parametrize("losses, number", [([1.0, float("nan")], 1), ([float("inf"), 1.0], 0)])
def test_a_step_that_computes_no_number_has_no_time(losses, number):
  found = step_times.checked([0.1], losses)
  assert set(found) == {"failure"} and f"the loss of step {number} is" in found["failure"]
  assert step_times.checked([0.1], [2.0, 1.0]) == {"seconds": [0.1], "losses": [2.0, 1.0]}
