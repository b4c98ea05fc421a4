# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a block keeps and computes again, on a program by hand.

x -> product (10) -> "a" -> product (20) -> "b" -> product (40) -> y; another product (80) of x is "c". Backward needs
what is computed from "b", and "c". It does not need the product of 40.
"""

import numpy as np
import pytest

from maxtext_pp_ext.plan.blocks import Again, Block
from maxtext_pp_ext.plan.operations import Array, Kind, Reader

BYTES = 8.0
KEPT = {"a": (False, True, False, True, False), "b": (False, False, True, True, False)}
KEPT["c"] = (False, False, False, False, True)


def block(**more):
  reader, array = Reader({}), lambda: Array((4,), 2, ((),), BYTES)
  product = lambda operand, flops: reader.add(Kind.PRODUCT, [operand], [array()], flops)[0]
  named = lambda value, name: reader.add(Kind.OTHER, [value], [array()], name=name)[0]
  x = array()
  a = named(product(x, 10.0), "a")
  b = named(product(a, 20.0), "b")
  c = named(product(x, 80.0), "c")
  other = reader.add(Kind.OTHER, [b], [array()])[0]
  product(other, 40.0)
  return Block(reader.operations, [other, c], x, **more)


@pytest.mark.parametrize("policy, again", list(enumerate([110.0, 100.0, 80.0, 80.0, 30.0])))
def test_what_is_not_kept_is_computed_again_from_what_is(policy, again):
  kept, computed = block().under({name: np.array(places) for name, places in KEPT.items()}, 5)
  assert computed[Kind.PRODUCT][policy] == again
  stays = {name: BYTES * places[policy] for name, places in KEPT.items()}
  stays["a"] *= not KEPT["b"][policy]  # nobody reads it then
  assert {name: size[policy] for name, size in kept.items() if name} == stays
  assert kept[None][policy] == (BYTES if again else 0.0)
  assert computed[Again.KEPT_OF_PRODUCTS][policy] == sum(stays.values()) / 2


def test_without_names_all_that_backward_needs_is_computed_again():
  reader, x = Reader({}), Array((4,), 2, ((),), BYTES)
  first, second = (Array((4,), 2, ((),), BYTES) for _ in range(2))
  reader.add(Kind.PRODUCT, [x], [first], 10.0)
  reader.add(Kind.PRODUCT, [first], [second], 20.0)
  kept, again = Block(reader.operations, [first, x], x).under({}, 1)
  assert kept == {None: np.array([BYTES])} and again[Kind.PRODUCT] == np.array([10.0])


def test_outside_of_a_loop_all_that_products_read_and_write_is_kept_whatever_the_policy_says():
  outside, keeps = block(keeps_all=True), {name: np.array(places) for name, places in KEPT.items()}
  kept, again = outside.under(keeps, 5)
  assert not again and all(not kept[name].any() for name in KEPT)
  # x, the products' four results, and what two of them read: "a" and what is computed from "b"
  np.testing.assert_array_equal(kept[None], np.full(5, 7 * BYTES))
  inside, expected = outside.in_loop().under(keeps, 5), block().under(keeps, 5)
  np.testing.assert_equal(inside, expected)


def test_names_are_in_the_order_of_forward():
  assert block().names == ["a", "b", "c"]  # in that of a set a plan's keys would depend on Python's seed of hashes
