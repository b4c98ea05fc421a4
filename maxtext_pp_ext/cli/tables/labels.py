# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the parts of a run's costs are called in tables. JSON has the values of their enums."""

from typing import Any

from maxtext_pp_ext.plan.costs import Costs, Part, Phase, Sent

SENT = {
    Sent.WEIGHTS: "weights",
    Sent.GRADIENTS: "gradients",
    Sent.ACTIVATIONS: "activations",
    Sent.OUTSIDE: "outside the pipeline",
    Sent.DISPATCH: "dispatch",
    Sent.WITHIN_LAYERS: "activations within layers, over axes such as tensor and context",
}
_PHASES = {
    Phase.BACKWARD: "in the pipeline's backward",
    Phase.LOGITS: "at the logits",
    Phase.OUTSIDE: "in the backward of layers outside",
}
_PARTS = {
    Part.PARAMETERS: "parameters",
    Part.MOMENTS: "optimizer's moments",
    Part.COPIES: "weights, cast and in the order of the loop over layers",
    Part.GRADIENTS: "gradients, sharded",
    Part.DOUBLE_BUFFER: "double buffer of weights: current and next",
    Part.ALL_WEIGHTS: "gathered weights of all repeats",
    Part.WEIGHTS_OF_ITERATION: "gathered weights of one iteration",
    Part.WEIGHTS_OF_LAYER: "gathered weights of one layer",
    Part.WEIGHTS_AT_LOGITS: "weights that stay gathered",
    Part.SUMS: "sums of the gradients of a repeat",
    Part.UNREDUCED: "their gradients, not reduced yet",
    Part.GRADIENTS_OF_LAYER: "gradients of a layer",
    Part.GRADIENTS_OF_PARTS: "sum of the gradients of all parts of gradient_accumulation_steps",
    Part.KEPT: "layers' inputs and what remat_policy keeps, for backward",
    Part.KEPT_AGAIN: "copies of what remat_policy keeps, since other arrays are in the host's memory",
    Part.TO_HOST: "what is on its way to the host's memory",
    Part.WAITING: "waiting microbatches, both directions",
    Part.WORK: "one microbatch in a layer, backward",
    Part.WORK_OF_LAYER: "one layer, backward",
    Part.OUTPUTS: "outputs",
    Part.HEAD: "gathered weights outside the pipeline",
    Part.LOGITS: "logits",
    Part.AFTER_LOGITS: "gradient of the logits or of their weights",
}
# Where a repeat of the one stage is a layer, as in a window over a model's layers.
_PHASES_OF_LAYERS = {Phase.BACKWARD: "in the layers' backward"}
_PARTS_OF_LAYERS = {
    Part.ALL_WEIGHTS: "gathered weights of all layers",
    Part.SUMS: "sums of the gradients of a layer",
    Part.HEAD: "gathered weights outside the layers",
}


def phases(stages: int) -> dict[Phase, str]:
  """The labels of phases, of a run with so many stages."""
  return _PHASES if stages > 1 else _PHASES | _PHASES_OF_LAYERS


def parts(stages: int) -> dict[Part, str]:
  """The labels of what takes memory, of a run with so many stages."""
  return _PARTS if stages > 1 else _PARTS | _PARTS_OF_LAYERS


def costs_dict(costs: Costs) -> dict[str, Any]:
  """The costs as JSON has them."""
  return {
      "memory": {"when": costs.worst_phase, "bytes": costs.memory, "total": costs.peak},
      "offloaded": costs.offloaded,
      "on_host": costs.on_host,
      "sent": {"bytes": costs.traffic, "total": costs.sent, "between_slices": costs.between_slices},
  }
