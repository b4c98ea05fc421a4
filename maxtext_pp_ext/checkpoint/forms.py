# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trees that MaxText saves: those of its trainer, which can be converted, and others.

Trainer: `{"params": {"params": weights}, "opt_state": …, "step": …}`, or only its "params".

Trainer with DiLoCo: `{"inner_state": such a tree per replica, "params": {"params": weights}, "outer_opt_state": …,
"step": …}`.

Inference: weights, or `{"base": weights}`, with each array below a "value".
"""

from collections.abc import Collection, Mapping
from typing import Any

PARAMETERS = ("params", "params")
VALUE = "value"
_DILOCO = "inner_state"


def is_of_trainer(tree: Mapping[str, Any]) -> bool:
  """Returns whether weights are where MaxText's trainer has them, with DiLoCo or without."""
  outer, inner = PARAMETERS
  return inner in tree.get(outer, ())


def weights(tree: Mapping[str, Any]) -> Any:
  """Returns the part of a checkpoint's tree that has the model's weights; empty for other trees."""
  outer, inner = PARAMETERS
  if is_of_trainer(tree):
    return tree[outer][inner]
  root = tree.get("base", tree)
  return root if "decoder" in root else {}


def why_not_converted(names: Collection[str]) -> str | None:
  """Returns why a tree with these outermost names cannot be converted, and what to do; None if no reason is known."""
  if _DILOCO in names:
    return (
        f"Checkpoints of DiLoCo cannot be converted: {_DILOCO} holds a state for each replica. Continue in the layout of "
        "the checkpoint. Or convert its weights alone: in that layout, run a step with enable_diloco=False, "
        "learning_rate=0 and load_parameters_path, and convert the checkpoint of that run."
    )
  if PARAMETERS[0] not in names and ("base" in names or "decoder" in names):
    return (
        "Checkpoints for inference cannot be converted: this one has weights only, each array below a name of its own. "
        "Convert the trainer's checkpoint from which it was made, and make it again."
    )
  return None
