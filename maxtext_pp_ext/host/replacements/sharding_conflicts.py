# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The config key `sharding_conflicts`: judges how MaxText shards a model's parameters, before anything is compiled."""

from typing import Any, Literal

from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.host.models.axes import rules_in_play

FALLBACK: Literal["fallback"] = "fallback"
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
