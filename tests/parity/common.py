# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small configs and pipelines of MaxText layers, for the parity tests."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from typing import Any

from flax import linen as nn
from flax import nnx
import jax
from jax.sharding import Mesh
import maxtext
from maxtext.configs import pyconfig
from maxtext.layers import nnx_decoders, quantizations
from maxtext.models.llama2 import LlamaDecoderLayer
from maxtext.models.simple_layer import SimpleDecoderLayer
import pytest

import maxtext_pp_ext
from maxtext_pp_ext.schedule import CircularSchedule

maxtext_pp_ext.install()

BASE_YML = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
LAYERS = {"simple": SimpleDecoderLayer, "llama": LlamaDecoderLayer}
TINY = {
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 32,
    "head_dim": 8,
    "max_target_length": 8,
    "vocab_size": 32,
    "attention": "dot_product",
    "dtype": "float32",
    "matmul_precision": "highest",
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "log_config": False,
    "dataset_type": "synthetic",
    "run_name": "parity",
    "base_output_directory": tempfile.gettempdir(),
    "skip_jax_distributed_system": True,
}


def make_config(*, stages: int, repeats: int, microbatches: int, layers_per_stage: int = 1, **overrides: Any) -> Any:
  """A config for a pipeline module that the tests build. It may have one stage, which `pipeline_impl` refuses."""
  microbatch_size = overrides.pop("microbatch_size", 8 // stages)
  keys = {
      **TINY,
      "pipeline_impl": "circular_bsw" if stages > 1 else "host",
      "ici_pipeline_parallelism": stages,
      "base_num_decoder_layers": stages * repeats * layers_per_stage,
      "num_pipeline_repeats": repeats,
      "num_pipeline_microbatches": microbatches,
      "num_layers_per_pipeline_stage": layers_per_stage,
      "per_device_batch_size": microbatches * microbatch_size / jax.device_count(),
      **overrides,
  }
  return pyconfig.initialize(["", BASE_YML], **keys)


def make_pipeline(cls: type, config: Any, layer: str, mesh: Mesh, *, seed: int = 0) -> nnx.Module:
  """A pipeline of MaxText layers, built as MaxText's decoder builds it."""
  layer_class, quant = LAYERS[layer], quantizations.configure_quantization(config)

  def stage(rngs):
    if config.num_layers_per_pipeline_stage == 1:
      return layer_class(config=config, mesh=mesh, quant=quant, model_mode="train", rngs=rngs)
    kind = (
        nnx_decoders.NNXScannedPipelineStage if config.scan_layers_per_stage else nnx_decoders.NNXSequentialPipelineStage
    )
    return kind(layer_class, config.num_layers_per_pipeline_stage, config, mesh, quant, "train", rngs=rngs)

  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    return cls(config, stage, mesh, None, rngs=nnx.Rngs(params=seed, dropout=seed + 1))


def put_on_slices(monkeypatch: pytest.MonkeyPatch) -> None:
  """Makes pipelines believe that their stages are on different slices: the devices of one process have none."""
  of_config = CircularSchedule.of_config
  told = lambda cls, config: dataclasses.replace(of_config(config), over_slices=True)
  monkeypatch.setattr(CircularSchedule, "of_config", classmethod(told))
