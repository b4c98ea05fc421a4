# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every block with experts on a mesh with two devices for the experts, by each way in which tokens get to their experts.

Left out are MaxText's default dispatch, since XLA has no ragged all-to-all on CPUs, and its ring of experts, which
MaxText 0.2.5 has for Megablox only.
"""

import pytest

from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity import test_windows
from tests.parity.blocks import PIPELINED
from tests.trainer.cases import IMPLEMENTATIONS

CASES = {case.name: case for case in PIPELINED if case.experts}
EXPERT_AXIS = {"ici_expert_parallelism": 2}
# MaxText counts tokens against an expert's capacity in each sequence, so a microbatch drops those that the batch drops.
CAPACITY = {"capacity_factor": 1.0}


def check(case, stages, **keys):
  config = case.config(stages=stages, repeats=case.repeats(stages), microbatches=2 * stages, **EXPERT_AXIS, **keys)
  mesh = parity.mesh_of(config)
  found = parity.assert_pipeline_parity(
      None,
      config,
      implementations=IMPLEMENTATIONS,
      mesh=mesh,
      tolerance=case.amplification * parity.tolerance(config),
  )
  for result in found.values():
    assert any("moe_lb_loss" in name for name in result.sown)
    assert any("moe_bias_updates" in name for name in result.sown) == ("updates of biases" in case.experts)


DROPLESS = [("mixtral", 3)]


@pytest.mark.parametrize(
    "name, stages", slow_but(DROPLESS, [(name, stages) for name in CASES for stages in (2, 3, 4)], spread=True)
)
def test_no_token_is_dropped_and_all_is_as_without_a_pipeline(name, stages):
  check(CASES[name], stages)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens_are_dropped_as_without_a_pipeline(name, stages):
  check(CASES[name], stages, **CAPACITY)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, CAPACITY], ids=["dropless", "capacity"])
@pytest.mark.parametrize("name", CASES)
def test_a_window_over_the_layers_equals_the_scan_over_them(name, keys):
  test_windows.check(CASES[name], IMPLEMENTATIONS, num_pipeline_microbatches=2, **EXPERT_AXIS, **keys)
