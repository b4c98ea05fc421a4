# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What MaxText gives the layers that it scans over reaches them in a window, too, or is refused by name."""

import types

import pytest

from maxtext_pp_ext.errors import UnsupportedError
from maxtext_pp_ext.host.replacements import scanned_layers

ARGS = (None, None, True, "train")  # segment ids, positions, deterministic, model mode


def decoder(**keys):
  values = {
      "pipeline_impl": "circular_bsw",
      "ici_pipeline_parallelism": 1,
      "dcn_pipeline_parallelism": 1,
      "decoder_block": "llama2",
      **keys,
  }
  return types.SimpleNamespace(config=types.SimpleNamespace(**values), model_mode="train")


def of_host(*args, **kwargs):
  return "MaxText's scan"


@pytest.mark.parametrize("key", ["bidirectional_mask", "kv_caches_stacked", "decoder_input_tokens"])
def test_an_array_that_microbatches_do_not_carry_is_refused_by_name(key):
  with pytest.raises(UnsupportedError, match=f"cannot be given {key}.*set pipeline_impl=host"):
    scanned_layers.apply(of_host, decoder(), None, None, *ARGS, length=2, slot=None, unroll=1, **{key: [1]})


@pytest.mark.parametrize(
    "keys, mode, length",
    [({"pipeline_impl": "host"}, "train", 2), ({}, "prefill", 2), ({}, "train", 0)],
    ids=["MaxText's implementation", "prefill", "no layers"],
)
def test_what_is_not_trained_by_an_implementation_of_ours_runs_in_maxtexts_scan(keys, mode, length):
  found = scanned_layers.apply(of_host, decoder(**keys), None, None, *ARGS[:3], mode, length=length, slot=1)
  assert found == "MaxText's scan"
