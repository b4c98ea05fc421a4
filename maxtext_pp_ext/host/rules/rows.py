# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What in MaxText's layers needs every device to have equally many rows of a microbatch.

Most of a layer is partitioned by XLA, which pads or replicates rows that devices cannot share. These are `shard_map`s
over the rows, which have an error from within MaxText for such rows, where a batch that is not divided into microbatches
has enough of them. Read in `maxtext/layers/{attentions,attention_op,moe}.py` of MaxText 0.2.5; all other `shard_map`s
that training comes to are over sequences or heads, drop axes that do not divide the rows (qwen3's gated delta rule,
experts without expert parallelism), or are not in layers of a pipeline.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math
import sys
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import plain

# Blocks whose layers have no `Attention` of MaxText's, or another one.
_WITHOUT_ATTENTION = ("simple", "simple_mlp")
_OWN_FUSED_QKV = (*_WITHOUT_ATTENTION, "gpt3")
_WITH_EXPERTS = (
    *("deepseek", "envy", "gpt_oss", "llama4", "mixtral", "qwen3_moe", "qwen3_custom_moe", "qwen3_next", "qwen3_5"),
)
_LEAST_LENGTH_OF_FLASH = 128  # with attention=autoselected


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
  """Something that needs rows.

  Attributes:
    what: the keys that ask for it, with their values.
    axes: mesh axes whose devices have rows each, with their sizes.
    least: how many rows there have to be at least.
    instead: keys that do without it.
  """

  what: str
  axes: dict[str, int]
  least: int
  instead: dict[str, Any]

  @property
  def devices(self) -> int:
    return math.prod(self.axes.values())

  def has(self, rows: int) -> bool:
    return rows % self.devices == 0 and rows >= self.least


def needs(config: HostKeys, *, evaluation: bool = False, platform: str | None = None) -> list[Need]:
  """All that needs rows, with the rules of training or of evaluations.

  Args:
    config: MaxText's, or anything with its keys.
    evaluation: whether it is about evaluations.
    platform: what the model runs on; None for what the config or this process says.
  """
  mesh = derived.mesh_shape(config)
  if mesh is None:
    return []
  return list(_needs(config, mesh, rules(config, evaluation), platform or _platform(config)))


def rules(config: HostKeys, evaluation: bool) -> Any:
  found = getattr(config, "logical_axis_rules_for_eval", None) if evaluation else None
  return found or getattr(config, "logical_axis_rules", None) or ()


def parts(config: HostKeys) -> int:
  """Into how many parts a layer of the batch-split schedule divides its rows."""
  return max(config.batch_split_factor, 1) if getattr(config, "use_batch_split_schedule", False) else 1


def _needs(config: HostKeys, mesh: dict[str, int], logical: Any, platform: str | None) -> Iterator[Need]:
  block = derived.decoder_block(config)
  if getattr(config, "fused_qkv", False) and block not in _OWN_FUSED_QKV:
    names = ("activation_kv_batch", "activation_length_attn", "activation_kv_heads", "activation_kv_head_dim")
    yield Need(what="fused_qkv=True", axes=_axes(names, mesh, logical), least=1, instead={"fused_qkv": False})
  if block in _WITH_EXPERTS and getattr(config, "num_experts", 1) > 1 and config.sparse_matmul:
    of_experts = math.prod(mesh.get(axis, 1) for axis in expert_axes(config))
    if of_experts > 1:
      axes = _axes(("activation_batch", "activation_norm_length", None), mesh, logical)
      what = f"sparse_matmul=True with {of_experts} devices for {config.num_experts} experts"
      # MaxText takes one row for a decoding step, whose transfers between experts cannot be in a pipeline.
      yield Need(what=what, axes=axes, least=2, instead={"sparse_matmul": False})
  if platform == "tpu" and block not in _WITHOUT_ATTENTION and _flash(config):
    names = ("activation_batch_attn", "activation_heads", "activation_length_attn", "activation_kv")
    of_rules = _axes(names, mesh, logical)
    # MaxText's own assertion is about these in any case.
    of_assertion = {axis: mesh[axis] for axis in ("data", "fsdp") if mesh.get(axis, 1) > 1}
    for axes in [of_rules] if of_rules == of_assertion else [of_rules, of_assertion]:
      what = f"attention={config.attention} on TPUs"
      yield Need(what=what, axes=axes, least=1, instead={"attention": "dot_product"})


def _flash(config: HostKeys) -> bool:
  if config.attention == "autoselected":
    return config.max_target_length >= _LEAST_LENGTH_OF_FLASH
  return config.attention == "flash"


def expert_axes(config: HostKeys) -> tuple[str, ...]:
  rule = plain(config.custom_mesh_and_rule)
  return ("context", "expert") if rule == "cp-as-ep" else ("expert",)


def shards(names: Sequence[str | None], config: HostKeys, evaluation: bool = False) -> int:
  """Over how many devices the first of these logical axes is sharded; 1 if the mesh is not known."""
  mesh = derived.mesh_shape(config)
  return 1 if mesh is None else math.prod(_axes(names, mesh, rules(config, evaluation)).values())


def _axes(names: Sequence[str | None], mesh: dict[str, int], logical: Any) -> dict[str, int]:
  """The mesh axes of more than one device over which the first of these logical axes is sharded.

  As `sharding.resolve`, which imports JAX: the first rule for a name that fits binds it, a mesh axis is bound once.
  """
  bound: dict[str | None, tuple[str, ...]] = {}
  for name, binds in logical:
    axes = (binds,) if isinstance(binds, str) else tuple(binds or ())
    if name in names and name not in bound and not any(axis in other for other in bound.values() for axis in axes):
      bound[name] = axes
  return {axis: mesh[axis] for axis in bound.get(names[0], ()) if mesh.get(axis, 1) > 1}


def _platform(config: HostKeys) -> str | None:
  """What the model will run on, as far as that is known."""
  if getattr(config, "internal_compile", False):
    return None  # for devices that are not there
  topology = getattr(config, "compile_topology", "")
  if topology:
    return "gpu" if topology.startswith("a3") else "tpu"
  jax = sys.modules.get("jax")  # which MaxText has imported, and asked for its devices
  try:
    return jax.default_backend() if jax is not None else None
  except RuntimeError:
    return None
