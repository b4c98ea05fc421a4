# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's distillation trainer, with its losses in the run's `metrics_file`, as other trainers write them."""

from collections.abc import Sequence
import json
import pathlib

import jax
from maxtext.trainers.post_train.distillation import distillation_utils, train_distill


def main(argv: Sequence[str]) -> None:
  (file,) = (pathlib.Path(argument.split("=", 1)[1]) for argument in argv if argument.startswith("metrics_file="))

  def write(name, value, **_):
    if name.endswith("train/loss"):  # as Tunix names it
      with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"learning/loss": float(value)}) + "\n")

  # MaxText 0.2.5 reads this attribute, which Tunix 0.1.7, the last one released, does not have. Nothing is then saved.
  # May go with a Tunix that has it.
  if not hasattr(distillation_utils.tunix_checkpoint_manager.CheckpointManager, "_checkpointer"):
    distillation_utils.MaxTextCheckpointManager._checkpointer = None
  jax.monitoring.register_scalar_listener(write)
  try:
    train_distill.main(argv)
  finally:
    jax.monitoring.unregister_scalar_listener(write)
