# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pipelines of MaxText's own layers compute what a loop over the same layers computes, parameter by parameter.

Bound: `parity.tolerance`, 1e-5 to 2e-5 for the depths here, so that a wrong microbatch, weight or reduction (relative
error of order 1) cannot hide; errors that are measured are below 5e-6.
"""

import math

import jax
import jax.numpy as jnp
import pytest

from maxtext_pp_ext.engine.weights.weight import Weight
from maxtext_pp_ext.host.models import decoder_layers
from maxtext_pp_ext.pipelines.circular import CircularBswPipeline
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity.common import LAYERS, make_config, put_on_slices
from tests.trainer.cases import OTHERS


def check(implementation, layer, *, bound=None, **keys):
  config = make_config(**keys)
  parity.assert_pipeline_parity(LAYERS[layer], config, implementations=implementation, tolerance=bound)


# Stages, repeats, microbatches / stages, delay: every value of each, and the corners where schedules go wrong.
SCHEDULES = [
    (1, 1, 1, 1),
    (1, 3, 2, 1),
    (2, 1, 1, 1),
    (2, 2, 2, 1),
    (2, 3, 2, 2),
    (3, 1, 2, 1),
    (3, 2, 1, 1),
    (3, 3, 2, 2),
    (4, 1, 4, 1),
    (4, 2, 1, 1),
    (4, 2, 3, 2),
    (4, 3, 2, 1),
    (4, 4, 1, 1),
    (8, 2, 1, 1),
    (8, 2, 2, 2),
]


def check_schedule(implementation, layer, stages, repeats, rounds, delay):
  check(
      implementation,
      layer,
      stages=stages,
      repeats=repeats,
      microbatches=rounds * stages,
      pipeline_delay_activation_forwarding=delay == 2,
  )


# Every number of stages and of repeats, and both delays.
QUICK_SCHEDULES = [(1, 3, 2, 1), (2, 3, 2, 2), (3, 1, 2, 1), (3, 2, 1, 1), (3, 3, 2, 2), (4, 4, 1, 1), (8, 2, 2, 2)]


@pytest.mark.parametrize("stages, repeats, rounds, delay", slow_but(QUICK_SCHEDULES, SCHEDULES, spread=True))
def test_bsw_of_simple_layers_equals_a_loop_over_them(stages, repeats, rounds, delay):
  check_schedule("circular_bsw", "simple", stages, repeats, rounds, delay)


# What the schedules above do not vary, one at a time, where three stages and a wait between repeats hide the least.
VARIATIONS = {
    "several layers per stage": {"layers_per_stage": 2},
    "layers per stage in a scan": {"layers_per_stage": 2, "scan_layers_per_stage": True},
    "layers per stage in a scan over the first axis": {
        "layers_per_stage": 2,
        "scan_layers_per_stage": True,
        "param_scan_axis": 0,
    },
    "no scan over layers": {"scan_layers": False},
    "no scan over layers, several per stage": {"scan_layers": False, "layers_per_stage": 2},
    "unrolled iterations": {"scan_pipeline_iterations": False},
    "scanned repeats": {"scan_pipeline_repeats": True},
    "unrolled iterations, scanned repeats": {"scan_pipeline_iterations": False, "scan_pipeline_repeats": True},
    "no remat of iterations": {"set_remat_policy_on_pipeline_iterations": False},
}


# Other quick tests have these, too.
@pytest.mark.slow
@pytest.mark.parametrize("keys", VARIATIONS.values(), ids=VARIATIONS)
def test_bsw_of_llama_layers_equals_a_loop_over_them_with(keys):
  check("circular_bsw", "llama", stages=3, repeats=2, microbatches=6, **keys)


@pytest.mark.slow
def test_statistics_of_activations_are_those_of_the_whole_batch():
  check("circular_bsw", "llama", stages=2, repeats=2, microbatches=4, record_internal_nn_metrics=1)


# Quick tests have these layers with other keys and with NaN in bubbles, the tightest schedules with simple layers.
@pytest.mark.slow
@pytest.mark.parametrize("stages, repeats, rounds", [(1, 2, 2), (2, 3, 1), (3, 3, 1), (4, 2, 2), (8, 1, 1)])
def test_bsw_of_llama_layers_equals_a_loop_over_them(stages, repeats, rounds):
  check("circular_bsw", "llama", stages=stages, repeats=repeats, microbatches=rounds * stages)


@pytest.mark.parametrize(
    "stages, repeats, rounds, delay, implementation",
    slow_but(
        [(3, 3, 2, 1, "circular")],
        [(*schedule, name) for schedule in [(2, 1, 2, 1), (3, 3, 2, 1), (4, 2, 2, 2)] for name in OTHERS],
        spread=True,
    ),
)
def test_other_gather_policies_equal_a_loop_over_the_layers(implementation, stages, repeats, rounds, delay):
  check_schedule(implementation, "llama", stages, repeats, rounds, delay)


class NaNInBubbles(CircularBswPipeline):
  bubble_fill = math.nan


@pytest.mark.parametrize(
    "stages, repeats, rounds, delay",
    # The next test has NaN in the bubbles of (3, 2, 2, 2), too.
    slow_but([(2, 1, 1, 1)], [(2, 1, 1, 1), (3, 2, 2, 2), (4, 3, 1, 1), (8, 1, 1, 1)], spread=True),
)
def test_a_nan_in_every_bubble_reaches_neither_outputs_nor_gradients(stages, repeats, rounds, delay):
  check_schedule(NaNInBubbles, "llama", stages, repeats, rounds, delay)


@pytest.mark.parametrize(
    "keys",
    slow_but(
        ["D = 2"],
        {
            "D = 2": {"stages": 2, "repeats": 2, "microbatches": 8, "pipeline_delay_activation_forwarding": True},
            "2 layers": {"stages": 2, "repeats": 2, "microbatches": 4, "layers_per_stage": 2},
            "3 repeats": {"stages": 2, "repeats": 3, "microbatches": 6},
            "4 stages, 1 repeat": {"stages": 4, "repeats": 1, "microbatches": 4},
            "kept activations": {"stages": 2, "repeats": 2, "microbatches": 2, "remat_policy": "minimal_with_context"},
            "unrolled": {"stages": 2, "repeats": 2, "microbatches": 2, "scan_pipeline_iterations": False},
        },
    ),
)
def test_bsw_of_stages_on_slices_equals_a_loop_over_the_layers(keys, monkeypatch):
  put_on_slices(monkeypatch)
  check(NaNInBubbles, "llama", **keys)


@pytest.mark.parametrize(
    "stages, repeats, rounds, delay",
    slow_but([(3, 2, 2, 2)], [(1, 2, 2, 1), (2, 3, 1, 1), (3, 3, 1, 1), (3, 2, 2, 2)], spread=True),
)
def test_a_nan_in_what_is_not_gathered_yet_reaches_neither_outputs_nor_gradients(
    monkeypatch, stages, repeats, rounds, delay
):
  """NaN in the next buffer, and in sums before their first summand and before their first chunk."""
  opened, zeros = Weight.open, Weight.zeros
  nan = lambda x: None if x is None else jnp.full_like(x, math.nan)
  filled = []

  def empty_sums(self, behind=None):
    made = zeros(self, behind)
    filled.append(made.is_partial)
    stored = nan(made.stored) if made.is_partial else made.stored
    return made.with_(total=nan(made.total), finished=nan(made.finished), stored=stored)

  def empty_buffers(self, repeat):
    made = opened(self, repeat)
    filled.append(made.buffers is not None)
    if made.buffers is None or not made.has_next_buffer:
      return made
    return made.with_(buffers=made.buffers.at[1 - repeat % 2].set(math.nan))

  monkeypatch.setattr(Weight, "open", empty_buffers)
  monkeypatch.setattr(Weight, "zeros", empty_sums)
  check_schedule(NaNInBubbles, "llama", stages, repeats, rounds, delay)
  assert any(filled)


@pytest.mark.parametrize("accumulation", slow_but(["auto"], ["auto", "bfloat16"]))
def test_in_bfloat16_the_difference_is_that_of_its_rounding(accumulation):
  """Unit roundoff u = 2⁻⁹. L layers round a few times each, independently: 4·√L·u. Gradients that are also summed over
  M microbatches in bfloat16 round another M times: √M·u more."""
  layers, microbatches, u = 8, 8, 2.0**-9
  bound = 4 * math.sqrt(layers) * u + (math.sqrt(microbatches) * u if accumulation == "bfloat16" else 0)
  check(
      "circular_bsw",
      "llama",
      bound=bound,
      stages=4,
      repeats=2,
      microbatches=microbatches,
      dtype="bfloat16",
      matmul_precision="default",
      pipeline_grad_accum_dtype=accumulation,
  )


def test_the_comparison_notices_a_wrong_layer_order():
  """A reference that runs the layers stage by stage instead of repeat by repeat must not pass."""
  config = make_config(stages=2, repeats=2, microbatches=2)
  mesh, batch = parity.mesh_of(config), parity.Batch.random(config)
  pipeline = decoder_layers.pipeline(config, mesh, "circular_bsw", LAYERS["simple"])
  in_order = parity.reference(pipeline, LAYERS["simple"], config, batch)
  swapped = lambda params, inputs: in_order(jax.tree.map(lambda w: w.swapaxes(0, 1), params), inputs)
  result = parity.compare(pipeline, swapped, batch, mesh, config.logical_axis_rules)
  with pytest.raises(AssertionError, match="outputs"):
    result.check(parity.tolerance(config))
