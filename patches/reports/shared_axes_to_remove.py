# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The PartitionSpec of experts' weights, before and after another leaf of the same tree, with MaxText alone.

MAXTEXT_PP_EXT=off DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python patches/reports/shared_axes_to_remove.py
"""

from jax.sharding import PartitionSpec as P
from maxtext.utils import pipeline_utils

axes, experts = ["fsdp"], P("expert", "fsdp")
print("first leaf:", pipeline_utils.remove_gathered_mesh_axes(experts, True, axes))
pipeline_utils.remove_gathered_mesh_axes(P("fsdp"), False, axes)
print("after a leaf of attention:", pipeline_utils.remove_gathered_mesh_axes(experts, True, axes))
