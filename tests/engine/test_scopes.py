# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The named scopes of a pipeline's program, by which a profiler's trace is read (docs/profiling.md)."""

import collections

from tests.engine.common import build, gradient_program, inner_jaxprs

# Operation: the innermost of our scopes that it may be in. A sharding constraint is where XLA puts a transfer.
WHERE = {
    "ppermute": {"permute"},
    "all_gather": {"gather", "enter", "leave"},  # backward does the same in the scope of what it transposes
    "reduce_scatter": {"reduce", "enter", "leave"},
    "dot_general": {"stage"},
}
OURS = {scope for scopes in WHERE.values() for scope in scopes} | {"repeat"}


def places(jaxpr, outer=()):
  """(operation, direction, innermost of our scopes) of each operation, with what is around it."""
  for eqn in jaxpr.eqns:
    scopes = (*outer, *str(eqn.source_info.name_stack).replace("(", "/").replace(")", "/").split("/"))
    directions = [scope for scope in scopes if scope.startswith("pipeline_")]
    inner = [scope for scope in scopes if scope in OURS]
    yield eqn.primitive.name, directions[-1] if directions else None, inner[-1] if inner else None
    for each in inner_jaxprs(eqn):
      yield from places(each, scopes)


def test_transfers_and_products_are_in_the_scope_that_names_them():
  built = build(stages=2, repeats=2, microbatches=4, pipeline_impl="circular_bsw", ici_fsdp_parallelism=4)
  found = collections.defaultdict(set)
  for name, direction, scope in places(gradient_program(built)):
    found[name].add((direction, scope))
  for name, scopes in WHERE.items():
    assert {scope for _, scope in found[name]} == scopes, name
    assert {direction for direction, _ in found[name]} <= {"pipeline_forward", "pipeline_backward"}, name
  for name in ("ppermute", "dot_general", "all_gather"):
    assert {direction for direction, _ in found[name]} == {"pipeline_forward", "pipeline_backward"}, name
