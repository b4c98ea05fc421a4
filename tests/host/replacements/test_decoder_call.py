# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A patched MaxText has no patch point for layers without a pipeline."""

import types

import pytest

from maxtext_pp_ext.host.replacements import decoder_call


def test_an_implementation_without_a_pipeline_is_refused_where_it_would_not_run():
  config = types.SimpleNamespace(
      pipeline_impl="circular_bsw",
      ici_pipeline_parallelism=1,
      dcn_pipeline_parallelism=1,
      using_pipeline_parallelism=False,
  )
  with pytest.raises(NotImplementedError, match="patched with patch points that have pipelines only"):
    decoder_call.check(config)
  config.pipeline_impl = "host"
  decoder_call.check(config)
