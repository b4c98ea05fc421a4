# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits of pipelines over slices, in whole models with MaxText's own loss."""

import types

from flax import nnx
import jax
import pytest

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.engine import outside
from maxtext_pp_ext.host.replacements import logits
from maxtext_pp_ext.pipelines.circular import CircularBswPipeline
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity import windows
from tests.parity.common import put_on_slices

_TWO = {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 4, "ici_fsdp_parallelism": -1}
CASES = {
    # Rows are divided over an axis before that of the stages, too.
    "data": {**_TWO, "ici_data_parallelism": 2, "vocab_size": 1000, "decoder_block": "simple"},
    "context": {**_TWO, "ici_context_parallelism": 2, "attention": "dot_product"},
    "tensor": {**_TWO, "ici_tensor_parallelism": 2},
    "delay": {**_TWO, "pipeline_delay_activation_forwarding": True},
    "eight stages": {"ici_pipeline_parallelism": 8, "num_pipeline_microbatches": 8, "layers": 8},
    "soft cap": {**_TWO, "final_logits_soft_cap": 3.0},
    "parts": {**_TWO, "pipeline_remat_iterations": 2, "remat_policy": "minimal"},
    "accumulated": {**_TWO, "gradient_accumulation_steps": 2},
    "bfloat16": {**_TWO, "weight_dtype": "bfloat16"},
    "unrolled": {**_TWO, "scan_pipeline_iterations": False},
    "on the host": {**_TWO, "remat_policy": "minimal_offloaded"},
}


def over_slices(monkeypatch):
  """The devices of one process have no slices, so everybody is told of them here.

  Returns the shapes of gradients that are added up.
  """
  added, add_part = [], outside.OfCopies.add_part
  monkeypatch.setattr(logits, "adds_up_logits", lambda config: config.using_pipeline_parallelism)
  put_on_slices(monkeypatch)
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


def test_a_pipeline_with_a_call_of_its_own_leaves_logits_to_maxtext():

  class Own(CircularBswPipeline):

    def __call__(self, *args, **kwargs):
      return jax.checkpoint(super().__call__, static_argnums=(3, 4))(*args, **kwargs)

  model = windows.build(windows.make_config(**_TWO, pipeline_impl="circular_bsw"))
  decoder = nnx.merge(model.graphdef, model.params, model.rest).decoder
  assert logits._head(decoder, 16) is not None
  vars(decoder)["pipeline_module"] = Own.__new__(Own)
  assert logits._head(decoder, 16) is None


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, True),
        ({"dcn_pipeline_parallelism": 1}, False),
        ({"using_pipeline_parallelism": False}, False),
        ({"pipeline_impl": "host"}, False),
        ({"logits_via_embedding": True}, False),
        ({"num_vocab_tiling": 2}, False),
        ({"mtp_num_layers": 1}, False),
        ({"quantize_logits_proj": True}, False),
        ({"use_indexer": True}, False),
        ({"parameter_memory_host_offload": True}, False),
        ({"shard_mode": "explicit"}, False),
    ],
    ids=lambda each: next(iter(each), "plain") if isinstance(each, dict) else "",
)
def test_logits_whose_gradient_is_left_to_xla(keys, expected):
  config = {
      "pipeline_impl": "circular_bsw",
      "using_pipeline_parallelism": True,
      "dcn_pipeline_parallelism": 2,
      "shard_mode": "auto",
      "num_vocab_tiling": 1,
  }
  assert derived.adds_up_logits(types.SimpleNamespace(**config | keys)) is expected


@pytest.mark.parametrize(
    "shape, iterations", [((64, 1000), 5), ((512, 128256), 23), ((512, 4000), 163), ((5, 3), 8), ((1, 1), 1)]
)
def test_the_parts_of_all_iterations_are_the_whole(shape, iterations):
  dim, part = outside._part(shape, iterations)
  firsts = [min(number * part, shape[dim] - part) for number in range(iterations)]
  covered = {first + k for first in firsts for k in range(part)}
  assert covered == set(range(shape[dim]))
  assert iterations * part < 1.3 * shape[dim] or shape[dim] < iterations
