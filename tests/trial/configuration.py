# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A configuration of the trial, and the draft that it is finished from."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from typing import Any

from tests.parity import blocks
from tests.trainer.cases import IMPLEMENTATIONS

DEVICES = 8
Keys = dict[str, Any]

BASE: Keys = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 64,
    "vocab_size": 64,
    "max_target_length": 32,
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "dataset_type": "synthetic",
    "packing": True,
    "steps": 2,
    "eval_interval": 1,
    "eval_steps": 1,
    "learning_rate": 0.003,
    "warmup_steps_fraction": 0.0,
    "sharding_tolerance": 1.0,
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "enable_tensorboard": False,
    "log_config": False,
    "run_name": "trial",
    "base_output_directory": tempfile.gettempdir(),
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
    "abort_on_nan_loss": False,
    "abort_on_inf_loss": False,
}
_OF_EXPERTS = {"base_moe_mlp_dim": 32, "base_mlp_dim": 32}
_BLOCKS = {case.name: case for case in [*blocks.PIPELINED, *blocks.WINDOWED]}


@dataclasses.dataclass(kw_only=True)
class Configuration:
  """A model and two ways to train it.

  Attributes:
    name: area and number.
    keys: keys of both trainings.
    pipeline: those of the pipeline or window on top.
    reference: those of the training without it on top.
    on_one_device: whether the reference runs on one device, and not on all.
    nan_row: the only row of each batch that meets a NaN.
    dropout: whether layers drop something, so that only means can be equal.
  """

  name: str
  keys: Keys
  pipeline: Keys
  reference: Keys = dataclasses.field(default_factory=dict)
  on_one_device: bool = True
  nan_row: int | None = None
  dropout: bool = False

  def arguments(self, pipelined: bool) -> list[str]:
    """MaxText's arguments."""
    keys = BASE | self.keys | (self.pipeline if pipelined else self.reference)
    return [f"{key}={_text(value)}" for key, value in keys.items()]

  @property
  def text(self) -> str:
    """All keys that are not the same in every configuration."""
    of = lambda keys: " ".join(f"{key}={_text(value)}" for key, value in keys.items())
    return f"{of(self.keys)} | {of(self.pipeline)}" + (f" | without: {of(self.reference)}" if self.reference else "")


def _text(value: Any) -> str:
  return '""' if value == "" else str(value)


@dataclasses.dataclass(kw_only=True)
class Draft:
  """A configuration that is being drawn."""

  numbers: random.Random
  keys: Keys = dataclasses.field(default_factory=dict)
  pipeline: Keys = dataclasses.field(default_factory=dict)
  reference: Keys = dataclasses.field(default_factory=dict)
  axes: Keys = dataclasses.field(default_factory=dict)
  stages: int = 2
  repeats: int = 1
  per_stage: int = 1
  outside: int = 0
  dense: int = 0
  cycle: int = 1
  rounds: int = 2  # microbatches are this many times the stages
  rows: int = 2  # of a microbatch
  on_one_device: bool = True
  nan_row: int | None = None
  dropout: bool = False
  most: int = 8  # layers in the pipeline

  def one_of(self, *values: Any) -> Any:
    return self.numbers.choice(values)

  def either(self, **keys: Any) -> None:
    self.keys |= keys

  def model(self, name: str) -> None:
    """One of the models of `tests.parity.blocks`."""
    case = _BLOCKS[name]
    if case.experts:
      self.keys |= _OF_EXPERTS
    self.keys |= {"decoder_block": case.block, **case.keys}
    if "num_experts" in self.keys:
      self.keys |= _OF_EXPERTS
    if "mla" in self.keys.values() or case.block == "gpt3":
      self.keys["base_num_kv_heads"] = BASE["base_num_query_heads"]
    if "routed_bias_update_rate" in self.keys:
      # MaxText adds updates to biases as if both were stacked along the first axis, and to those of one stack only.
      self.keys["param_scan_axis"], self.pipeline["scan_layers_per_stage"] = 0, True
    self.cycle, self.dense = case.cycle, case.keys.get("first_num_dense_layers", 0)

  @property
  def has_experts(self) -> bool:
    return "num_experts" in self.keys

  def finished(self, name: str) -> Configuration:
    """The configuration, with what follows from its sizes."""
    if self.stages * self.per_stage * self.cycle > self.most:
      self.per_stage = 1
    while self.stages * self.repeats * self.per_stage * self.cycle > self.most and self.repeats > 1:
      self.repeats -= 1
    inside = self.stages * self.repeats * self.per_stage * self.cycle
    microbatches = self.stages * self.rounds if self.stages > 1 else self.rounds
    keys = {"base_num_decoder_layers": self.dense + self.outside + inside}
    keys["per_device_batch_size"] = microbatches * self.rows / DEVICES
    pipeline: Keys = {"num_pipeline_microbatches": microbatches, **self.axes}
    if self.stages > 1:
      pipeline |= {"num_layers_per_pipeline_stage": self.per_stage * self.cycle}
      if "dcn_pipeline_parallelism" not in self.axes:
        pipeline["ici_pipeline_parallelism"] = self.stages
    if self.outside and self.stages > 1:
      pipeline["pipeline_parallel_layers"] = inside
    pipeline.setdefault("pipeline_impl", self.one_of("circular_bsw", "circular_bsw", *IMPLEMENTATIONS))
    return Configuration(
        name=name,
        keys=keys | self.keys,
        pipeline=pipeline | self.pipeline,
        reference=self.reference,
        on_one_device=self.on_one_device,
        nan_row=self.nan_row,
        dropout=self.dropout,
    )
