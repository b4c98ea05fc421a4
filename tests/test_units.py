# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats numbers of bytes."""

import pytest

from maxtext_pp_ext import units


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (2048, "2.05 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (87.9e9, "87.9 GB"),
        (999.9e9, "1 TB"),
        (1234.6e12, "1235 TB"),
    ],
)
def test_bytes_have_three_digits_and_a_decimal_unit(count, text):
  assert units.bytes_text(count) == text
