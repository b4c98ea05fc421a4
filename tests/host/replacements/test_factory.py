# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the factory patch point and of the decoder patch point, with a fake implementation."""

import types

import pytest

from maxtext_pp_ext import registry
from maxtext_pp_ext.host.replacements import decoder_call, factory

PIPELINED = {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 2, "base_num_decoder_layers": 4}


@pytest.fixture
def fake(monkeypatch):
  """An implementation named `circular` that only records how it was built."""
  from flax import nnx

  class Fake(nnx.Module):
    built = []

    def __init__(self, config, stage_factory, mesh, remat_policy=None, *, rngs):
      Fake.built.append(
          {"config": config, "stage_factory": stage_factory, "mesh": mesh, "remat_policy": remat_policy, "rngs": rngs}
      )

    def __call__(self, inputs):
      return inputs + 1

    def get_weight_sharding(self, *init_args):
      return init_args

  implementation = registry.Implementation(name="circular", summary="noted", load=lambda: Fake)
  monkeypatch.setattr(registry, "get", lambda name: implementation)
  factory.log_once.cache_clear()
  return Fake


def _calls(monkeypatch, module, name):
  """Records calls of one of the host's pipeline classes instead of building it."""
  calls = []
  monkeypatch.setattr(module, name, lambda **kwargs: calls.append(kwargs) or name)
  return calls


@pytest.mark.parametrize("per_repeat, expected", [(False, "NNXPipeline"), (True, "NNXCircularPipeline")])
def test_the_host_builds_its_own_pipelines_for_pipeline_impl_host(installed, monkeypatch, per_repeat, expected):
  from maxtext.layers import pipeline

  calls = _calls(monkeypatch, pipeline, expected)
  config = types.SimpleNamespace(pipeline_impl="host", pipeline_fsdp_ag_per_repeat=per_repeat)
  assert pipeline.create_nnx_pipeline(config, "stage", "mesh", "policy", rngs="rngs") == expected
  assert calls == [{"config": config, "stage_factory": "stage", "mesh": "mesh", "remat_policy": "policy", "rngs": "rngs"}]


def test_a_config_without_our_key_is_the_hosts(installed, monkeypatch):
  from maxtext.layers import pipeline

  calls = _calls(monkeypatch, pipeline, "Pipeline")
  config = types.SimpleNamespace(pipeline_fsdp_ag_per_repeat=False)
  assert pipeline.create_pipeline(config, layers="stage", mesh="mesh") == "Pipeline"
  assert calls == [{"config": config, "stage_factory": "stage", "mesh": "mesh", "remat_policy": None}]


def test_our_implementation_is_built_with_all_that_the_decoder_gives(fake, make_config):
  from maxtext.layers import nnx_decoders

  config = make_config(**PIPELINED, pipeline_impl="circular")
  built = nnx_decoders.create_nnx_pipeline(
      config=config, stage_factory="stage", mesh="mesh", remat_policy="policy", rngs="rngs"
  )
  assert isinstance(built, fake)
  assert fake.built[-1] == {
      "config": config,
      "stage_factory": "stage",
      "mesh": "mesh",
      "remat_policy": "policy",
      "rngs": "rngs",
  }


def test_the_linen_factory_wraps_our_module_once_per_class(fake, make_config):
  from flax import linen
  import jax
  from maxtext.layers import pipeline

  config = make_config(**PIPELINED, pipeline_impl="circular")
  module = pipeline.create_pipeline(config=config, layers="stage", mesh=None)
  assert isinstance(module, linen.Module)
  assert type(module) is type(pipeline.create_pipeline(config, "stage", None))
  out, variables = module.init_with_output(jax.random.PRNGKey(0), jax.numpy.zeros(3))
  assert out.tolist() == [1, 1, 1] and fake.built[-1]["stage_factory"] == "stage"
  assert module.bind(variables).get_weight_sharding("x") == ("x",)


def test_one_line_in_the_log_says_what_is_active(fake, make_config, monkeypatch):
  from maxtext.layers import pipeline
  from maxtext.utils import max_logging

  lines = []
  monkeypatch.setattr(max_logging, "log", lines.append)
  config = make_config(**PIPELINED, pipeline_impl="circular")
  for _ in range(3):
    pipeline.create_nnx_pipeline(config, "stage", None, rngs=None)
  # T = 2·2 + 1·(2 − 1) = 5 iterations, 1 of them bubble
  assert lines == [
      "maxtext_pp_ext: pipeline_impl=circular is active: 2 stages, 2 repeats, 2 microbatches, forwarding delay 1, "
      "bubble fraction 0.200"
  ]


def test_an_implementation_that_is_unknown_when_the_model_is_built_is_an_error(installed):
  from maxtext.layers import pipeline

  with pytest.raises(registry.UnknownImplementationError, match="circular_bsw"):
    pipeline.create_nnx_pipeline(types.SimpleNamespace(pipeline_impl="circular_bws"), "stage", None, rngs=None)


def _decoder_config(**overrides):
  values = {
      "pipeline_impl": "circular",
      "using_pipeline_parallelism": True,
      "decoder_block": "llama2",
      "engram_layers": [],
  }
  return types.SimpleNamespace(**(values | overrides))


MASK = types.SimpleNamespace(bidirectional_mask="mask", bidirectional_mask_video=None)
LOST = [
    ({"attention_metadata": {}}, {}, "attention_metadata"),
    ({"kv_caches": []}, {}, "kv_caches"),
    ({"slot": 0}, {}, "slot"),
    ({"previous_chunk": {}}, {}, "previous_chunk"),
    ({"deepstack_visual_embeds": []}, {}, "deepstack_visual_embeds"),
    ({"multimodal_input": MASK}, {"decoder_block": "gemma3"}, "bidirectional_mask"),
    ({}, {"engram_layers": [1]}, "decoder_input_tokens"),
    ({"decoder_positions": types.SimpleNamespace(ndim=3, shape=(2, 16, 3))}, {}, "decoder_positions (shape (2, 16, 3)"),
]


@pytest.mark.parametrize("arguments, config, named", LOST)
def test_an_argument_that_the_pipelined_path_drops_is_refused_by_name(arguments, config, named):
  with pytest.raises(NotImplementedError) as error:
    decoder_call.refuse_lost_arguments(_decoder_config(**config), arguments)
  assert named in str(error.value) and "pipeline_impl=circular" in str(error.value)


@pytest.mark.parametrize("arguments, config, named", LOST)
@pytest.mark.parametrize("passive", [{"pipeline_impl": "host"}, {"using_pipeline_parallelism": False}])
def test_without_an_implementation_of_ours_every_argument_passes(arguments, config, named, passive):
  del named
  decoder_call.refuse_lost_arguments(_decoder_config(**config, **passive), arguments)


def test_arguments_that_lose_nothing_pass():
  no_mask = types.SimpleNamespace(bidirectional_mask=None, bidirectional_mask_video=None)
  decoder_call.refuse_lost_arguments(_decoder_config(), {"slot": None, "multimodal_input": MASK})
  decoder_call.refuse_lost_arguments(_decoder_config(decoder_block="gemma3"), {"multimodal_input": no_mask})


@pytest.mark.parametrize("positional", [True, False])
def test_the_decoder_itself_refuses_before_it_computes_anything(installed, positional):
  from maxtext.layers import nnx_decoders

  decoder = object.__new__(nnx_decoders.NNXDecoder)
  object.__setattr__(decoder, "config", _decoder_config())
  arguments = {"shared_embedding": None, "decoder_input_tokens": None, "decoder_positions": None}
  with pytest.raises(NotImplementedError, match="previous_chunk"):
    if positional:
      decoder(None, None, None, None, False, "train", {"chunk": 1})
    else:
      decoder(**arguments, previous_chunk={"chunk": 1})


def test_the_decoder_is_called_untouched_for_pipeline_impl_host(installed, monkeypatch):
  from maxtext.layers import nnx_decoders

  decoder = object.__new__(nnx_decoders.NNXDecoder)
  object.__setattr__(decoder, "config", _decoder_config(pipeline_impl="host"))
  with pytest.raises(AttributeError, match="'ndim'"):  # the host's first line: decoder_input_tokens.ndim
    decoder(None, None, None, slot=3, attention_metadata={})
