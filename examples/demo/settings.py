# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The MaxText keys of the demo: those that both runs share, and those in which they differ."""

import dataclasses
import pathlib

from maxtext_pp_ext.host.models.run_config import maxtext_folder
from maxtext_pp_ext.trainer_runs.trainer import as_arguments

STAGES, FSDP, LAYERS = 4, 2, 8
DEVICES = STAGES * FSDP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """One demo. Everything it writes lies under `output`."""

  output: pathlib.Path
  steps: int
  pipeline_impl: str = "circular_bsw"  # "host" is MaxText's own pipeline: the key is then not given at all
  processes: int = 1  # of the pipelined run
  extra_keys: tuple[str, ...] = ()  # more MaxText keys, `key=value`, for the pipelined run only

  @property
  def data_file(self) -> pathlib.Path:
    return self.output / "data" / "topics.array_record"

  @property
  def summary_file(self) -> pathlib.Path:
    return self.output / "data" / "summary.json"

  def weights(self, layout: str) -> pathlib.Path:
    return self.output / "initial-weights" / layout

  def metrics_file(self, name: str, process: int | str) -> pathlib.Path:
    return self.output / f"{name}.metrics.{process}.jsonl"

  def pipelined_keys(self) -> list[str]:
    chosen: dict[str, object] = {} if self.pipeline_impl == "host" else {"pipeline_impl": self.pipeline_impl}
    mesh = {"ici_pipeline_parallelism": STAGES, "ici_fsdp_parallelism": FSDP, "num_pipeline_microbatches": 8}
    return as_arguments(chosen | mesh) + list(self.extra_keys)

  def sequential_keys(self) -> list[str]:
    return as_arguments({"ici_fsdp_parallelism": DEVICES})

  def shared_keys(self) -> list[str]:
    """Returns the keys of both runs: model, text, optimizer, and paths under `output` for everything written.

    The model is a Llama-type decoder of 4.5 million parameters. Nearly all are in the two vocabulary tables: MaxText's
    wheel has no tokenizer with fewer than 32000 tokens.
    """
    return as_arguments(
        {
            "decoder_block": "llama2",
            "base_emb_dim": 64,
            "base_num_query_heads": 4,
            "base_num_kv_heads": 2,
            "head_dim": 16,
            "base_mlp_dim": 192,
            "base_num_decoder_layers": LAYERS,
            "vocab_size": 32000,
            # float32 throughout, so the two runs differ only in the order of additions.
            "dtype": "float32",
            "weight_dtype": "float32",
            "attention": "dot_product",
            "hardware": "cpu",
            "skip_jax_distributed_system": True,
            "dataset_type": "grain",
            "grain_file_type": "arrayrecord",
            "grain_train_files": self.data_file,
            "grain_worker_count": 0,  # 0.5 MB of text needs no worker process
            "tokenizer_type": "sentencepiece",
            "tokenizer_path": maxtext_folder() / "assets" / "tokenizers" / "tokenizer.llama2",
            "packing": False,  # so a batch does not depend on the number of processes that read it
            "num_epoch": 1 + self.steps // 32,  # one pass over the text is about 75 steps; this never runs dry
            "per_device_batch_size": 2,
            "max_target_length": 128,
            "steps": self.steps,
            "learning_rate": 3e-3,
            "enable_checkpointing": False,
            "enable_tensorboard": False,
            "log_config": False,
            "base_output_directory": self.output / "maxtext",
            "jax_cache_dir": self.output / "jax-cache",
        }
    )
