# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the parts of MaxText's layers that need equally many rows of a microbatch on every device.

XLA partitions most of a layer, and pads or replicates rows that do not divide among devices. The parts found here are
`shard_map`s over rows, and fail with an error from within MaxText for such rows.

Read in `maxtext/layers/{attentions,attention_op,moe}.py` of MaxText 0.2.5. All other `shard_map`s of training are over
sequences or heads, drop axes that do not divide the rows (qwen3's gated delta rule, experts without expert parallelism),
or are not in layers of a pipeline.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math
import sys
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import plain

# Blocks whose layers do not use MaxText's `Attention`; gpt3 has its own.
_WITHOUT_ATTENTION = ("simple", "simple_mlp")
_OWN_FUSED_QKV = (*_WITHOUT_ATTENTION, "gpt3")
_WITH_EXPERTS = "deepseek envy gpt_oss llama4 mixtral qwen3_moe qwen3_custom_moe qwen3_next qwen3_5".split()
_LEAST_LENGTH_OF_FLASH = 128  # with attention=autoselected


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
  """A feature that needs rows on each of several devices."""

  what: str  # its keys with their values
  axes: dict[str, int]  # mesh axis -> size, for the axes over whose devices the rows are divided
  least: int  # number of rows that it needs in all
  instead: dict[str, Any]  # values for keys that turn it off

  @property
  def devices(self) -> int:
    return math.prod(self.axes.values())

  def has(self, rows: int) -> bool:
    return rows % self.devices == 0 and rows >= self.least


def rules(config: HostKeys, evaluation: bool) -> Any:
  found = getattr(config, "logical_axis_rules_for_eval", None) if evaluation else None
  return found or getattr(config, "logical_axis_rules", None) or ()


def parts(config: HostKeys) -> int:
  """How many parts a layer divides its rows into: batch_split_factor with the batch-split schedule, else 1."""
  return max(config.batch_split_factor, 1) if getattr(config, "use_batch_split_schedule", False) else 1


def needs(config: HostKeys, *, evaluation: bool = False, platform: str | None = None) -> Iterator[Need]:
  """Every feature that needs rows; `platform` is where the model runs, by default as the config or this process tells."""
  block, mesh = derived.decoder_block(config), derived.mesh_shape(config)
  if mesh is None:
    return
  logical, platform = rules(config, evaluation), platform or _platform(config)
  if getattr(config, "fused_qkv", False) and block not in _OWN_FUSED_QKV:
    names = ("activation_kv_batch", "activation_length_attn", "activation_kv_heads", "activation_kv_head_dim")
    yield Need(what="fused_qkv=True", axes=_axes(names, mesh, logical), least=1, instead={"fused_qkv": False})
  if block in _WITH_EXPERTS and getattr(config, "num_experts", 1) > 1 and config.sparse_matmul:
    if (of_experts := math.prod(mesh.get(axis, 1) for axis in expert_axes(config))) > 1:
      axes = _axes(("activation_batch", "activation_norm_length", None), mesh, logical)
      what = f"sparse_matmul=True with {of_experts} devices for {config.num_experts} experts"
      # MaxText treats a single row as a decoding step, whose transfers between experts cannot be in a pipeline.
      yield Need(what=what, axes=axes, least=2, instead={"sparse_matmul": False})
  long_enough = config.attention == "autoselected" and config.max_target_length >= _LEAST_LENGTH_OF_FLASH
  if platform == "tpu" and block not in _WITHOUT_ATTENTION and (config.attention == "flash" or long_enough):
    names = ("activation_batch_attn", "activation_heads", "activation_length_attn", "activation_kv")
    of_rules = _axes(names, mesh, logical)
    # MaxText's own assertion always checks these axes.
    of_assertion = {axis: mesh[axis] for axis in ("data", "fsdp") if mesh.get(axis, 1) > 1}
    for axes in [of_rules] if of_rules == of_assertion else [of_rules, of_assertion]:
      yield Need(what=f"attention={config.attention} on TPUs", axes=axes, least=1, instead={"attention": "dot_product"})


def too_few(config: HostKeys, platform: str | None = None) -> str | None:
  """Why a model without a pipeline cannot have the rows of a step; None if it can. `platform` as in `needs`."""
  rows = config.micro_batch_size_to_train_on or 0
  for need in needs(config, platform=platform):
    if rows % (unit := need.devices * parts(config)):
      return f"{need.what} needs rows in multiples of {unit}, and without a pipeline it gets {rows} at once."
  return None


def expert_axes(config: HostKeys) -> tuple[str, ...]:
  return ("context", "expert") if plain(config.custom_mesh_and_rule) == "cp-as-ep" else ("expert",)


def shards(names: Sequence[str | None], config: HostKeys, evaluation: bool = False) -> int:
  """Over how many devices the first of these logical axes is sharded; 1 if the mesh is not known."""
  return math.prod(axes_of(names, config, evaluation).values())


def axes_of(names: Sequence[str | None], config: HostKeys, evaluation: bool) -> dict[str, int]:
  """The mesh axes that shard the first of these logical axes, with their sizes; {} if the mesh is not known."""
  return _axes(names, derived.mesh_shape(config) or {}, rules(config, evaluation))


def _axes(names: Sequence[str | None], mesh: dict[str, int], logical: Any) -> dict[str, int]:
  """Mesh axis -> size, for the axes above 1 that shard the first of these logical axes.

  As `sharding.resolve`, without JAX: the first rule for a name that fits binds it, and a mesh axis is bound once.
  """
  bound: dict[str | None, tuple[str, ...]] = {}
  for name, binds in logical:
    axes = (binds,) if isinstance(binds, str) else tuple(binds or ())
    if name in names and name not in bound and not any(axis in other for other in bound.values() for axis in axes):
      bound[name] = axes
  return {axis: mesh[axis] for axis in bound.get(names[0], ()) if mesh.get(axis, 1) > 1}


def _platform(config: HostKeys) -> str | None:
  """The platform on which the model will run, None if it is not known."""
  if getattr(config, "internal_compile", False):
    return None  # for absent devices
  if topology := getattr(config, "compile_topology", ""):
    return "gpu" if topology.startswith("a3") else "tpu"
  jax = sys.modules.get("jax")  # already imported and initialised by MaxText
  try:
    return jax.default_backend() if jax is not None else None
  except RuntimeError:
    return None
