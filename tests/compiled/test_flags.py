# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's sets of XLA flags: which there are, and what contradicts what."""

import itertools

import pytest

from maxtext_pp_ext.compiled import flags


@pytest.mark.parametrize("name", flags.SETS)
def test_each_set_is_a_list_of_flags(name):
  joined = flags.joined("", [name])
  assert joined and all(token.startswith("--xla_") and "=" in token for token in joined.split())


def test_sets_and_the_users_own_flags_are_joined_each_flag_once():
  own = "--xla_a=1 \\\n --xla_tpu_scoped_vmem_limit_kib=98304"
  joined = flags.joined(own, ["DENSE_VMEM_LIMIT_FLAG", "LAYOUT_FOR_ALL_REDUCE_SCATTER", "REDUCE_SCATTER_FUSION"])
  assert joined.split() == [
      "--xla_a=1",
      "--xla_tpu_scoped_vmem_limit_kib=98304",
      "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
      "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
      "--xla_tpu_assign_all_reduce_scatter_layout=true",
  ]
  assert flags.joined("", []) == ""
  assert flags.joined("--xla_a=1", ["DENSE_VMEM_LIMIT_FLAG"], ["xla_tpu_scoped_vmem_limit_kib"]) == "--xla_a=1"


WRONG = {
    "another set": (
        ("", ["DENSE_VMEM_LIMIT_FLAG", "MOE_VMEM_LIMIT_FLAG"]),
        "98304 by --flags DENSE.*81920 by --flags MOE",
    ),
    "the user's": (
        ("--xla_tpu_scoped_vmem_limit_kib=1", ["DENSE_VMEM_LIMIT_FLAG"]),
        "1 by compile_xla_flags=.*98304 by --flags DENSE",
    ),
    "itself": (("--xla_a=1 --xla_a=2", []), "--xla_a is 1 and 2"),
    "not in the sets": (("", ["DENSE_VMEM_LIMIT_FLAG"], ["xla_a"]), "--without xla_a: the sets DENSE_VMEM_LIMIT_FLAG"),
    "no flag": (("-O3", []), "'-O3' is not a flag of the form --name=value"),
    "no set": (("", ["DENSE_VMEM_LIMIT"]), "Did you mean DENSE_VMEM_LIMIT_FLAG.*MOE_VMEM_LIMIT_FLAG"),
}


@pytest.mark.parametrize("given, words", WRONG.values(), ids=WRONG.keys())
def test_what_contradicts_or_is_unknown_is_refused_with_both_values(given, words):
  with pytest.raises(ValueError, match=words):
    flags.joined(*given)


def test_sets_that_contradict_each_other_are_those_that_maxtext_offers_as_alternatives():
  def contradict(one, other):
    try:
      flags.joined("", [one, other])
    except ValueError:
      return True
    return False

  found = [pair for pair in itertools.combinations(flags.SETS, 2) if contradict(*pair)]
  assert ("DENSE_VMEM_LIMIT_FLAG", "MOE_VMEM_LIMIT_FLAG") in found
  # Continuation fusion or the SparseCores, not both (upstream's comment).
  assert all("VMEM" in one or (one.startswith("CF_") and "SPARSECORE" in other) for one, other in found)
