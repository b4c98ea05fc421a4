# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory of a compiled step."""

import types

import pytest

from maxtext_pp_ext.compiled import step


@pytest.mark.parametrize("platform, offloaded, peak", [("tpu", 0, 9.0), ("tpu", 1 << 30, None), ("cpu", 0, None)])
def test_the_peak_is_that_of_the_device_or_none(platform, offloaded, peak):
  memory = types.SimpleNamespace(
      temp_size_in_bytes=8 * 10**9,
      peak_memory_in_bytes=9 * 10**9,
      argument_size_in_bytes=2 * 10**9,
      host_temp_size_in_bytes=offloaded,
  )
  found = step._memory(types.SimpleNamespace(memory_analysis=lambda: memory), platform)
  assert found["peak_GB"] == peak and found["temp_GB"] == 8.0 and found["arg_GB"] == 2.0
