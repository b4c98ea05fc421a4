# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The buffers of a weight's window: reading one of them, and changing one of them.

Most windows are one array with a leading axis of buffers. The compiler puts the choice of a buffer into the matrix
product that reads the weight. A kernel reads its operands as they are, so a buffer that is chosen for it would be copied
in every iteration. Windows of weights that kernels read are several arrays, apart from each other, and the choice is made
around the kernel (`programs/one_of.py`).

The functions act on one stage's arrays on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# [B, F, …], or B arrays [F, …].
Buffers = jax.Array | tuple[jax.Array, ...]
# (buffers [B, F, …], number of one of them) -> a result.
OfStacked = Callable[[jax.Array, jax.Array | int], Any]


def count(buffers: Buffers) -> int:
  """B."""
  return len(buffers) if isinstance(buffers, tuple) else buffers.shape[0]


def read(buffers: Buffers, number: jax.Array, of: OfStacked) -> jax.Array:
  """What is computed of one buffer.

  Args:
    buffers: the buffers.
    number: number of the buffer.
    of: computes it from stacked buffers.
  """
  if not isinstance(buffers, tuple):
    return of(buffers, number)
  branches = [lambda *each, k=k: of(each[k][None], 0) for k in range(len(buffers))]
  return jax.lax.switch(number, branches, *buffers)


def change(buffers: Buffers, number: jax.Array, of: OfStacked) -> Buffers:
  """The buffers, one of them changed.

  Args:
    buffers: the buffers.
    number: number of the buffer.
    of: computes stacked buffers from stacked buffers, and changes no other one.
  """
  if not isinstance(buffers, tuple):
    return of(buffers, number)
  branches = [lambda *each, k=k: (*each[:k], of(each[k][None], 0)[0], *each[k + 1 :]) for k in range(len(buffers))]
  return jax.lax.switch(number, branches, *buffers)
