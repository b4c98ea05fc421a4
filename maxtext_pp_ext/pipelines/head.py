# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The weight of a decoder's logits, where its pipeline is to return each stage's copy (`engine/outside.py`)."""

import contextvars
import dataclasses

import jax


@dataclasses.dataclass
class Head:
  """The weight while a decoder runs."""

  weight: jax.Array  # [embed, vocab], in the dtype of the product
  axes: tuple[str | None, ...]  # its logical axes
  copies: jax.Array | None = None  # [stage, embed, vocab], once the pipeline has run


# That of the decoder that is running; None if XLA is to add up the stages' gradients.
current: contextvars.ContextVar[Head | None] = contextvars.ContextVar("head", default=None)
