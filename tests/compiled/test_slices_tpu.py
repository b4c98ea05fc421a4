# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Stages across slices: every implementation compiles for TPUs, and the transfers between slices are activations.

The compiled program is that of one slice, and its replica groups name devices of that slice. Only its `send`s leave the
slice; the tests check their arrays. These are activations, scalars, and gradients of weights outside the pipeline
(embedding, logits, final norm), which all slices hold.
"""

import importlib.util
import math
import re

import pytest

from maxtext_pp_ext.compiled import child, compare, limits, reading
from maxtext_pp_ext.compiled.program import collectives
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.host.models import train_step
from tests.compiled import common
from tests.trainer.cases import IMPLEMENTATIONS

EMBED, MLP, SEQUENCE, VOCABULARY, LAYERS, MICROBATCHES, ROWS_PER_CHIP = 512, 1024, 512, 2560, 8, 4, 2
SLICES, STAGES_IN_SLICE, FSDP = 2, 2, 2
STAGES = SLICES * STAGES_IN_SLICE
KEYS = (
    *common.keys(
        "v6e-4",
        embed=EMBED,
        mlp=MLP,
        layers=LAYERS,
        sequence=SEQUENCE,
        vocabulary=VOCABULARY,
        rows_per_device=ROWS_PER_CHIP,
    ),
    f"compile_topology_num_slices={SLICES}",
    f"dcn_pipeline_parallelism={SLICES}",
    f"ici_pipeline_parallelism={STAGES_IN_SLICE}",
    f"ici_fsdp_parallelism={FSDP}",
    f"num_pipeline_microbatches={MICROBATCHES}",
)
ITERATIONS = MICROBATCHES * (LAYERS // STAGES) + STAGES - 1
# What a chip has of a microbatch, in bytes, and of what is outside the pipeline and sharded over its slice, in elements.
MICROBATCH = ROWS_PER_CHIP * STAGES // MICROBATCHES * SEQUENCE * EMBED * 2
CHIPS = STAGES_IN_SLICE * FSDP
TABLE, NORM = VOCABULARY * EMBED // CHIPS, EMBED
OF_A_LAYER = {EMBED * EMBED, EMBED * EMBED // FSDP, EMBED * MLP, EMBED * MLP // FSDP}
LANES = 128  # as many elements a scalar is sent as


def devices_of_groups(program):
  """The devices that collectives' replica groups name, listed or as a shape, and the pairs of permutations."""
  for listed in re.findall(r"\b(?:replica_groups|source_target_pairs)=\{(\{[^=]*?\})\}", program):
    yield from map(int, re.findall(r"\d+", listed))
  for shape in re.findall(r"replica_groups=\[([\d,]+)\]<=", program):
    yield math.prod(map(int, shape.split(","))) - 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tools")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_between_slices_go_activations_and_gradients_of_what_is_outside_the_pipeline(implementation, tmp_path):
  file = tmp_path / "step.hlo"
  compiled = child.compile_step([*KEYS, f"pipeline_impl={implementation}"], bounds=limits.Limits(), hlo_file=file)
  assert "failure" not in compiled, compiled
  program = file.read_text(encoding="utf-8")
  read = reading.step(program, batch=train_step.BATCH, optimizer=train_step.OPTIMIZER)
  devices = set(devices_of_groups(program))
  assert read.run.module.partitions == CHIPS and devices and devices <= set(range(CHIPS))

  v6e, placement = chips.CHIPS["v6e"], compiled["placement"]
  assert 0 < compare.at_nominal_rate(read, v6e, placement) < compare.simulate(read, v6e, placement).step.seconds
  assert compare.at_nominal_rate(read, v6e.with_network(v6e.network), placement) is None

  found = zip(read.payloads, read.collectives, strict=True)
  sent = [(what, span) for what, span in found if span.collective.kind == collectives.BETWEEN_SLICES]
  activations = [span for what, span in sent if what == reading.ACTIVATIONS]
  # Forward and backward, a microbatch at each iteration, in the loop. Backward adds up the logits' gradient beside.
  in_loops = [(what, span) for what, span in sent if span.depth > 0]
  assert all(span.depth == 1 for _, span in in_loops)
  assert {what for what, _ in in_loops} == {reading.ACTIVATIONS, reading.GRADIENTS}
  assert sum(span.wire_bytes for what, span in in_loops if what == reading.ACTIVATIONS) == 2 * ITERATIONS * MICROBATCH
  of_logits = sum(span.wire_bytes for what, span in in_loops if what == reading.GRADIENTS)
  assert TABLE * 2 <= of_logits <= 1.5 * TABLE * 2  # in bfloat16, over two slices; parts of so few rows are rounded up
  # Inputs reach the first stage, outputs leave the last one, and the same for gradients.
  assert sum(span.wire_bytes for span in activations if span.depth == 0) <= 4 * MICROBATCHES * MICROBATCH
  others = [(what, span.array.elements) for what, span in sent if what != reading.ACTIVATIONS and span.depth == 0]
  assert reading.WEIGHTS not in dict(others)
  # Behind the loop there are gradients of a table and one norm, each once, while a stage's layers have several.
  gradients = sorted(elements for what, elements in others if what == reading.GRADIENTS and elements > LANES)
  assert gradients == [NORM, TABLE] and TABLE not in OF_A_LAYER
  # The rest are segment ids and positions of a batch's rows, and scalars.
  rest = [elements for what, elements in others if what == reading.ELSEWHERE]
  assert max(rest) <= ROWS_PER_CHIP * SEQUENCE
