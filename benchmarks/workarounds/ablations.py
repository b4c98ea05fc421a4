# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Workarounds that no small program shows. A train step is compiled with the engine's line, and with another instead."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import pathlib
import shutil

from benchmarks import overlap, unchanged
from maxtext_pp_ext.compiled import flags, limits
from maxtext_pp_ext.processes import interruption

PACKAGE = unchanged.ROOT / "maxtext_pp_ext"
_BOUNDS = limits.Limits(seconds=1800)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
  """A line of the engine without which a train step is worse.

  Attributes:
    what: what the compiler does left to itself.
    file: the file of the line, below the package.
    old: the line; it occurs once.
    new: what is in its place without the workaround.
    case: the train step.
    figure: the figure of `unchanged.Compiled` that the workaround lowers.
    margin: the least share by which.
  """

  what: str
  file: str
  old: str
  new: str
  case: unchanged.Case
  figure: str
  margin: float

  @property
  def unit(self) -> str:
    return self.figure

  def figures(self) -> tuple[float, float]:
    """(figure without the workaround, with it)."""
    with interruption.temporary_folder() as name:
      package = pathlib.Path(name)
      shutil.copytree(PACKAGE, package / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
      (package / PACKAGE.name / self.file).write_text(self.replaced(), encoding="utf-8")
      without = unchanged.compiled(self.case, package, _BOUNDS).figures[self.figure]
    return without, _with_all(self.case)[self.figure]

  def replaced(self) -> str:
    """The file without the workaround. Raises ValueError if the line does not occur once."""
    text = (PACKAGE / self.file).read_text(encoding="utf-8")
    if text.count(self.old) != 1:
      raise ValueError(f"{self.file} has {text.count(self.old)} times: {self.old}")
    return text.replace(self.old, self.new)


@functools.cache
def _with_all(case: unchanged.Case) -> Mapping[str, float]:
  return unchanged.compiled(case, unchanged.ROOT, _BOUNDS).figures


_SMALL = (
    *("override_model_config=True", "base_num_decoder_layers=8", "attention=flash", "max_target_length=512"),
    *("per_device_batch_size=2", "base_emb_dim=512", "base_mlp_dim=2048", "head_dim=128", "vocab_size=4096"),
    *("base_num_query_heads=4", "base_num_kv_heads=2", "ici_pipeline_parallelism=2", "ici_fsdp_parallelism=4"),
    "num_pipeline_microbatches=4",
)
_DENSE = unchanged.Case(
    impl="circular_bsw",
    keys=(*_SMALL, "model_name=llama3-8b", "compile_topology=v6e-8", "num_layers_per_pipeline_stage=2"),
)
ABLATIONS: dict[str, Ablation] = {
    "activation_of_expert": Ablation(
        what="An expert's activation is computed for the product that is recomputed, and again for a weight's gradient.",
        file="engine/programs/one_of.py",
        old="behind = lambda x: x if stays(x) else jax.lax.optimization_barrier(x)",
        new="behind = lambda x: x",
        case=unchanged.Case(
            impl="circular_bsw",
            keys=(
                *(*_SMALL, "model_name=mixtral-8x7b", "base_moe_mlp_dim=2048", "compile_topology=v5p-16"),
                *("sparse_matmul=True", "megablox=True"),
            ),
        ),
        figure=unchanged.STEP,
        margin=0.005,
    ),
    "order_of_weight_in_use": Ablation(
        what="A product reads a weight in another order than that of its buffer, and copies it at each use.",
        file="engine/weights/weight.py",
        old="    return self._in_order(weight)\n",
        new="    return weight\n",
        case=_DENSE,
        figure=unchanged.STEP,
        margin=0.002,
    ),
    "residuals_of_all_layers": Ablation(
        what="Queries and keys of all layers of a stage are computed in one operation, before the first gradient.",
        file="engine/programs/segments.py",
        old="crossing = (*handed_on, *not_read) if end < ends[-1] else ()",
        new="crossing = tuple(handed_on) if end < ends[-1] else ()",
        case=_DENSE,
        figure="peak bytes",
        margin=0.005,
    ),
    "residual_of_product": Ablation(
        what="What a product computes is written for what follows, and then copied to where it is kept for backward.",
        file="engine/programs/stage.py",
        old="saved_by_products=operands.of_products(traced.forward.jaxpr, traced.saved),",
        new="saved_by_products=(False,) * len(traced.saved),",
        case=unchanged.Case(
            impl="circular_bsw",
            keys=(
                *("attention=flash", "max_target_length=2048", "per_device_batch_size=1", "model_name=llama3-8b"),
                *("compile_topology=v6e-8", "compile_topology_num_slices=8", "dcn_pipeline_parallelism=8"),
                *("ici_fsdp_parallelism=8", "num_pipeline_microbatches=8", "remat_policy=minimal_with_context"),
                "compile_xla_flags=--xla_tpu_scoped_vmem_limit_kib=98304",
            ),
        ),
        figure=f"{unchanged.PART}other compute",
        margin=0.05,
    ),
    "order_of_offloaded": Ablation(
        what="What the host's memory keeps is in the order of its own dimensions there, and copied before and after.",
        file="engine/programs/stage.py",
        old="(first + k, len(traced.rebuilt) + k): orders[k] for k in on_host}",
        new="(first + k, len(traced.rebuilt) + k): sorted(orders[k]) for k in on_host}",
        case=unchanged.Case(
            impl="window",
            keys=(
                *("override_model_config=True", "base_num_decoder_layers=8", "attention=flash", "max_target_length=8192"),
                *("per_device_batch_size=1", "model_name=llama3-8b", "compile_topology=v6e-8", "ici_fsdp_parallelism=8"),
                *("remat_policy=custom", "decoder_layer_input=offload", "out_proj=offload", "query_proj=offload"),
                "compile_xla_flags=--xla_tpu_scoped_vmem_limit_kib=98304",
            ),
        ),
        figure=f"{unchanged.PART}other compute",
        margin=0.02,
    ),
    "last_transfers": Ablation(
        what="The largest transfers of an iteration run beside its last operations, however short these are.",
        file="engine/programs/partial.py",
        old="      segments = with_last_gradients(segments, needs, rest, sizes)\n",
        new="",
        # One microbatch, and enough devices that a gather takes as long as a gradient's product.
        case=unchanged.Case(
            impl="window",
            keys=(
                *("override_model_config=True", "base_num_decoder_layers=8", "attention=flash", "max_target_length=2048"),
                *("per_device_batch_size=2", "model_name=llama3-8b", "compile_topology=v6e-64"),
                *("ici_fsdp_parallelism=64", f"compile_xla_flags={overlap.SPARSE_CORE_FLAGS}"),
            ),
        ),
        figure=unchanged.STEP,
        margin=0.005,
    ),
    "transfers_behind_exchange": Ablation(
        what="Weights are gathered behind an exchange of tokens, where nothing computes, and not beside experts.",
        file="engine/forward.py",
        old="groups = of_all.in_groups(weights, exchanges)",
        new="groups = of_all.in_groups(weights, 0)",
        case=unchanged.Case(
            impl="window",
            keys=(
                *("override_model_config=True", "base_num_decoder_layers=4", "attention=flash", "max_target_length=2048"),
                *("per_device_batch_size=2", "model_name=mixtral-8x7b", "compile_topology=v5p-64"),
                *("ici_fsdp_parallelism=8", "ici_expert_parallelism=4"),
                "compile_xla_flags="
                + flags.joined(
                    "", ["ENABLE_ASYNC_RAGGED_ALL_TO_ALL", "SPARSECORE_QUEUING"], without=["xla_sc_disjoint_spmem"]
                ),
            ),
        ),
        figure=unchanged.STEP,
        margin=0.02,
    ),
}
