"""GPipe equals a loop over the layers, in value and in the gradient of every parameter."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import maxtext_pp_ext

maxtext_pp_ext.install()  # does nothing where the start-up hook has done it

from maxtext.configs import pyconfig  # noqa: E402
import pytest  # noqa: E402

from maxtext_pp_ext.testing import assert_pipeline_parity  # noqa: E402


def config_of(stages, **keys):
  keys = {
      "run_name": "gpipe",
      "pipeline_impl": "gpipe",
      "ici_pipeline_parallelism": stages,
      "num_pipeline_microbatches": 2 * stages,
      "per_device_batch_size": stages,
      "decoder_block": "llama2",
      "base_num_decoder_layers": 4,
      "num_layers_per_pipeline_stage": 4 // stages,
      "base_emb_dim": 16,
      "base_num_query_heads": 2,
      "base_num_kv_heads": 2,
      "head_dim": 8,
      "base_mlp_dim": 32,
      "max_target_length": 16,
      "vocab_size": 64,
      "attention": "dot_product",
      "dtype": "float32",
      "enable_checkpointing": False,
      "dataset_type": "synthetic",
      "skip_jax_distributed_system": True,
  } | keys
  return pyconfig.initialize(["", *(f"{key}={value}" for key, value in keys.items())])


@pytest.mark.parametrize("stages", [2, 4])
def test_it_equals_a_loop_over_the_layers(stages):
  assert_pipeline_parity(None, config_of(stages))


def test_several_repeats_are_refused_with_what_to_set():
  with pytest.raises(NotImplementedError, match="num_layers_per_pipeline_stage=2"):
    assert_pipeline_parity(None, config_of(2, num_layers_per_pipeline_stage=1))
