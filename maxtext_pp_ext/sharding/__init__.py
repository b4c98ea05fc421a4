# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logical axes to mesh axes to NamedSharding, for Flax NNX."""

from maxtext_pp_ext.sharding.constrain import constrain, divisible_spec
from maxtext_pp_ext.sharding.explicit import automatic, is_explicit, run_automatic, spec_of
from maxtext_pp_ext.sharding.resolve import gathered_last, gathered_spec, logical_axes, resolve

__all__ = [
    "automatic",
    "constrain",
    "divisible_spec",
    "gathered_last",
    "gathered_spec",
    "is_explicit",
    "logical_axes",
    "resolve",
    "run_automatic",
    "spec_of",
]
