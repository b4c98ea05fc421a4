# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Implements the key `sharding_conflicts`: checks how MaxText shards a model's parameters, before compilation."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from maxtext_pp_ext import sharding
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.host.models.axes import rules_in_play
from maxtext_pp_ext.host.replacements import checkpoint_load

_WAY_OUT = (
    "sharding_conflicts=error stops here. With sharding_conflicts=warn or fallback MaxText goes on; "
    "`maxtext-pp sharding` with the same arguments shows the shardings."
)


def create_nnx_abstract_model(own: Callable, config: DerivedKeys, mesh: Any = None, *args: Any, **kwargs: Any) -> Any:
  """MaxText's function, with which every set-up starts; what is wrong with its model stops the run here."""
  create_model, model = own(config, mesh, *args, **kwargs)
  judge(config, model, mesh)
  if checkpoint_load.in_from_pretrained.get():
    checkpoint_load.refuse_other_layouts_of_pretrained(config, model)
  return create_model, model


def judge(config: HostKeys, model: Any, mesh: Any) -> None:
  """Warns or raises ShardingConflictError, as the config says, if shardings conflict; on `mesh`, or the model's own."""
  if (how := getattr(config, "sharding_conflicts", None)) in (None, "fallback"):
    return
  parameters, rules = nnx.state(model, nnx.Param), rules_in_play(config.logical_axis_rules)
  try:
    sharding.named_shardings(parameters, mesh or model.mesh, rules, on_conflict=how)
  except sharding.ShardingConflictError as error:
    error.add_note(_WAY_OUT)
    raise
