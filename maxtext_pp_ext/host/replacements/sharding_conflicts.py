# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The config key `sharding_conflicts`: judges how MaxText shards a model's parameters, before anything is compiled."""

from collections.abc import Iterable
import functools
from typing import Any, Literal

from maxtext_pp_ext.config.host_keys import HostKeys

FALLBACK: Literal["fallback"] = "fallback"
# Names for which base.yml has no rule (MaxText 0.2.5): of DeepSeek 4's dimensions, and of the layers that a pipeline
# leaves out. They are replicated, and meant to be.
_WITHOUT_RULE = (
    "layers_outside_pipeline",
    "scanned_blocks",
    "o_groups",
    "o_lora_up_proj",
    "indexer_q",
    "indexer_weights",
)
_WAY_OUT = (
    "This is what sharding_conflicts=error is for. With sharding_conflicts=warn or fallback MaxText goes on; "
    "`maxtext-pp sharding` with the same arguments shows the shardings."
)


def judge(config: HostKeys, model: Any, mesh: Any) -> None:
  """Warns or raises if the parameters of an abstract model have conflicts, as the config says.

  Args:
    config: MaxText's config.
    model: the abstract model.
    mesh: its mesh, None for the one that the model has.

  Raises:
    ShardingConflictError: with sharding_conflicts=error.
  """
  how = getattr(config, "sharding_conflicts", FALLBACK)
  if how == FALLBACK:
    return
  # Flax has been imported by the time there is a model.
  from flax import nnx  # pylint: disable=import-outside-toplevel

  from maxtext_pp_ext import sharding  # pylint: disable=import-outside-toplevel

  rules = rules_in_play(config.logical_axis_rules)
  try:
    sharding.named_shardings(nnx.state(model, nnx.Param), mesh or model.mesh, rules, on_conflict=how)
  except sharding.ShardingConflictError as error:
    error.add_note(_WAY_OUT)
    raise


def rules_in_play(rules: Iterable) -> list:
  """A config's rules, and an empty one for each name of MaxText's that they leave out.

  MaxText's rules for custom meshes list only what is sharded on them. That a name which MaxText knows has no rule there
  is thus no mistake, while one that nobody knows is.
  """
  rules = list(rules)
  named = {rule[0] for rule in rules}
  return rules + [(name, ()) for name in _names_of_maxtext() if name not in named]


@functools.cache
def _names_of_maxtext() -> tuple[str, ...]:
  import omegaconf  # pylint: disable=import-outside-toplevel

  from maxtext_pp_ext.host.models import run_config  # pylint: disable=import-outside-toplevel

  rules = omegaconf.OmegaConf.load(run_config.base_yml()).logical_axis_rules
  return tuple(dict.fromkeys([*(rule[0] for rule in rules), *_WITHOUT_RULE]))
