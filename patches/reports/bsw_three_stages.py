# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's pipeline with pipeline_fsdp_ag_per_repeat=true against the same layers one after another, with MaxText alone.

MAXTEXT_PP_EXT=off DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python patches/reports/bsw_three_stages.py [--fixed]
"""

import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# isort: split

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from maxtext.common.common_types import MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from maxtext.layers import pipeline
from maxtext.models.simple_layer import SimpleDecoderLayer, SimpleDecoderLayerToLinen
from maxtext.utils import maxtext_utils


def outputs(stages: int, repeats: int, microbatches: int, per_repeat: bool) -> tuple[jax.Array, jax.Array]:
  """The outputs of the pipeline, and of its layers one after another, both [batch, sequence, embed]."""
  config = pyconfig.initialize(
      [""],
      run_name="report",
      log_config=False,
      enable_checkpointing=False,
      decoder_block="simple",
      base_emb_dim=16,
      base_mlp_dim=32,
      base_num_decoder_layers=stages * repeats,
      base_num_query_heads=4,
      base_num_kv_heads=4,
      head_dim=4,
      vocab_size=32,
      max_target_length=8,
      per_device_batch_size=4.0,
      dtype="float32",
      matmul_precision="highest",
      ici_pipeline_parallelism=stages,
      ici_fsdp_parallelism=jax.device_count() // stages,
      num_pipeline_microbatches=microbatches,
      pipeline_fsdp_ag_per_repeat=per_repeat,
      skip_jax_distributed_system=True,
  )
  mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
  kind = {"config": config, "mesh": mesh, "model_mode": MODEL_MODE_TRAIN}
  x = jax.random.normal(jax.random.PRNGKey(1), (config.global_batch_size_to_train_on, 8, 16))
  rest = (jnp.ones(x.shape[:2], jnp.int32), jnp.tile(jnp.arange(8), (len(x), 1)), True, MODEL_MODE_TRAIN)
  piped = pipeline.create_pipeline(config=config, layers=lambda rngs: SimpleDecoderLayer(rngs=rngs, **kind), mesh=mesh)
  layer = SimpleDecoderLayerToLinen(rngs=nnx.Rngs(params=0), **kind)
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    params = piped.init(jax.random.PRNGKey(0), x, *rest)
    spec = piped.bind(params).get_weight_sharding(x, *rest)
    found = jax.jit(lambda p: piped.apply(p, x, *rest, logical_partition_spec=spec))(params)
    expected = x
    for number in range(stages * repeats):
      own = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:])[number], nn.meta.unbox(params)["params"]["layers"])
      expected, _ = layer.apply({"params": own}, expected, *rest)
  return found, expected


def main() -> None:
  if "--fixed" in sys.argv:
    cls = pipeline.NNXCircularPipeline
    prefetch = cls.weight_prefetching

    # weight_prefetching adds 1 itself. Stage s begins its next repeat s iterations after stage 0, so the last stage
    # begins it forwarding_delay * (stages - 1) iterations later.
    def weight_prefetching(self, weights_state, physical_partition_spec, loop_iteration):
      last = self.forwarding_delay * (self.num_stages - 1)
      return prefetch(self, weights_state, physical_partition_spec, loop_iteration + last - 1)

    cls.weight_prefetching = weight_prefetching
  print("stages repeats per_repeat   largest error of an output, relative to the largest output")
  for stages in (2, 4, 8):
    for per_repeat in (False, True):
      found, expected = outputs(stages, 2, stages, per_repeat)
      error = jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected))
      print(f"{stages:6} {2:7} {per_repeat!s:10}   {float(error):.1e}")


if __name__ == "__main__":
  main()
