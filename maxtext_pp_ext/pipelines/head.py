# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The weight of a decoder's logits, of which its pipeline is to return each stage's copy (`engine/outside.py`)."""

import contextvars
import dataclasses

import jax

from maxtext_pp_ext.engine import Outside


@dataclasses.dataclass
class Head:
  """The weight while a decoder runs."""

  outside: Outside  # [embed, vocab], in the dtype of the product
  copies: jax.Array | None = None  # [stage, embed, vocab], once the pipeline has run


# That of the decoder that is running; None if XLA is to add up the stages' gradients.
current: contextvars.ContextVar[Head | None] = contextvars.ContextVar("head", default=None)
