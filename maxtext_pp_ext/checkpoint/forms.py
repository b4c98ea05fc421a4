# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trees that MaxText saves: those of its trainer, which can be converted, and others.

The trainer's: `{"params": {"params": weights}, "opt_state": …, "step": …}`, or without all but the first.

Its DiLoCo's: `{"inner_state": the same of each replica, "params": {"params": weights}, "outer_opt_state": …, "step": …}`.

For inference: weights, or `{"base": weights}`, with each array below a "value".
"""

from collections.abc import Collection, Mapping
from typing import Any

PARAMETERS = ("params", "params")
VALUE = "value"
_DILOCO = "inner_state"


def is_of_trainer(tree: Mapping[str, Any]) -> bool:
  """Whether weights are where MaxText's trainer has them, with DiLoCo or without."""
  outer, inner = PARAMETERS
  return inner in tree.get(outer, ())


def weights(tree: Mapping[str, Any]) -> Any:
  """The part of a checkpoint's tree that has the model's weights; empty if it is none of these."""
  outer, inner = PARAMETERS
  if is_of_trainer(tree):
    return tree[outer][inner]
  root = tree.get("base", tree)
  return root if "decoder" in root else {}


def why_not_converted(names: Collection[str]) -> str | None:
  """Why a checkpoint cannot be converted, and what to do instead; None if nothing is known against it.

  Args:
    names: the outermost names of its tree.
  """
  if _DILOCO in names:
    return (
        f"Checkpoints of DiLoCo cannot be converted: below {_DILOCO} they have a state for each replica. Go on in the "
        "layout that it has. Or take its weights alone: in that layout, run a step with enable_diloco=False, "
        "learning_rate=0 and load_parameters_path, and convert the checkpoint of that run."
    )
  if PARAMETERS[0] not in names and ("base" in names or "decoder" in names):
    return (
        "Checkpoints for inference cannot be converted: this one has weights only, each array below a name of its own. "
        "Convert the trainer's checkpoint that it was made from, and make it anew."
    )
  return None
