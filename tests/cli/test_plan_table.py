# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The columns of `maxtext-pp plan --wide`: what each adds up, by implementation and worst time; builds nothing."""

import dataclasses
import re

import pytest

from maxtext_pp_ext.cli import plan
from maxtext_pp_ext.cli.tables import labels
from maxtext_pp_ext.cli.tables import plan as table
from maxtext_pp_ext.plan import costs
from maxtext_pp_ext.plan.result import Candidate, Plan, Remedy
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy
from maxtext_pp_ext.schedule.moves import transfers

# All sums are below 1000, so that the table shows each byte.
SIZES = costs.Sizes(
    parameters=100,
    gradients=20,
    gradients_at_once=30,
    optimizer=200,
    copies=50,
    gathered=7,
    summed=11,
    sent_to_gather=3,
    sent_to_reduce=2,
    activations=1,
    kept=2,
    work=13,
    logits=0,
    head=17,
    beside_logits=17,
    head_sent=19,
    dispatched=5,
)
AT_LOGITS = dataclasses.replace(SIZES, logits=200, beside_logits=200)
SCHEDULE = CircularSchedule(stages=2, microbatches=2, repeats=3)  # 7 iterations
ONE_MICROBATCH = CircularSchedule(stages=1, microbatches=1, repeats=3)
GATHER_POLICIES = {
    "circular": GatherPolicy.ITERATION,
    "circular_bsw": GatherPolicy.REPEAT,
    "circular_ag_once": GatherPolicy.ONCE,
    "none": None,
}
GATHERED, SUMMED, HEAD = SIZES.gathered, SIZES.summed, SIZES.head
# Implementation, schedule -> what is gathered, in backward and at the logits.
GATHERED_WEIGHTS = {
    ("circular", SCHEDULE): (2 * GATHERED, 0),
    ("circular_bsw", SCHEDULE): (2 * GATHERED + SUMMED, GATHERED),
    ("circular_ag_once", SCHEDULE): (3 * GATHERED + SUMMED, 3 * GATHERED),
    ("circular", ONE_MICROBATCH): (3 * GATHERED, 0),
    ("circular_bsw", ONE_MICROBATCH): (2 * GATHERED + SUMMED, GATHERED),
    ("circular_ag_once", ONE_MICROBATCH): (3 * GATHERED + SUMMED, 3 * GATHERED),
    ("none", None): (2 * GATHERED, 0),
}
CASES = [(*run, *sizes) for run, sizes in GATHERED_WEIGHTS.items()]
NAMES = [f"{impl}-{schedule.stages if schedule else 'no'}" for impl, schedule, *_ in CASES]


def shown(capsys, impl, schedule, sizes):
  """What the table shows of a run: column -> bytes; and the costs."""
  gather_policy = GATHER_POLICIES[impl]
  found = costs.without(3, sizes) if schedule is None else costs.pipelined(schedule, gather_policy, sizes)
  candidate = Candidate(
      impl=impl,
      keys={"pipeline_impl": impl},
      schedule=schedule,
      layers_per_stage=1,
      tokens=1.0,
      flops=1.0,
      costs=found,
      estimate=None,
  )
  of_plan = Plan(devices=2, num_slices=1, chip=None, memory_limit=None, host_limit=None, candidates=[candidate])
  rows = [plan._as_dict(of_plan, candidate)]
  table.show({"devices": 2, "device_memory": None, "candidates": rows, "not_estimated": []}, of_plan, {}, wide=True)
  heading, _, line = capsys.readouterr().out.splitlines()[2:5]
  cells = dict(zip(re.split(r"\s{2,}", heading.strip()), re.split(r"\s{2,}", line.strip())[1:], strict=True))
  return {name: int(cell.removesuffix(" B")) for name, cell in cells.items() if cell.endswith(" B")}, found


@pytest.mark.parametrize("when", [costs.Phase.BACKWARD, costs.Phase.LOGITS])
@pytest.mark.parametrize("impl, schedule, in_backward, at_logits", CASES, ids=NAMES)
def test_the_columns_of_memory_add_up_to_it(capsys, impl, schedule, in_backward, at_logits, when):
  backward = when == costs.Phase.BACKWARD
  cells, found = shown(capsys, impl, schedule, SIZES if backward else AT_LOGITS)
  assert found.worst_phase == when
  assert cells["memory"] == found.peak == sum(cells[name] for name in ("state", "gathered", "kept", "work"))
  assert cells["gathered"] == (in_backward if backward else at_logits)
  assert cells["kept"] == (schedule.iterations if schedule else 3) * SIZES.kept
  gradients = {None: 100, GatherPolicy.ITERATION: 30}.get(GATHER_POLICIES[impl], 20)
  assert cells["state"] == 350 + (gradients if backward else 0)
  batch = schedule.microbatches if schedule else 0
  assert cells["work"] == (SIZES.work + 2 * batch if backward else 2 * 200 + HEAD + batch)


@pytest.mark.parametrize("impl, schedule", list(GATHERED_WEIGHTS), ids=NAMES)
def test_the_columns_of_what_is_sent_add_up_to_it(capsys, impl, schedule):
  cells, found = shown(capsys, impl, schedule, SIZES)
  assert cells["sent"] == found.sent == sum(cells[name] for name in ("weights", "act.", "outside", "tokens"))
  assert cells["weights"] == found.traffic[costs.Sent.WEIGHTS] + found.traffic[costs.Sent.GRADIENTS] > 0
  iterations = schedule.iterations if schedule else 3
  assert cells["outside"] == SIZES.head_sent and cells["tokens"] == iterations * SIZES.dispatched
  assert cells["act."] == (2 * iterations + 2 * transfers(schedule) if schedule and schedule.stages > 1 else 0)


def test_without_experts_there_is_no_column_of_tokens(capsys):
  cells, _ = shown(capsys, "circular", SCHEDULE, dataclasses.replace(SIZES, dispatched=0))
  assert "tokens" not in cells and "outside" in cells


@pytest.mark.parametrize("columns, parts", [(table.MEMORY, costs.Part), (table.SENT, costs.Sent)])
def test_each_part_is_in_one_column(columns, parts):
  assert sorted(part for column in columns.values() for part in column) == sorted(parts)


@pytest.mark.parametrize("stages", [1, 2])
def test_each_part_has_a_label_of_its_own(stages):
  for of_enum, enum in (
      (labels.parts(stages), costs.Part),
      (labels.phases(stages), costs.Phase),
      (labels.SENT, costs.Sent),
  ):
    assert set(of_enum) == set(enum) and len(set(of_enum.values())) == len(enum)


@pytest.mark.parametrize(
    "memory, missing, said",
    [(700, 0, "700 B, fits"), (900, 0, "900 B, fits, nearly full (?)"), (1200, 200, "1.2 kB, lacks 200 B")],
)
def test_an_advice_that_nearly_fills_a_device_says_so_as_rows_do(memory, missing, said):
  remedy = Remedy(
      keys={"per_device_batch_size": 1},
      before={"per_device_batch_size": 4},
      memory=memory,
      candidate={},
      missing=missing,
  )
  found = Plan(devices=8, num_slices=1, chip=None, memory_limit=1000, host_limit=None, remedies=[remedy])
  result = {"remedies": [], "device_memory": 1000, "candidates": []}
  assert [*table._remedies(result, found)] == [f"  per_device_batch_size=1 (now 4): {said}"]
