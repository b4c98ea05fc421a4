# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small models of every decoder block of MaxText, those that can be pipelined and those that are refused.

`python -m tests.parity.blocks` compares each of the former with its layers, and writes the errors into blocks.json.
`markdown` is the table of them for the page docs/blocks.md, which `make docs` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import importlib.metadata
import pathlib
import re
import sys
from typing import Any

from tests import conftest  # noqa: F401  (the environment of the tests; before anything imports JAX)

# isort: split

from maxtext.common.common_types import DecoderBlockType
import pytest

from maxtext_pp_ext.config import PipelineConfigError
from maxtext_pp_ext.testing import parity
from tests import tables
from tests.parity.common import make_config
from tests.trainer.cases import IMPLEMENTATIONS

Keys = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A model that is pipelined, or refused.

  Attributes:
    block: value of `decoder_block`.
    keys: the model's keys.
    condition: condition under which a model of this block can be pipelined; "" if there is none.
    attention: the block's kinds of attention.
    experts: the block's mixture of experts; "" without one.
    cycle: number of layers of a cycle; a stage has whole cycles.
    amplification: how much more the layers amplify rounding than `parity.tolerance` allows for.
    most_layers: the largest number of layers for which a model with `keys` can be pipelined.
    refused: a part of the reason, if it is refused.
    most_microbatches: the largest number of microbatches of a window; None for any.
    unused: parameters that have no gradient, for a reason that has nothing to do with pipelines.
  """

  block: str
  keys: Keys = dataclasses.field(default_factory=dict)
  condition: str = ""
  attention: str = "global"
  experts: str = ""
  cycle: int = 1
  amplification: float = 1.0
  most_layers: int | None = None
  refused: str = ""
  most_microbatches: int | None = None
  unused: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    return f"{self.block}: {self.condition}" if self.condition else self.block

  def takes(self, stages: int, repeats: int, layers_per_stage: int = 1) -> bool:
    """Whether a model of this number of layers can be pipelined."""
    return self.most_layers is None or stages * repeats * layers_per_stage <= self.most_layers

  def repeats(self, stages: int) -> int:
    """2 repeats; 1 if 2 would be too many layers for the block, or for rounding (`parity.tolerance`)."""
    return 2 if self.takes(stages, 2) and self.cycle < 6 else 1

  def config(self, **sizes: Any) -> Any:
    """A config of a pipeline of these sizes."""
    keys = {"decoder_block": self.block, **self.keys, **sizes}
    keys["layers_per_stage"] = keys.get("layers_per_stage", 1) * self.cycle
    dense = keys.get("first_num_dense_layers", 0)
    if dense:
      pipelined = keys["stages"] * keys["repeats"] * keys["layers_per_stage"]
      keys["base_num_decoder_layers"] = dense + pipelined
    return make_config(**keys)


NORMS = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 32,
    "load_balance_loss_weight": 0.1,
    "megablox": False,
    "sparse_matmul": False,
}
YARN = {
    "rope_type": "yarn",
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "rope_factor": 4,
    "beta_fast": 32,
    "beta_slow": 1,
}
DEEPSEEK = {
    "attention_type": "mla",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_num_dense_layers": 1,
    "shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "routed_score_func": "sigmoid",
    **EXPERTS,
    **YARN,
}
INDEXER = {
    "use_indexer": True,
    "indexer_topk": 4,
    "indexer_n_heads": 2,
    "indexer_head_dim": 8,
    "indexer_loss_scaling_factor": 0.5,
    "indexer_sparse_training": True,
    "rope_type": "default",
}
LLAMA4 = {"shared_experts": 1, "use_qk_norm": True, "chunk_attn_window_size": 4, **EXPERTS, "num_experts_per_tok": 1}
DELTA_NET = {
    "gdn_conv_kernel_dim": 2,
    "gdn_key_head_dim": 8,
    "gdn_value_head_dim": 8,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 2,
    "gdn_chunk_size": 4,
    "partial_rotary_factor": 0.5,
    "shared_experts": 1,
    "norm_topk_prob": True,
    **EXPERTS,
}
GPT_OSS = {
    "sliding_window_size": 4,
    "attention_bias": True,
    "attention_sink": True,
    "rope_interleave": False,
    "rope_truncate": False,
    "rope_attention_scaling": True,
    "mlp_activations": ["sigmoid", "linear"],
    "mlp_activations_limit": 7.0,
    "routed_bias": True,
    "mlp_bias": True,
    **EXPERTS,
    **YARN,
}
OLMO3 = {"use_qk_norm": True, "sliding_window_size": 4, "rope_interleave": False, **YARN}
ENVY = {"use_qk_norm": True, "use_post_ffw_norm": True, **EXPERTS, "num_experts_per_tok": 1}
GEMMA3 = {
    "model_name": "gemma3-4b",  # decides the scale of queries
    "override_model_config": True,
    "sliding_window_size": 4,
    "mlp_activations": ["gelu", "linear"],
    **NORMS,
}
GEMMA4 = {
    "sliding_window_size": 4,
    "global_head_dim": 16,
    "global_num_kv_heads": 1,
    "share_kv_projections": True,
    "global_rope_proportion": 0.25,
    "final_logits_soft_cap": 30.0,
    "mlp_activations": ["gelu", "linear"],
    **NORMS,
}
DEEPSEEK4 = {
    "model_name": "deepseek4-tiny",  # decides how experts are chosen
    "override_model_config": True,
    "first_num_hash_layers": 1,
    "compress_ratios": [0, 128, 4, 128, 4],
    "max_target_length": 256,  # two spans that a layer with the ratio 128 compresses
    "attention_type": "compressed",
    "base_num_kv_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "use_indexer": True,
    "indexer_head_dim": 16,
    "indexer_n_heads": 2,
    "indexer_topk": 4,
    "indexer_sparse_training": True,  # MaxText's loss would otherwise be the indexer's alone
    "sliding_window_size": 4,
    "mhc_expansion_rate": 2,
    "shared_experts": 1,
    "routed_score_func": "sqrtsoftplus",
    "routed_bias": True,
    "routed_bias_update_rate": 0.01,
    **EXPERTS,
}
CYCLIC = {
    "gpt_oss": GPT_OSS,
    "olmo3": OLMO3,
    "qwen3_next": DELTA_NET,
    "qwen3_5": DELTA_NET,
    "llama4": LLAMA4,
    "envy": ENVY,
}
CYCLE = "scan_layers, whole cycles of inhomogeneous_layer_cycle_interval layers in a stage"

PIPELINED = [
    Case(block="default"),
    Case(block="simple", attention="none"),
    Case(block="simple_mlp", attention="none"),
    Case(block="llama2"),
    Case(block="mistral"),
    Case(block="mixtral", keys=EXPERTS, experts="top 2 of 4, load-balance loss"),
    Case(block="gemma", keys={"base_num_kv_heads": 1, "mlp_activations": ["gelu", "linear"]}),
    Case(
        block="gemma2",
        keys={"sliding_window_size": 4, "attn_logits_soft_cap": 50.0, "mlp_activations": ["gelu", "linear"], **NORMS},
        attention="local sliding window and global",
    ),
    Case(
        block="gemma3",
        keys=GEMMA3,
        condition="fewer than 6 layers",
        attention="local sliding window",
        most_layers=5,
    ),
    Case(
        block="gemma3",
        keys=GEMMA3,
        cycle=6,
        condition="scan_layers, a multiple of 6 layers in a stage",
        attention="local sliding window and global",
    ),
    Case(block="gpt3", keys={"fused_qkv": True, "mlp_activations": ["gelu"], "trainable_position_size": 16}),
    Case(
        block="gpt_oss",
        keys={**GPT_OSS, "inhomogeneous_layer_cycle_interval": 2},
        cycle=2,
        condition=CYCLE,
        attention="local sliding window and global, sinks",
        experts="top 2 of 4, biases",
    ),
    Case(block="qwen2", keys={"attention_bias": True}),
    Case(block="qwen3", keys={"use_qk_norm": True}),
    Case(block="qwen3_moe", keys={"use_qk_norm": True, "norm_topk_prob": True, **EXPERTS}, experts="top 2 of 4"),
    Case(
        block="qwen3_custom_moe",
        keys={
            "use_qk_norm": True,
            "norm_topk_prob": True,
            "attention_output_dim": 8,
            "moe_expert_input_dim": 8,
            **EXPERTS,
        },
        experts="top 2 of 4",
        unused=("post_self_attention_layer_norm",),  # made, and not called
    ),
    *(
        Case(
            block=block,
            keys={**DELTA_NET, "inhomogeneous_layer_cycle_interval": 2},
            cycle=2,
            condition=CYCLE,
            # Of qwen3_next: weights changed by one unit of rounding change gradients of the loop itself by 4.8e-4.
            amplification=30.0,
            attention="gated delta net and global",
            experts="top 2 of 4, shared",
        )
        for block in ("qwen3_next", "qwen3_5")
    ),
    Case(
        block="llama4",
        keys={
            **LLAMA4,
            "inhomogeneous_layer_cycle_interval": 4,
            "nope_layer_interval": 4,
            "interleave_moe_layer_step": 2,
        },
        cycle=4,
        condition=CYCLE,
        attention="chunk and global",
        experts="top 1 of 4 in every 2nd layer, shared",
    ),
    Case(
        block="llama4",
        keys={**LLAMA4, "scan_layers": False, "nope_layer_interval": -1, "interleave_moe_layer_step": -1},
        condition="every layer with RoPE and without experts, no scan_layers",
        attention="chunk",
    ),
    Case(
        block="deepseek",
        keys={**DEEPSEEK, "routed_bias": True, "routed_bias_update_rate": 0.01},
        attention="MLA",
        experts="top 2 of 4, shared, load-balance loss, updates of biases",
    ),
    Case(
        block="deepseek",
        keys={**DEEPSEEK, **INDEXER},
        condition="with an indexer",
        attention="MLA of the indexer's choice",
        experts="top 2 of 4, shared, load-balance loss, and the indexer's loss",
    ),
    Case(
        block="olmo3",
        keys={**OLMO3, "inhomogeneous_layer_cycle_interval": 4},
        cycle=4,
        condition=CYCLE,
        attention="local sliding window and global",
    ),
    Case(
        block="envy",
        keys={**ENVY, "inhomogeneous_layer_cycle_interval": 2, "interleave_moe_layer_step": 2},
        cycle=2,
        condition=CYCLE,
        experts="top 1 of 4 in every 2nd layer",
    ),
]

# Only without a pipeline.
WINDOWED = [
    Case(
        block="gemma4",
        keys=GEMMA4,
        cycle=6,
        # Weights changed by one unit in the last place, at random, change gradients of MaxText's scan itself by up to
        # 7e-4 (12 layers), those of norms of queries, keys and values most. A window's worst error is 1.7e-4.
        amplification=40.0,
        attention="local sliding window and global",
    ),
    *(
        Case(
            block="deepseek4",
            keys={**DEEPSEEK4, **keys},
            cycle=2,
            condition=condition,
            # The scales of mHC are single numbers, whose gradients are sums of terms that cancel. Weights changed by
            # one unit in the last place, at random, change gradients of MaxText's scan itself by 5e-5 to 1.3e-4, most
            # that of `pre_alpha_scale` in the layer that runs before the scan. A window's worst error is of that layer,
            # too: 5e-5.
            amplification=10.0,
            attention="compressed",
            experts="top 2 of 4, shared",
            most_microbatches=most,
            unused=unused,
        )
        for condition, keys, most, unused in (
            # Its loss alone trains an indexer.
            ("", {}, None, ("['indexer']",)),
            ("with the indexer's loss", {"indexer_loss_scaling_factor": 0.5}, 1, ()),
        )
    ),
    Case(
        block="deepseek",
        keys={**DEEPSEEK, "mhc_expansion_rate": 2},
        condition="with hyper-connections",
        # As above: weights changed by one unit in the last place, at random, change gradients of MaxText's scan itself by
        # up to 1.4e-4 (3 layers) and 2.7e-4 (7 layers), most those of `pre_beta` and `pre_alpha_scale` of the dense one.
        # A window's worst errors are of these arrays, too: 1.2e-4.
        amplification=40.0,
        attention="MLA",
        experts="top 2 of 4, shared, load-balance loss",
    ),
]

REFUSED = [
    Case(
        block="gemma3",
        keys=GEMMA3,
        condition="a part of 6 layers in a stage",
        refused="its layers come in cycles of 6",
    ),
    Case(
        block="gemma3",
        keys={**GEMMA3, "scan_layers": False},
        condition="6 layers or more, no scan_layers",
        refused="every 6th layer has global attention",
    ),
    Case(block="gemma4", refused="bypasses the pipeline"),
    Case(block="gemma4_small", keys={"scan_layers": False}, refused="share keys and values"),
    Case(block="deepseek4", refused="differ by index"),
    *(
        Case(
            block=block,
            keys={**keys, "inhomogeneous_layer_cycle_interval": 2},
            condition="a part of a cycle in a stage",
            refused="its layers come in cycles of inhomogeneous_layer_cycle_interval=2",
        )
        for block, keys in CYCLIC.items()
    ),
    *(
        Case(block=block, keys={**keys, "scan_layers": False}, condition="no scan_layers", refused="differ by index")
        for block, keys in CYCLIC.items()
        if block not in ("llama4", "envy")
    ),
    Case(
        block="llama4",
        keys={**LLAMA4, "scan_layers": False, "interleave_moe_layer_step": 2},
        condition="some layers with experts or without RoPE, no scan_layers",
        refused="without MoE",
    ),
    Case(
        block="envy",
        keys={**ENVY, "scan_layers": False, "interleave_moe_layer_step": 2},
        condition="some layers with experts, no scan_layers",
        refused="without MoE",
    ),
]

MEASURED = pathlib.Path(__file__).resolve().parent / "blocks.json"


def bound(case: Case, config: Any) -> float:
  """The largest error of a case that rounding explains."""
  return case.amplification * parity.tolerance(config)


def measure(case: Case) -> dict[str, Any]:
  """The array with the largest error, that error, and the version of MaxText."""
  config = case.config(stages=3, repeats=case.repeats(3), microbatches=3)
  found = parity.assert_pipeline_parity(
      None, config, implementations=IMPLEMENTATIONS, tolerance=bound(case, config), unused=case.unused
  )
  array, error = max((result.worst for result in found.values()), key=lambda worst: worst[1])
  array = array.replace("][", ".").strip("[]").replace("'", "")
  return {"array": array, "error": float(f"{error:.1e}"), "maxtext": importlib.metadata.version("maxtext")}


_errors: dict[str, str] = {}


def error_of(case: Case) -> str:
  """How a pipeline of this case is refused."""
  if case.name not in _errors:
    with pytest.raises(PipelineConfigError) as caught:
      case.config(stages=3, repeats=2, microbatches=3)
    _errors[case.name] = str(caught.value)
  return _errors[case.name]


def reason(case: Case) -> str:
  """The reason of a refusal, from its error."""
  [why] = re.findall(r"cannot be pipelined(?: with [^:]*)?: (.*?)\.(?: Set .*)?$", error_of(case), re.MULTILINE)
  return f"{case.condition}: {why}" if case.condition else why


def row(case: Case, measured: Mapping[str, Any]) -> str:
  """A line of the table; `measured` has the errors by the names of cases."""
  cells = [f"`{case.block}`", "no" if case.refused else "yes", case.condition]
  if case.refused:
    cells[2] = reason(case)
    cells += ["", "", ""]
  else:
    found = measured[case.name]
    cells += [f"{found['error']:.1e} ({found['array']})", case.attention, case.experts or "none"]
  return f"| {' | '.join(cells)} |"


def markdown() -> Iterator[str]:
  """Lines of the table: a row for each case, in MaxText's order of blocks."""
  order, measured = [block.value for block in DecoderBlockType], tables.read(MEASURED)
  yield "| decoder_block | pipelined | condition or reason | largest error (of) | attention | experts |"
  yield "|---|---|---|---|---|---|"
  for case in sorted([*PIPELINED, *REFUSED], key=lambda case: order.index(case.block)):
    yield row(case, measured)


def main(blocks: list[str]) -> None:
  """Measures the given blocks, by default all, and keeps the errors of the others."""
  unknown = set(blocks) - {case.block for case in [*PIPELINED, *REFUSED]}
  if unknown:
    sys.exit(f"tests.parity.blocks: neither PIPELINED nor REFUSED has a case of {', '.join(sorted(unknown))}.")
  measured = tables.read(MEASURED)
  for case in PIPELINED:
    if not blocks or case.block in blocks:
      measured[case.name] = measure(case)
      print(row(case, measured), flush=True)
      tables.write(MEASURED, {each.name: measured[each.name] for each in PIPELINED if each.name in measured})


if __name__ == "__main__":
  main(sys.argv[1:])
