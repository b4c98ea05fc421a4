# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every decoder block of MaxText computes the same in a pipeline as its layers without one, or is refused for a reason.

MaxText's stage builder builds the stages. MaxText's path without a pipeline builds the layers of the reference, each for
its index (`host.models.decoder_layers`).
"""

import re

from maxtext.common.common_types import DecoderBlockType
import pytest

from maxtext_pp_ext.host.rules import optimizer, pipelined_path
from maxtext_pp_ext.testing import parity
from tests import tables
from tests.parity.blocks import bound, error_of, IMPLEMENTATIONS, markdown, MEASURED, PIPELINED, reason, REFUSED

BLOCKS = {block.value for block in DecoderBlockType}


def check(case, implementations, **sizes):
  config = case.config(microbatches=sizes["stages"], **sizes)
  found = parity.assert_pipeline_parity(
      None, config, implementations=implementations, tolerance=bound(case, config), unused=case.unused
  )
  for result in found.values():
    assert any("moe_lb_loss" in name for name in result.sown) == bool(case.experts)
    assert any("indexer_loss" in name for name in result.sown) == ("indexer" in case.experts)
    assert any("moe_bias_updates" in name for name in result.sown) == ("updates of biases" in case.experts)


def quick(case):
  """Blocks with much of what the others have."""
  return pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)


QUICK = ("gpt3",)


@pytest.mark.parametrize("case", [quick(case) for case in PIPELINED])
def test_a_pipeline_computes_and_learns_what_the_layers_do(case):
  check(case, "circular_bsw", stages=3, repeats=case.repeats(3))


# Stages, repeats, layers per stage, in a scan.
SIZES = [
    (1, 2, 1, False),
    (2, 2, 1, False),
    (3, 1, 2, False),
    (3, 2, 1, False),
    (2, 1, 2, True),
    (2, 2, 2, True),
    (4, 1, 1, False),
]


@pytest.mark.slow
@pytest.mark.parametrize("stages, repeats, layers_per_stage, scanned", SIZES)
@pytest.mark.parametrize("case", PIPELINED, ids=lambda case: case.name)
def test_every_implementation_computes_and_learns_what_the_layers_do_at_every_size(
    case, stages, repeats, layers_per_stage, scanned
):
  if not case.takes(stages, repeats, layers_per_stage):
    pytest.skip(f"at most {case.most_layers} layers of this block can be pipelined")
  if case.block == "gemma3" and stages * repeats * layers_per_stage * case.cycle > 24:
    pytest.skip("more layers of this block magnify rounding beyond the bound (tests/testing/test_parity.py -k magnify)")
  keys = {"layers_per_stage": layers_per_stage, "scan_layers_per_stage": scanned}
  if scanned and case.keys.get("routed_bias_update_rate"):
    keys["param_scan_axis"] = 0  # refused otherwise: biases of a model that is not called deepseek… are parameters
  elif layers_per_stage > 1 and case.keys.get("routed_bias_update_rate"):
    keys["routed_bias_update_rate"] = 0  # refused: MaxText updates the biases of one module
    case = type(case)(**{**vars(case), "experts": case.experts.replace(", updates of biases", "")})
  check(case, IMPLEMENTATIONS, stages=stages, repeats=repeats, **keys)


@pytest.mark.slow
def test_deepseek_without_biases_of_experts_computes_and_learns_what_its_layers_do():
  [case] = [case for case in PIPELINED if case.name == "deepseek"]
  keys = {**case.keys, "routed_bias": False, "routed_bias_update_rate": 0}
  check(
      type(case)(block="deepseek", keys=keys, experts="top 2 of 4, shared, load-balance loss"),
      IMPLEMENTATIONS,
      stages=3,
      repeats=2,
  )


SCANNED = {"stages": 2, "repeats": 1, "layers_per_stage": 2, "scan_layers_per_stage": True}


def test_biases_that_are_stacked_otherwise_than_their_updates_are_refused():
  [case] = [case for case in PIPELINED if case.name == "deepseek"]
  with pytest.raises(ValueError, match=r"param_scan_axis=1: biases are stacked .* Set param_scan_axis=0"):
    case.config(**SCANNED, microbatches=2)
  case.config(**SCANNED, microbatches=2, param_scan_axis=0)


@pytest.mark.slow
def test_stacked_biases_that_the_config_does_not_tell_of_are_refused_when_traced(monkeypatch):
  """With as many experts as layers in a stage, no shape would differ."""
  monkeypatch.setattr(optimizer, "_expert_bias", lambda config: ())
  [case] = [case for case in PIPELINED if case.name == "deepseek"]
  with pytest.raises(NotImplementedError, match=r"param_scan_axis=1; .* Set param_scan_axis=0"):
    check(case, "circular_bsw", **SCANNED, num_experts=2, num_experts_per_tok=1)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_block_whose_layers_would_be_built_differently_is_refused_by_its_config(case):
  assert re.search(f"decoder_block={case.block} cannot be pipelined.*{re.escape(case.refused)}", error_of(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gemma3: 6 layers or more, no scan_layers", "llama4: some layers with experts or without RoPE, no scan_layers"],
)
def test_what_is_refused_would_be_another_model(monkeypatch, name):
  [case] = [case for case in REFUSED if case.name == name]
  monkeypatch.setattr(pipelined_path, "problems", lambda config: [])
  config = case.config(stages=3, repeats=2, microbatches=3)
  with pytest.raises(AssertionError, match="outputs|other state"):
    parity.assert_pipeline_parity(None, config)


def test_the_cases_are_all_blocks_of_maxtext():
  assert {case.block for case in [*PIPELINED, *REFUSED]} == BLOCKS
  names = [case.name for case in [*PIPELINED, *REFUSED]]
  assert len(names) == len(set(names))


def test_the_table_of_the_documentation_lists_every_case_with_an_error():
  text, measured = "\n".join(markdown()), tables.read(MEASURED)
  rows = re.findall(r"^\| `(\w+)` \| (yes|no) \| (.*?) \| (.*?) \|", text, re.MULTILINE)
  expected = [(case.block, "yes", case.condition) for case in PIPELINED]
  expected += [(case.block, "no", reason(case)) for case in REFUSED]
  assert sorted(row[:3] for row in rows) == sorted(expected)
  assert all(bool(re.match(r"\d\.\de-\d\d \(", error)) == (answer == "yes") for _, answer, _, error in rows)
  assert measured.keys() == {case.name for case in PIPELINED}


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINED, ids=lambda case: case.name)
def test_the_measured_error_is_within_its_bound(case):
  config = case.config(stages=3, repeats=case.repeats(3), microbatches=3)
  assert 0 < tables.read(MEASURED)[case.name]["error"] <= bound(case, config)


@pytest.mark.slow
def test_a_wrong_gradient_of_the_load_balance_loss_is_noticed(monkeypatch):
  import jax

  from maxtext_pp_ext.host.models import sown

  [case] = [case for case in PIPELINED if case.block == "mixtral"]
  right = sown.COMBINE["moe_lb_loss"]
  monkeypatch.setitem(sown.COMBINE, "moe_lb_loss", lambda x, axis: jax.lax.stop_gradient(right(x, axis=axis)))
  with pytest.raises(AssertionError, match=r"(?s)Relative error above.*gate"):
    parity.assert_pipeline_parity(None, case.config(stages=2, repeats=1, microbatches=2))
