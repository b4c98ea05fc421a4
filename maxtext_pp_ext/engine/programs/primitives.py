# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the rewrites of programs know about JAX's primitives: one table."""

import enum

from maxtext_pp_ext.jax_private import JaxprEqn


class Trait(enum.Flag):
  """What is true of a primitive."""

  # It runs an inner program, whose inputs are its operands, one to one. Functions with a derivative rule of their own are
  # left out: the rule may use an operand in another way than the function does.
  CALL = enum.auto()
  CHECKPOINT = enum.auto()  # a call that is rematerialised
  LINEAR = enum.auto()  # it is linear in all operands together, and acts on each summand alone
  MOVES = enum.auto()  # it moves elements, or lays them out, and computes nothing: it commutes with a cast
  PASSES = enum.auto()  # it may stand between two layers without being a part of either
  RESHAPES = enum.auto()  # it changes shape, layout or name, and not the elements
  REPEATS = enum.auto()  # its result repeats or converts the operand's elements
  SAME_MEMORY = enum.auto()  # the elements stay where they are in memory
  SAME_DIMENSIONS = enum.auto()  # the dimensions stay what they are
  LONG = enum.auto()  # it takes long: products, kernels, loops


def _table() -> dict[str, Trait]:
  t = Trait
  moves = t.MOVES | t.PASSES
  return {
      "add_any": t.LINEAR,
      "broadcast_in_dim": moves | t.LINEAR | t.REPEATS,
      "cond": t.LONG,
      "convert_element_type": t.PASSES | t.LINEAR | t.REPEATS | t.SAME_DIMENSIONS,
      "copy": moves | t.LINEAR | t.REPEATS | t.SAME_MEMORY | t.SAME_DIMENSIONS,
      "custom_vjp_call": t.LONG,
      "device_put": t.SAME_DIMENSIONS,
      "dot_general": t.LONG,
      "eval_jaxpr": t.CALL,
      "jit": t.CALL,
      "name": t.PASSES | t.RESHAPES | t.SAME_DIMENSIONS,
      "neg": t.LINEAR,
      "optimization_barrier": t.PASSES | t.SAME_DIMENSIONS,
      "pallas_call": t.LONG,
      "ragged_dot_general": t.LONG,
      "reduce_sum": t.LINEAR,
      "remat2": t.CALL | t.CHECKPOINT,
      "reshape": moves | t.LINEAR | t.RESHAPES | t.REPEATS | t.SAME_MEMORY,
      "reshard": moves,
      "scan": t.LONG,
      "shard_map": t.LONG,
      "sharding_constraint": moves | t.RESHAPES | t.SAME_MEMORY | t.SAME_DIMENSIONS,
      "slice": moves,
      "squeeze": moves | t.LINEAR | t.RESHAPES | t.SAME_MEMORY,
      "transpose": moves | t.LINEAR | t.RESHAPES,
      "while": t.LONG,
  }


TRAITS = _table()


def has(eqn: JaxprEqn, trait: Trait) -> bool:
  """Whether an operation's primitive has a trait. Primitives that are not in the table have none."""
  return trait in TRAITS.get(eqn.primitive.name, Trait(0))


def is_call(eqn: JaxprEqn) -> bool:
  """Whether an operation runs an inner program on its operands."""
  return has(eqn, Trait.CALL)


def runs_program(eqn: JaxprEqn) -> bool:
  """Whether an operation runs an inner program: on its operands, or each device on its parts of them."""
  return is_call(eqn) or eqn.primitive.name == "shard_map"
