# Copyright 2023-2025 Google LLC
# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's own sets of XLA flags for TPUs, which its wheel does not contain, and two more. No JAX.

Names and flags are those of benchmarks/xla_flags_library.py in github.com/AI-Hypercomputer/maxtext, as commit 5b2712d6 of
2026-01-27 left it and e591f30c of 2026-08-22 still has it. Left out: what logs, checks for corrupted data, or serves
Pathways, and CUSTOM_VMEM_LIMIT_FLAG, which needs a number.
"""

from collections.abc import Collection, Iterator, Sequence
import difflib
import re

KEY = "compile_xla_flags"
_FLAG = re.compile(r"--(\w+)=(.+)")  # what MaxText takes in that key

_TO_SPARSECORE = """
    --xla_tpu_use_tc_device_shape_on_sc=true
    --xla_sc_enable_instruction_fusion=false
    --xla_sc_disjoint_spmem=false
    --xla_sc_disable_megacore_partitioning=true"""


def _fusion(kinds: str, *, asynchronous: str) -> str:
  """Continuation fusion: computes while transfers of these kinds run."""
  return f"""
    --xla_tpu_enable_async_collective_fusion=true
    --xla_tpu_enable_async_collective_fusion_fuse_{kinds}=true
    --xla_tpu_enable_async_collective_fusion_multiple_steps=true
    --xla_tpu_overlap_compute_collective_tc=true
    {asynchronous}"""


def _offloaded(*kinds: str) -> str:
  """Transfers of these kinds run on the SparseCores."""
  return _TO_SPARSECORE + "".join(f"""
    --xla_tpu_enable_async_collective_fusion_fuse_{kind}=false
    --xla_tpu_enable_sparse_core_collective_offload_{kind}=true
    --xla_tpu_enable_{kind}_offload_tracing=true""" for kind in kinds)


_SCATTER_FUSION = """
    --xla_tpu_use_minor_sharding_for_major_trivial_input=true
    --xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1"""

# Name -> flags, separated by white space.
SETS = {
    "DENSE_VMEM_LIMIT_FLAG": "--xla_tpu_scoped_vmem_limit_kib=98304",
    "MOE_VMEM_LIMIT_FLAG": "--xla_tpu_scoped_vmem_limit_kib=81920",
    "CF_FOR_ALL_GATHER": _fusion("all_gather", asynchronous="--xla_enable_async_all_gather=true"),
    "CF_FOR_ALL_REDUCE": _fusion("all_reduce", asynchronous="--xla_enable_async_all_reduce=true"),
    "CF_FOR_ALL_REDUCE_AND_ALL_GATHER": _fusion(
        "all_gather", asynchronous="--xla_enable_async_all_gather=true --xla_enable_async_all_reduce=true"
    ),
    "ENABLE_SPARSECORE_OFFLOADING_BASE_FLAGS": _TO_SPARSECORE,
    "ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR": _offloaded("reduce_scatter", "all_gather", "all_reduce"),
    "ENABLE_SPARSECORE_OFFLOADING_FOR_REDUCE_SCATTER": _offloaded("reduce_scatter"),
    "ENABLE_SPARSECORE_OFFLOADING_FOR_ALL_GATHER": _offloaded("all_gather"),
    "ENABLE_SPARSECORE_OFFLOADING_FOR_ALL_REDUCE": _offloaded("all_reduce"),
    "LAYOUT_FOR_ALL_REDUCE_SCATTER": f"{_SCATTER_FUSION} --xla_tpu_assign_all_reduce_scatter_layout=true",
    "REDUCE_SCATTER_FUSION": _SCATTER_FUSION,
    "DATA_PARALLEL_OVERLAP": """
    --xla_tpu_enable_data_parallel_all_reduce_opt=true
    --xla_tpu_data_parallel_opt_different_sized_ops=true""",
    "HOST_OFFLOAD_FLAGS": """
    --xla_tpu_enable_all_experimental_scheduler_features=true
    --xla_tpu_enable_scheduler_memory_pressure_tracking=true
    --xla_tpu_host_transfer_overlap_limit=24
    --xla_tpu_aggressive_opt_barrier_removal=ENABLED
    --xla_lhs_prioritize_async_depth_over_stall=ENABLED
    --xla_tpu_enable_ag_backward_pipelining=true
    --xla_should_allow_loop_variant_parameter_in_chain=ENABLED
    --xla_should_add_loop_invariant_op_in_chain=ENABLED
    --xla_max_concurrent_host_send_recv=100
    --xla_tpu_scheduler_percent_shared_memory_limit=100
    --xla_latency_hiding_scheduler_rerun=2""",
    "PIPELINING_FLAGS": "--xla_tpu_iova_dma_chunk_size_bytes=16777216",
    "DISABLE_BUNDLE_AWARE_COST_MODEL": "--xla_tpu_use_bundle_aware_cost_model_for_fusions=false",
    "DISABLE_COLLECTIVE_MATMUL": "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    "DISABLE_MEGACORE_FUSION_ALLOW_AGS": "--xla_tpu_megacore_fusion_allow_ags=false",
    "ENABLE_ASYNC_COLLECTIVE_PERMUTE": "--xla_enable_async_collective_permute=true",
    # None of MaxText's: the dispatch of tokens to experts overlaps with compute.
    "ENABLE_ASYNC_RAGGED_ALL_TO_ALL": "--xla_tpu_enable_async_ragged_all_to_all=true",
    # Nor is this: the next transfer waits in the SparseCores' queue while one runs. So several hide behind one product.
    # Recipes for tpu7x have it (github.com/AI-Hypercomputer/tpu-recipes, c8cfe2f, training/ironwood).
    "SPARSECORE_QUEUING": _offloaded("reduce_scatter", "all_gather", "all_reduce")
    + " --xla_tpu_enable_sparse_core_offload_queuing_in_lhs=true",
}


def named(name: str) -> str:
  """Returns the name of a set. Raises ValueError, with the nearest name and all of them, if there is none such."""
  if name in SETS:
    return name
  near = difflib.get_close_matches(name.upper(), SETS, n=1)
  meant = f" Did you mean {near[0]}?" if near else ""
  raise ValueError(f"--flags {name}: there is no such set of XLA flags.{meant} There are {', '.join(SETS)}.")


def joined(own: str, names: Sequence[str], without: Collection[str] = ()) -> str:
  """Returns a value of `compile_xla_flags`: `own`, then the flags of the sets that it does not have.

  Args:
    own: the value without the sets.
    names: of sets.
    without: names of flags of these sets that are left out, such as those that the compiler refuses.

  Raises:
    ValueError: a name is unknown, `own` is not a list of flags, a flag would have two values, or a flag to leave out is
      in none of the sets.
  """
  offered = [(flag, value, f"--flags {name}") for name in names for flag, value in _flags(SETS[named(name)])]
  if missing := set(without).difference(flag for flag, _, _ in offered):
    raise ValueError(f"--without {' '.join(sorted(missing))}: the sets {', '.join(names)} have no such flag.")
  users = [(flag, value, f"{KEY}={own}") for flag, value in _flags(own)]
  found: dict[str, tuple[str, str]] = {}
  for flag, value, source in [*users, *(each for each in offered if each[0] not in without)]:
    before, whose = found.setdefault(flag, (value, source))
    if value.casefold() != before.casefold():
      if whose == source:
        raise ValueError(f"{source}: --{flag} is {before} and {value}. Leave one of them out.")
      raise ValueError(f"--{flag} is {before} by {whose}, and {value} by {source}. Leave one of them out.")
  return " ".join(f"--{flag}={value}" for flag, (value, _) in found.items())


def text(name: str, without: Collection[str] = ()) -> str:
  """The flags of a set, without those named in `without`."""
  return " ".join(f"--{flag}={value}" for flag, value in _flags(SETS[name]) if flag not in without)


def _flags(text: str) -> Iterator[tuple[str, str]]:
  for token in text.replace("\\", " ").split():
    if not (match := _FLAG.fullmatch(token)):
      raise ValueError(f"{KEY}={text}: {token!r} is not a flag of the form --name=value. Write it so, or leave it out.")
    yield match[1], match[2]
