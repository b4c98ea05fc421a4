# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The search of sets of XLA flags, on steps whose seconds are known."""

from maxtext_pp_ext.compiled import best_flags, flags

VMEM, MOE_VMEM, MATMUL = "DENSE_VMEM_LIMIT_FLAG", "MOE_VMEM_LIMIT_FLAG", "DISABLE_COLLECTIVE_MATMUL"
SPARSECORES = "ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR"
PIPELINING = "PIPELINING_FLAGS"


def step(gains, base=10.0):
  """(sets) -> a step of `base` seconds, less the gain of each set; None for a gain is a set that is refused."""
  asked = []

  def compiled(sets):
    asked.append(sets)
    found = [gains.get(name, 0.0) for name in sets]
    if None in found or base is None and not sets:
      return {"failure": "refused"}
    return {"projection": {"step_s": (base or 10.0) - sum(found)}}

  return compiled, asked


def test_the_best_sets_are_found_one_after_another():
  compiled, asked = step({VMEM: 2.0, MATMUL: 1.0, SPARSECORES: 3.0, PIPELINING: 0.5, "DATA_PARALLEL_OVERLAP": -1.0})
  best, rows = best_flags.search(compiled)
  assert best == (SPARSECORES, VMEM, MATMUL)
  assert list(rows) == asked and len(set(asked)) == len(asked)
  assert set(asked) >= {(), *((name,) for name in flags.SETS)}
  # Combinations have sets that alone made the step faster. Three are the most.
  pairs = [sets for sets in asked if len(sets) == 2]
  assert set(pairs) == {(SPARSECORES, name) for name in (VMEM, MATMUL, PIPELINING)}
  assert {sets for sets in asked if len(sets) > 2} == {(SPARSECORES, VMEM, name) for name in (MATMUL, PIPELINING)}


def test_a_set_that_gains_nothing_beside_the_best_is_left_out():
  compiled, _ = step({VMEM: 2.0})
  best, rows = best_flags.search(lambda sets: compiled(sets if VMEM in sets else ()))
  assert best == (VMEM,) and max(map(len, rows)) == 1


def test_without_a_gain_no_set_is_best():
  assert best_flags.search(step({VMEM: 1e-4})[0])[0] == ()


def test_sets_that_the_compiler_refuses_are_not_best():
  best, rows = best_flags.search(step({VMEM: None, MATMUL: 1.0})[0])
  assert best == (MATMUL,) and rows[VMEM,] == {"failure": "refused"}


def test_a_set_may_make_a_step_compile():
  best, _ = best_flags.search(step({MATMUL: 1.0}, base=None)[0])
  assert best == (MATMUL,)
  assert best_flags.search(lambda sets: {"failure": "too large"})[0] == ()


def test_sets_that_contradict_given_flags_or_add_none_are_not_tried():
  compiled, asked = step({VMEM: 1.0, MOE_VMEM: 0.5})
  assert best_flags.search(compiled)[0] == (VMEM,)
  assert (VMEM, MOE_VMEM) not in asked
  compiled, asked = step({})
  best_flags.search(compiled, own=flags.SETS[MOE_VMEM].strip())
  assert (VMEM,) not in asked and (MOE_VMEM,) not in asked and (MATMUL,) in asked
