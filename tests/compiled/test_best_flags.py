# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The search of sets of XLA flags, on steps whose seconds are known."""

import pytest

from maxtext_pp_ext.compiled import best_flags, flags

VMEM, MOE_VMEM, MATMUL = "DENSE_VMEM_LIMIT_FLAG", "MOE_VMEM_LIMIT_FLAG", "DISABLE_COLLECTIVE_MATMUL"
SPARSECORES, PIPELINING = "ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR", "PIPELINING_FLAGS"
# A flag of each set, which none before it in flags.SETS has.
FLAG = {
    VMEM: "xla_tpu_scoped_vmem_limit_kib=98304",
    MOE_VMEM: "xla_tpu_scoped_vmem_limit_kib=81920",
    MATMUL: "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    PIPELINING: "xla_tpu_iova_dma_chunk_size_bytes=16777216",
    SPARSECORES: "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true",
}


def step(gains, base=10.0, lacked=()):
  """(XLA flags) -> figures of a step of `base` seconds, less the gain of each set; None for a gain: it is refused.

  `lacked` are names of flags that the compiler does not have. With None for `base` the step needs a set to be compiled.
  """
  asked = []

  def compiled(given):
    xla_flags = given.value
    asked.append(given)
    for flag in lacked:
      if f"--{flag}=" in xla_flags:
        return {"failure": f"INVALID_ARGUMENT: No such compile option: '{flag}'"}
    found = [gain for name, gain in gains.items() if FLAG[name] in xla_flags]
    if None in found or (base is None and not found):
      return {"failure": "refused"}
    return {"projection": {"step_s": (base or 10.0) - sum(found)}}

  return compiled, asked


def sets_of(tried):
  return [each.flags.sets for each in tried]


def test_the_best_sets_are_found_one_after_another():
  compiled, asked = step({VMEM: 2.0, MATMUL: 1.0, PIPELINING: 0.5, SPARSECORES: -1.0})
  best, tried = best_flags.search(compiled)
  assert best.flags.sets == (VMEM, MATMUL, PIPELINING) and best.seconds == 6.5
  assert best.flags.value == " ".join(f"--{FLAG[name]}" for name in best.flags.sets)
  assert [each.flags for each in tried] == asked and len(set(sets_of(tried))) == len(tried)
  assert set(sets_of(tried)) >= {(), *((name,) for name in flags.SETS)}
  # Combinations have sets that alone made the step faster. Three are the most.
  assert [sets for sets in sets_of(tried) if len(sets) > 1] == [(VMEM, PIPELINING), (VMEM, MATMUL), best.flags.sets]


def test_a_set_that_gains_nothing_beside_the_best_is_left_out():
  compiled, _ = step({VMEM: 2.0})
  best, tried = best_flags.search(lambda given: compiled(given if given.sets == (VMEM,) else best_flags.Flags("")))
  assert best.flags.sets == (VMEM,) and max(map(len, sets_of(tried))) == 1


def test_without_a_gain_no_set_is_best():
  assert best_flags.search(step({VMEM: 1e-4})[0])[0].flags.sets == ()


def test_sets_that_the_compiler_refuses_are_not_best():
  best, tried = best_flags.search(step({VMEM: None, MATMUL: 1.0})[0])
  assert best.flags.sets == (MATMUL,)
  (refused,) = [each for each in tried if each.flags.sets == (VMEM,)]
  assert refused.figures == {"failure": "refused"}


def test_flags_that_the_compiler_lacks_are_left_out_of_their_sets():
  lacked = ("xla_sc_disjoint_spmem", "xla_tpu_use_tc_device_shape_on_sc")
  best, tried = best_flags.search(step({SPARSECORES: 2.0, VMEM: 1.0}, lacked=lacked)[0])
  assert (
      best.flags.sets == (SPARSECORES, VMEM)
      and best.flags.without == lacked
      and not any(flag in best.flags.value for flag in lacked)
  )
  assert all(each.flags.without in ((), lacked) for each in tried) and not tried[0].flags.without
  assert all("failure" not in each.figures for each in tried)


def test_a_failure_over_a_flag_of_the_run_is_a_failure():
  compiled, asked = step({}, lacked=["xla_a"])
  best, tried = best_flags.search(compiled, own="--xla_a=1")
  assert best.flags.sets == () and all("xla_a" in each.figures["failure"] for each in tried) and len(asked) == len(tried)


def test_a_set_may_make_a_step_compile():
  best, _ = best_flags.search(step({MATMUL: 1.0}, base=None)[0])
  assert best.flags.sets == (MATMUL,)
  assert best_flags.search(lambda given: {"failure": "too large"})[0].flags.sets == ()


def test_sets_that_contradict_given_flags_or_add_none_are_not_tried():
  best, tried = best_flags.search(step({VMEM: 1.0, MOE_VMEM: 0.5})[0])
  assert best.flags.sets == (VMEM,) and (VMEM, MOE_VMEM) not in sets_of(tried)
  own = f"--{FLAG[MOE_VMEM]}"
  best, tried = best_flags.search(step({MATMUL: 1.0})[0], own=own)
  assert best.flags.value == f"{own} --{FLAG[MATMUL]}"
  assert (VMEM,) not in sets_of(tried) and (MOE_VMEM,) not in sets_of(tried)


def test_a_step_that_is_refused_whatever_the_flags_is_tried_once():
  best, tried = best_flags.search(lambda given: {"failure": "3 stages of 4 layers", "refused": True})
  assert best.flags.sets == () and len(tried) == 1


def test_flags_that_cannot_be_read_are_refused_before_anything_is_compiled():
  with pytest.raises(ValueError, match="is not a flag of the form"):
    best_flags.search(lambda given: pytest.fail("compiled"), own="xla_foo")
