# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of MaxText's logical axes: those of activations and of stacked stages, and those without a rule."""

from collections.abc import Iterable
import functools
from typing import Any

from maxtext_pp_ext.sharding.resolve import mesh_axes, resolve

ACTIVATION_AXES = ("activation_batch", "activation_length", "activation_embed")
LOGITS_AXES = ("activation_embed_and_logits_batch", "activation_length", "activation_vocab")
# A mesh axis bound to one of these shards the batch or the sequence that a stage computes on.
DATA_AXES = (
    *("activation_batch", "activation_batch_attn", "activation_batch_moe"),
    *("activation_length", "activation_length_attn", "activation_length_moe"),
)
STAGE_AXES = ("circular_repeats", "layers")
# Names for which MaxText's default rules have none (MaxText 0.2.5): dimensions of DeepSeek 4, layers outside a pipeline,
# and layers that are stacked in a stage. They are replicated by design.
_WITHOUT_RULE = (
    *("layers_outside_pipeline", "layers_per_stage", "scanned_blocks"),
    *("o_groups", "o_lora_up_proj", "indexer_q", "indexer_weights"),
)


def data_mesh_axes(mesh: Any, rules: Any) -> set[str]:
  return {axis for name in DATA_AXES for axis in mesh_axes(resolve((name,), mesh, rules)[0])}


def rules_in_play(rules: Iterable) -> list:
  """Returns a config's rules, with an empty rule for each name of MaxText's that they omit.

  MaxText's rules for custom meshes omit what is replicated on them. A name that MaxText does not know is a mistake.
  """
  rules = list(rules)
  named = {rule[0] for rule in rules}
  return rules + [(name, ()) for name in _names_of_maxtext() if name not in named]


@functools.cache
def _names_of_maxtext() -> tuple[str, ...]:
  from maxtext.configs import types  # pylint: disable=import-outside-toplevel

  own = types.MaxTextConfig.model_fields["logical_axis_rules"].get_default(call_default_factory=True)
  return tuple(dict.fromkeys([*(rule[0] for rule in own), *_WITHOUT_RULE]))
