# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A weight is gathered in the dtype of its first cast only if every use begins with the same cast."""

import jax
import jax.numpy as jnp
import pytest

from maxtext_pp_ext.engine.programs.precision import cast_on_first_use

WEIGHT = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jnp.ones((2, 4), jnp.bfloat16)


def half(w):
  return w.astype(jnp.bfloat16)


def in_a_scan(w, x):
  return jax.lax.scan(lambda c, row: (c, x * half(row)), 0.0, w)[1]


CAST = {
    "cast": lambda w, x: x @ half(w),
    "cast twice alike": lambda w, x: x @ half(w) + jnp.tanh(x) @ half(w),
    "moved, then cast": lambda w, x: x @ half(w.T.reshape(4, 4)[:, :4]),
    "in a call": lambda w, x: jax.jit(lambda w: x @ half(w))(w),
    "rematerialised": jax.checkpoint(lambda w, x: x @ half(w)),
    "a slice in a loop": in_a_scan,
}
OTHERWISE = {
    "uncast": lambda w, x: x.astype(jnp.float32) @ w,
    "cast and uncast": lambda w, x: (x @ half(w)).astype(jnp.float32) + w.sum(),
    "cast, and uncast in a call": lambda w, x: (x @ half(w)).astype(jnp.float32) + jax.jit(jnp.sum)(w),
    "computed with before it is cast": lambda w, x: x @ half(2 * w),
    "cast to two dtypes": lambda w, x: (x @ half(w)).astype(jnp.float32) @ w.astype(jnp.float16).astype(jnp.float32),
    "cast to a wider dtype": lambda w, x: x @ half(w.astype(jnp.float64)),
    "returned": lambda w, x: (x @ half(w), w),
    "carried by a loop": lambda w, x: jax.lax.fori_loop(0, 2, lambda _, c: c, w).sum() + (x @ half(w)).sum(),
    "not used": lambda w, x: x,
}


@pytest.mark.parametrize("fn", CAST.values(), ids=CAST.keys())
def test_what_is_cast_wherever_it_is_used_can_be_cast_before(fn):
  assert cast_on_first_use(lambda ws, x: fn(ws[0], x), [WEIGHT], X) == [jnp.bfloat16]


@pytest.mark.parametrize("fn", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_what_is_used_in_any_other_way_cannot(fn):
  with jax.enable_x64(True):
    assert cast_on_first_use(lambda ws, x: fn(ws[0], x), [WEIGHT], X) == [None]
