# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which equations of a jaxpr are calls, and the program that they call."""

from typing import Any

# Calls whose operands are the inner program's inputs, one to one. Functions with their own derivative rule are not
# among them: the rule may use an operand in another way than the function does.
CALLS = frozenset({"pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint"})


def inner_program(eqn: Any) -> tuple[Any, Any]:
  """(jaxpr, its constants) of an equation that runs another program."""
  inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
  return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
