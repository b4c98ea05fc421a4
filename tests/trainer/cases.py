# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainings of the same models by MaxText's own trainers, with pipelines and without, and how far apart they may be.

All runs are on 12 virtual devices, which 2, 3 and 4 stages divide; FSDP uses the other factor. Model, data, initial
weights, optimizer and the rows of a batch are the same. One run without a pipeline, with layers sharded over 12 devices,
is the reference of all.

How far apart: both sides round differently, and training multiplies what it starts from. How much is measured, by a twin
of the reference that differs by rounding alone: its initial weights are moved by `ROUNDING` = 2⁻²² of themselves, up or
down at random. A layer is a chain of some 16 rounded operations, forward and backward; with independent signs they add
up to √16 roundings of 2⁻²⁴. What the twin has drifted apart from the reference by some step, in the loss or in the
gradient norm, is what float32 explains, including all that AdamW does to it: small gradients, where it divides by their
size, and experts that change places when their logits are as close as rounding. The twin is one sample of it, therefore
`SAMPLES` times its largest drift up to that step, or `SAMPLES · ROUNDING` where that is more.
"""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
import pathlib
import random

from maxtext_pp_ext import registry
from maxtext_pp_ext.trainer_runs import trainer
from tests.trainer.runs import Results, Run

DEVICES = 12
STEPS = 20
ROUNDING = 2.0**-22
SAMPLES = 4.0
TRAIN_METRICS = ("learning/loss", "learning/raw_grad_norm")
METRICS = (*TRAIN_METRICS, "eval/avg_loss")
VOCABULARY = 64
LONGEST = 24  # tokens in a sequence
LAYERS = 12
IMPLEMENTATIONS = tuple(name for name in registry.names() if name != registry.HOST)
OTHERS = tuple(name for name in IMPLEMENTATIONS if name != "circular_bsw")  # which most tests compare by itself

MODELS = {
    "dense": {"decoder_block": "llama2", "base_mlp_dim": 48},
    "moe": {
        "decoder_block": "mixtral",
        "base_mlp_dim": 24,
        "base_moe_mlp_dim": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "load_balance_loss_weight": 0.1,
        "sparse_matmul": False,
        "megablox": False,
        "capacity_factor": 1.0,  # of some experts a sequence has too many tokens, which are dropped
    },
}
# Trained in fewer ways than the others. MaxText's sparse experts have a load-balance loss of each device's tokens, which
# depends on the number of devices. DeepSeek's first layer is outside of the pipeline.
MORE_MODELS = {
    "dropless": {**MODELS["moe"], "sparse_matmul": True, "capacity_factor": -1.0, "load_balance_loss_weight": 0.0},
    "indexer": {
        "decoder_block": "deepseek",
        "base_num_decoder_layers": LAYERS + 1,
        "first_num_dense_layers": 1,
        "base_mlp_dim": 48,
        "base_moe_mlp_dim": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_experts": 1,
        "load_balance_loss_weight": 0.1,
        "sparse_matmul": False,
        "megablox": False,
        "attention_type": "mla",
        "base_num_kv_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "use_indexer": True,
        "indexer_topk": 8,
        "indexer_n_heads": 2,
        "indexer_head_dim": 8,
        "indexer_loss_scaling_factor": 0.5,
        "indexer_sparse_training": True,
    },
}
# stages: repeats × layers per stage are 12 layers / stages. One stage is no pipeline.
PIPELINES = {
    1: {"ici_pipeline_parallelism": 1, "num_pipeline_microbatches": 2},
    2: {"ici_pipeline_parallelism": 2, "num_layers_per_pipeline_stage": 2, "num_pipeline_microbatches": 4},
    3: {
        "ici_pipeline_parallelism": 3,
        "num_layers_per_pipeline_stage": 2,
        "scan_layers_per_stage": True,
        "num_pipeline_microbatches": 6,
    },
    4: {"ici_pipeline_parallelism": 4, "num_layers_per_pipeline_stage": 1, "num_pipeline_microbatches": 4},
}
PRETRAIN, SFT, ACCUMULATION, UNPACKED = "pretrain", "sft", "accumulation", "unpacked"
MODES = {
    PRETRAIN: {"packing": True},
    SFT: {
        "packing": False,  # the rest of each row is padding
        "train_data_columns": "['prompt','completion']",
        "eval_data_columns": "['prompt','completion']",
        "sft_train_on_completion_only": True,
    },
    ACCUMULATION: {"packing": True, "gradient_accumulation_steps": 2, "eval_per_device_batch_size": 2},
    # A document a row: each process reads its share of them, and together they have the same ones, in another order.
    UNPACKED: {"packing": False},
}
# Evaluations have half as many rows as steps elsewhere, which more microbatches would not divide. These have so few rows
# that FSDP does not divide them.
MICROBATCH_FACTOR = {PRETRAIN: 1, SFT: 1, ACCUMULATION: 2, UNPACKED: 1}
SHARED = {
    "base_emb_dim": 24,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_num_decoder_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_target_length": LONGEST,
    "per_device_batch_size": 2,
    "eval_per_device_batch_size": 1,
    "steps": STEPS,
    "eval_interval": STEPS // 2,
    "eval_steps": 2,
    "learning_rate": 0.003,
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "dataset_type": "grain",
    "grain_file_type": "arrayrecord",
    "grain_worker_count": 0,
    "grain_worker_count_eval": 0,
    "tokenizer_type": "huggingface",
    "tokenizer_path": "tokenizer",
    "num_epoch": 10,
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "enable_tensorboard": False,
    "log_config": False,
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
}


@dataclasses.dataclass(frozen=True, order=True)
class Case:
  """One pipelined training; `keys` come on top of all others."""

  model: str
  mode: str
  stages: int
  pipeline_impl: str
  keys: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    return "_".join([self.model, self.mode, self.pipeline_impl, str(self.stages), *map(_as_name, self.keys)])

  @property
  def reference(self) -> str:
    return f"{self.model}_{self.mode}"

  def run(self) -> Run:
    devices = {"ici_fsdp_parallelism": DEVICES // self.stages, "pipeline_impl": self.pipeline_impl}
    pipeline = PIPELINES[self.stages]
    microbatches = MICROBATCH_FACTOR[self.mode] * pipeline["num_pipeline_microbatches"]
    own = dict(key.split("=", 1) for key in self.keys)
    return run_of(self.model, self.mode, pipeline | {"num_pipeline_microbatches": microbatches} | devices | own)


def all_cases() -> list[Case]:
  """Every model, implementation and number of stages in pre-training.

  In the other modes, either the implementation or the number of stages varies.
  """
  modes = (PRETRAIN, SFT, ACCUMULATION)
  every = (Case(*parts) for parts in itertools.product(MODELS, modes, PIPELINES, IMPLEMENTATIONS))
  return [c for c in every if c.mode == PRETRAIN or c.stages == 3 or c.pipeline_impl == "circular_bsw"]


def more_cases() -> list[Case]:
  return [Case(model, PRETRAIN, 3, name) for model, name in itertools.product(MORE_MODELS, IMPLEMENTATIONS)]


def twin_of(reference: str) -> str:
  return f"{reference}_twin"


def _as_name(key: str) -> str:
  return key.replace("=", "-")


def run_of(model: str, mode: str, keys: dict[str, object], rounding: float = 0.0) -> Run:
  """A training in this mode; `keys` come on top of all others."""
  data = mode if mode == SFT else PRETRAIN
  files = {"grain_train_files": f"data/{data}.array_record", "grain_eval_files": f"data/{data}_eval.array_record"}
  tokenize = {"tokenize_train_data": mode == SFT, "tokenize_eval_data": mode == SFT}
  merged = SHARED | (MODELS | MORE_MODELS)[model] | MODES[mode] | files | tokenize | keys
  kind = "maxtext.trainers.post_train.sft.train_sft_native" if mode == SFT else trainer.PRE_TRAIN
  return Run(keys=trainer.as_arguments(merged), trainer=kind, weights=model, rounding=rounding)


def runs_of(cases: Iterable[Case]) -> dict[str, Run]:
  """The runs of all cases, and their references."""
  cases = list(cases)
  runs = {}
  for case in cases:
    alone = {"ici_fsdp_parallelism": DEVICES}
    runs[case.reference] = run_of(case.model, case.mode, alone)
    runs[twin_of(case.reference)] = run_of(case.model, case.mode, alone, ROUNDING)
  return runs | {case.name: case.run() for case in cases}


def weights_of(cases: Iterable[Case]) -> dict[str, Sequence[str]]:
  return {case.model: run_of(case.model, PRETRAIN, {"ici_fsdp_parallelism": DEVICES}).keys for case in cases}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """A metric of a pipelined run and of the run without a pipeline, per step or evaluation.

  Attributes:
    difference: relative to the reference.
    allowed: what rounding explains, relative to the reference.
  """

  metric: str
  difference: tuple[float, ...]
  allowed: tuple[float, ...]

  @property
  def agrees(self) -> bool:
    # A NaN is no agreement.
    return all(d <= a for d, a in zip(self.difference, self.allowed, strict=True))


def compare(
    results: Results, run: str, reference: str, metrics: Sequence[str] = METRICS, steps: int = STEPS
) -> Iterator[Comparison]:
  """Metrics of a run's steps and evaluations, with those of a reference that has a twin.

  Raises:
    RunFailedError: if one of the runs failed or did not finish.
    ValueError: if the runs have different numbers of steps or evaluations, or a metric of the reference is 0.
  """
  for metric in metrics:
    ours, expected, twin = (
        [m[metric] for m in results.metrics(name, metric)] for name in (run, reference, twin_of(reference))
    )
    if metric in TRAIN_METRICS and len(expected) != steps:
      raise trainer.RunFailedError(f"{reference} trained {len(expected)} of {steps} steps.")
    if 0 in expected:
      raise ValueError(f"{metric} of {reference} is 0 at step {expected.index(0)}: nothing is compared.")
    drift = [abs(b - a) / abs(a) for a, b in zip(expected, twin, strict=True)]
    yield Comparison(
        metric=metric,
        difference=tuple(abs(b - a) / abs(a) for a, b in zip(expected, ours, strict=True)),
        allowed=tuple(SAMPLES * d for d in itertools.accumulate([ROUNDING, *drift], max))[1:],
    )


def write_data(folder: pathlib.Path, seed: int = 0) -> None:
  """A tokenizer of 64 words, and documents of random length: token ids for pretraining, dialogues for SFT."""
  numbers = random.Random(seed)
  write_tokenizer(folder / "tokenizer")
  for part, documents in {"": 1500, "_eval": 200}.items():
    texts = [_document(numbers, 4, LONGEST) for _ in range(documents)]
    trainer.write_records(folder / "data" / f"{PRETRAIN}{part}.array_record", ({"text": ids} for ids in texts))
    turns = [(_document(numbers, 2, LONGEST // 2), _document(numbers, 2, LONGEST // 2)) for _ in range(documents)]
    dialogues = ({"prompt": _words(prompt), "completion": _words(completion)} for prompt, completion in turns)
    trainer.write_records(folder / "data" / f"{SFT}{part}.array_record", dialogues)


def _document(numbers: random.Random, shortest: int, longest: int) -> list[int]:
  """Counts in steps of 1 to 3 with occasional errors: text that can be learnt, but not by heart."""
  token, step, ids = numbers.randrange(4, VOCABULARY), numbers.randint(1, 3), []
  for _ in range(numbers.randint(shortest, longest)):
    ids.append(token)
    token = 4 + (token - 4 + step) % (VOCABULARY - 4) if numbers.random() < 0.9 else numbers.randrange(4, VOCABULARY)
  return ids


def _words(ids: Iterable[int]) -> str:
  return " ".join(f"w{token}" for token in ids)


def write_tokenizer(folder: pathlib.Path) -> None:
  import tokenizers  # pylint: disable=import-outside-toplevel
  import transformers  # pylint: disable=import-outside-toplevel

  special = ["<pad>", "<unk>", "<s>", "</s>"]
  vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, VOCABULARY))])}
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
  words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  pad, unk, bos, eos = special
  fast = transformers.PreTrainedTokenizerFast(
      tokenizer_object=words, pad_token=pad, unk_token=unk, bos_token=bos, eos_token=eos
  )
  fast.chat_template = (
      "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %} </s>{% else %} <s> {% endif %}"
      "{% endfor %}"
  )
  fast.save_pretrained(folder)
