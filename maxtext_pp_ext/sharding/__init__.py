# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps logical axes to mesh axes to NamedSharding, for Flax NNX. Imports neither MaxText nor the rest of this package."""

from maxtext_pp_ext.sharding.conflicts import Conflict, conflicts, Kind, ShardingConflictError, ShardingConflictWarning
from maxtext_pp_ext.sharding.constrain import automatic, constrain, divisible_spec, is_explicit, run_automatic, spec_of
from maxtext_pp_ext.sharding.create import CheckpointMismatchError, create_sharded, restore_sharded, shard_batch
from maxtext_pp_ext.sharding.explain import explain, Explanation, picture
from maxtext_pp_ext.sharding.resolve import gathered_last, gathered_spec, Resolution, resolution, resolve
from maxtext_pp_ext.sharding.variables import Layout, layouts, logical_axes, named_shardings, unwrap

__all__ = [
    "CheckpointMismatchError",
    "Conflict",
    "Explanation",
    "Kind",
    "Layout",
    "Resolution",
    "ShardingConflictError",
    "ShardingConflictWarning",
    "automatic",
    "conflicts",
    "constrain",
    "create_sharded",
    "divisible_spec",
    "explain",
    "gathered_last",
    "gathered_spec",
    "is_explicit",
    "layouts",
    "logical_axes",
    "named_shardings",
    "picture",
    "resolution",
    "resolve",
    "restore_sharded",
    "run_automatic",
    "shard_batch",
    "spec_of",
    "unwrap",
]
