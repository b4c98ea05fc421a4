# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Step times of MaxText's pipelines and ours on 8 virtual CPU devices, paired in one process.

  python -m benchmarks.wall_time [--impl …] [--rounds N] [--layers 16]

A step is forward and backward of the pipelined Llama layers, 4 stages × FSDP 2. In each round every pipeline runs one
step, in an order that changes from round to round. Reported ratios are medians of the ratios within a round, so that
other load on the machine affects all alike. On virtual devices a transfer is a copy in memory. So the times show whether
a pipeline computes or copies more than another, not how fast it would be on TPUs.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

# pylint: disable=wrong-import-position
import argparse
from collections.abc import Callable
import dataclasses
import pathlib
import statistics
import tempfile
import time
from typing import Any

from flax import linen as nn
from flax import nnx
import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import maxtext
from rich import console as rich_console
from rich import progress

from benchmarks import compile_step, shapes, tables
import maxtext_pp_ext
from maxtext_pp_ext.compiled import step_times, tasks
from maxtext_pp_ext.compiled.program import execution, hlo, products
from maxtext_pp_ext.host.models import variants

maxtext_pp_ext.install()

# After install(), which adds our keys to MaxText's schema when the schema is imported.
from maxtext.configs import pyconfig  # noqa: E402
from maxtext.layers import pipeline  # noqa: E402
from maxtext.models import llama2  # noqa: E402
from maxtext.utils import maxtext_utils, sharding  # noqa: E402

from maxtext_pp_ext.testing import parity  # noqa: E402

_STAGES, _FSDP = 4, 2
_IMPLEMENTATIONS = (shapes.PLAIN, "host BSW", "circular", "circular_bsw", "circular_ag_once")
_HEADER = ("pipeline", "median ms", "of host plain", "of host BSW", "dot GFLOP", "of host plain", "compile s")


@dataclasses.dataclass(kw_only=True)
class Pipeline:
  """A compiled step and its figures."""

  step: Callable[[], Any]  # runs one forward and backward pass and waits until it is done
  dot_flops: float  # dot FLOPs per device and step, from the compiled program
  compile_seconds: float  # time to trace and compile
  seconds: list[float] = dataclasses.field(default_factory=list)  # times of the measured steps


def config_keys(options: argparse.Namespace) -> dict[str, Any]:
  """MaxText's keys except those that choose the pipeline. Matrix multiplications are large enough to take most time."""
  return {
      "ici_pipeline_parallelism": _STAGES,
      "ici_fsdp_parallelism": _FSDP,
      "base_num_decoder_layers": options.layers,
      "num_pipeline_repeats": options.layers // _STAGES,
      "num_pipeline_microbatches": options.microbatches,
      # Each microbatch has _FSDP sequences, one for each device of a stage.
      "per_device_batch_size": options.microbatches / _STAGES,
      "base_emb_dim": options.embed,
      "base_mlp_dim": 4 * options.embed,
      "base_num_query_heads": 4,
      "base_num_kv_heads": 4,
      "head_dim": options.embed // 4,
      "max_target_length": options.sequence,
      "vocab_size": 32,
      "attention": "dot_product",
      "dtype": options.dtype,
      "weight_dtype": "float32",
      "enable_checkpointing": False,
      "enable_goodput_recording": False,
      "log_config": False,
      "dataset_type": "synthetic",
      "run_name": "wall_time",
      "base_output_directory": tempfile.gettempdir(),
      "skip_jax_distributed_system": True,
      "jax_cache_dir": "",
  }


def build(impl: str, keys: dict[str, Any]) -> Pipeline:
  """Builds a pipeline as MaxText's decoder does, and compiles its step."""
  base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
  config = pyconfig.initialize(["", str(base)], **keys, **variants.keys(shapes.IMPLEMENTATIONS[impl], keys))
  mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)

  def stage(rngs):
    return llama2.LlamaDecoderLayer(config=config, mesh=mesh, quant=None, model_mode="train", rngs=rngs)

  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    # MaxText's decoder passes None as the policy for remat_policy=full, its default.
    module = pipeline.create_nnx_pipeline(config, stage, mesh, None, rngs=nnx.Rngs(params=0, dropout=1))
    specs = module.get_weight_sharding() if config.pipeline_fsdp_ag_per_repeat else None
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]  # overloads of nnx.split
    batch = parity.Batch.random(config)

    def forward(params, inputs):
      again = nnx.merge(graphdef, params, rest, copy=True)
      return again(inputs, batch.segment_ids, batch.positions, True, "train", logical_partition_spec=specs)

    def forward_and_backward(params, inputs):
      outputs, vjp_fn = jax.vjp(forward, params, inputs)
      return outputs, vjp_fn(batch.cotangent)

    # Weights and gradients are sharded as in training, and so is the batch.
    shardings = sharding.nnx_construct_named_sharding(params, mesh)
    activations = NamedSharding(mesh, nn.logical_to_mesh_axes(("activation_batch", None, None)) or P())
    params = jax.tree.map(jax.device_put, params, shardings)
    inputs = jax.device_put(batch.inputs, activations)
    start = time.monotonic()
    step = jax.jit(forward_and_backward, out_shardings=(activations, (shardings, activations)))
    compiled = step.lower(params, inputs).compile()
    seconds = time.monotonic() - start
  return Pipeline(
      step=lambda: jax.block_until_ready(compiled(params, inputs)),
      dot_flops=execution.of_module(hlo.program(compiled.as_text() or "")).total(products.dot_flops),
      compile_seconds=seconds,
  )


def report(pipelines: dict[str, Pipeline], failures: dict[str, str], description: str) -> str:
  """The Markdown file."""
  rows = []
  for impl, each in pipelines.items():
    ratios = [
        f"{step_times.ratio(each.seconds, pipelines[base].seconds)['median']:.3f}×"
        if base in pipelines
        else tables.MISSING
        for base in (shapes.PLAIN, "host BSW")
    ]
    base_flops = pipelines[shapes.PLAIN].dot_flops if shapes.PLAIN in pipelines else None
    flops = f"{each.dot_flops / base_flops:.3f}×" if base_flops else tables.MISSING
    milliseconds = f"{statistics.median(each.seconds) * 1e3:.0f}"
    gflop = f"{each.dot_flops / 1e9:.2f}"
    rows.append((impl, milliseconds, *ratios, gflop, flops, f"{each.compile_seconds:.1f}"))
  parts = ["# Step times on virtual CPU devices", description, tables.markdown(_HEADER, rows)]
  parts += [f"- {impl}: {reason}" for impl, reason in failures.items()]
  return "\n\n".join(parts) + "\n"


def _description(options: argparse.Namespace) -> str:
  versions = ", ".join(f"{package} {version}" for package, version in compile_step.versions().items())
  return (
      "`python -m benchmarks.wall_time` printed this. A step is forward and backward of pipelined Llama layers in "
      f"{options.dtype}, remat policy full: {options.layers} layers, embedding {options.embed}, MLP {4 * options.embed}, "
      f"sequence {options.sequence}, {options.microbatches} microbatches of {_FSDP} sequences; {_STAGES} stages × FSDP "
      f"{_FSDP} on 8 virtual devices of {os.cpu_count()} cores. Medians of {options.rounds} rounds: in each round every "
      "pipeline runs one step, and ratios are medians of the ratios within a round. dot GFLOP: of one device and step, "
      "counted in the compiled program. Host BSW computes wrong values with 4 stages, but the same number of values. "
      f"Versions: {versions}."
  )


def main(argv: list[str] | None = None) -> None:
  options = _parse(argv)
  console = rich_console.Console()
  pipelines, failures = {}, {}
  for impl in options.impl:
    with console.status(f"compiling {impl}"):
      try:
        pipelines[impl] = build(impl, config_keys(options))
      except Exception as error:  # pylint: disable=broad-exception-caught
        # A pipeline that cannot be built is a row with its reason; the others are still worth measuring.
        failures[impl] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    ending = failures.get(impl) or f"compiled in {pipelines[impl].compile_seconds:.1f} s"
    console.print(f"{impl}: {ending}", markup=False, highlight=False)
  with progress.Progress(console=console) as bar:
    task = bar.add_task("rounds", total=options.rounds)
    steps = {impl: each.step for impl, each in pipelines.items()}
    for impl, seconds in tasks.measure(steps, options.rounds, lambda done: bar.update(task, completed=done)).items():
      pipelines[impl].seconds = seconds
  results = {
      impl: {
          "seconds": [round(value, 5) for value in each.seconds],
          "dot_flops": each.dot_flops,
          "compile_s": round(each.compile_seconds, 1),
      }
      for impl, each in pipelines.items()
  }
  keys = config_keys(options)
  tables.write(
      options.output.with_suffix(".json"),
      {"keys": keys, "versions": compile_step.versions(), "pipelines": results, "failures": failures},
  )
  text = report(pipelines, failures, _description(options))
  options.output.with_suffix(".md").write_text(text, encoding="utf-8")
  console.print(text, markup=False, highlight=False, soft_wrap=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.wall_time", description=__doc__.splitlines()[0])
  parser.add_argument("--impl", nargs="+", type=shapes.implementation, default=list(_IMPLEMENTATIONS), metavar="NAME")
  parser.add_argument("--rounds", type=int, default=11, help="measured steps of each pipeline (default: %(default)s)")
  parser.add_argument("--layers", type=int, default=16, help="a multiple of 8, for two repeats and more")
  parser.add_argument("--microbatches", type=int, default=8, help="a multiple of 4")
  parser.add_argument("--embed", type=int, default=256)
  parser.add_argument("--sequence", type=int, default=128)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--output", type=pathlib.Path, default=compile_step.RESULTS / "wall_time")
  options = parser.parse_args(argv)
  if options.layers % 8 or options.microbatches % 4:
    parser.error(
        f"--layers must be a multiple of 8 and --microbatches of 4; they are {options.layers}, {options.microbatches}"
    )
  return options


if __name__ == "__main__":
  main()
