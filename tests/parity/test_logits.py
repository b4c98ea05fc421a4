# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits of pipelines over slices, in whole models with MaxText's own loss."""

import types

import pytest

from maxtext_pp_ext.engine import outside, Ring
from maxtext_pp_ext.host.replacements import logits
from maxtext_pp_ext.pipelines import execution
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity import windows

_TWO = {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 4, "ici_fsdp_parallelism": -1}
CASES = {
    # Rows are divided over an axis before that of the stages, too.
    "data": {**_TWO, "ici_data_parallelism": 2, "vocab_size": 1000},
    "context": {**_TWO, "ici_context_parallelism": 2, "attention": "dot_product"},
    "tensor": {**_TWO, "ici_tensor_parallelism": 2},
    "delay": {**_TWO, "pipeline_delay_activation_forwarding": True},
    "eight stages": {"ici_pipeline_parallelism": 8, "num_pipeline_microbatches": 8, "layers": 8},
    "soft cap": {**_TWO, "final_logits_soft_cap": 3.0},
    "more tokens to predict": {**_TWO, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
    "unrolled": {**_TWO, "scan_pipeline_iterations": False},
    "on the host": {**_TWO, "remat_policy": "minimal_offloaded"},
}


def over_slices(monkeypatch):
  """The devices of one process have no slices, so everybody is told of them here.

  Returns the shapes of gradients that are added up.
  """
  added, add_part = [], outside.OfCopies.add_part
  monkeypatch.setattr(logits, "over_slices", lambda config: config.using_pipeline_parallelism)
  monkeypatch.setattr(execution, "Ring", lambda **fields: Ring(**fields | {"over_slices": True}))
  spy = lambda of_copies, *args: added.append(of_copies.gradients.shape) or add_part(of_copies, *args)
  monkeypatch.setattr(outside.OfCopies, "add_part", spy)
  return added


@pytest.mark.parametrize("keys", slow_but(["data"], CASES))
def test_loss_and_gradients_are_those_of_maxtexts_own_logits(keys, monkeypatch):
  model = windows.build(windows.make_config(**keys, pipeline_impl="circular_bsw"))
  params, data = windows.moved(model.params), windows.batch(model.config)
  (loss, _), gradients = windows.loss_and_gradients(model, params, data)
  added = over_slices(monkeypatch)
  (own_loss, _), own = windows.loss_and_gradients(model, params, data)
  stages = model.config.ici_pipeline_parallelism
  assert set(added) == {(stages, model.config.emb_dim, model.config.vocab_size)}
  errors = {"loss": parity.relative_error(own_loss, loss), **windows.errors(own, gradients)}
  bound = parity.tolerance(model.config)
  assert {key: error for key, error in errors.items() if not error <= bound} == {}


@pytest.mark.parametrize(
    "keys", [{"logits_via_embedding": True}, {"num_vocab_tiling": 2}], ids=lambda keys: next(iter(keys))
)
def test_other_logits_are_left_to_maxtext(keys, monkeypatch):
  model = windows.build(windows.make_config(**_TWO, pipeline_impl="circular_bsw", **keys))
  added = over_slices(monkeypatch)
  windows.program(model)
  assert not added


@pytest.mark.parametrize(
    "impl, pipeline, slices, expected",
    [
        ("circular_bsw", True, 2, True),
        ("circular_bsw", True, 1, False),
        ("circular_bsw", False, 2, False),
        ("host", True, 2, False),
    ],
)
def test_only_pipelines_of_ours_over_slices_add_up(impl, pipeline, slices, expected):
  keys = {"pipeline_impl": impl, "using_pipeline_parallelism": pipeline, "dcn_pipeline_parallelism": slices}
  assert logits.over_slices(types.SimpleNamespace(**keys)) is expected


@pytest.mark.parametrize("size, iterations", [(1000, 5), (128256, 23), (32000, 163), (5, 8), (128, 1)])
@pytest.mark.parametrize("is_last", [True, False])
def test_the_parts_of_all_iterations_are_the_whole(size, iterations, is_last):
  part = outside._part(size, iterations, is_last=is_last)
  firsts = [min(number * part, size - part) for number in range(iterations)]
  covered = {first + k for first in firsts for k in range(part)}
  assert covered == set(range(size))
  assert not is_last or part == size or part % 128 == 0
