# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the version checks: which versions of MaxText they accept, and their messages for others."""

import inspect
import pathlib
import re
import types

import pytest

import maxtext_pp_ext
from maxtext_pp_ext import config
from maxtext_pp_ext.config import host_keys
from maxtext_pp_ext.host.patch_points import table, version
from maxtext_pp_ext.host.rules import pipelined_path, windowed_path


@pytest.mark.parametrize("found", ["0.2.5", "0.2.10", "0.2.5.post1", "0.2.6.dev3+g123", "0.2.5rc1"])
def test_supported_versions_pass(found, monkeypatch):
  monkeypatch.setattr(version, "found_version", lambda: found)
  version.check_version()


@pytest.mark.parametrize("found", ["0.2.4", "0.3", "0.3.0", "1.0", "0.2", "unknown", ""])
def test_other_versions_stop_with_both_versions(found, monkeypatch):
  monkeypatch.setattr(version, "found_version", lambda: found)
  with pytest.raises(version.HostVersionError) as error:
    version.check_version()
  message = str(error.value)
  assert f"maxtext-pp-ext {maxtext_pp_ext.__version__} supports MaxText >=0.2.5,<0.3, found MaxText {found}" in message


def test_a_signature_that_differs_stops_with_the_expected_and_the_found_one():
  module = types.ModuleType("maxtext.layers.pipeline")
  module.create_nnx_pipeline = lambda config, stage_factory, mesh, *, remat_policy, rngs: None
  with pytest.raises(version.HostVersionError) as error:
    table.PATCH_POINTS["maxtext.layers.pipeline"][0].check(module)
  message = str(error.value)
  assert (
      "expected maxtext.layers.pipeline.create_nnx_pipeline(config, stage_factory, mesh, remat_policy=None, *, rngs)"
      in message
  )
  assert "found create_nnx_pipeline(config, stage_factory, mesh, *, remat_policy, rngs)" in message


def test_a_signature_may_be_that_of_any_supported_version():
  module = types.ModuleType("maxtext.layers.pipeline")
  module.create = lambda config, stage_factory: None
  version.signature("create", "(config)", "(config, stage_factory)")(module)
  with pytest.raises(version.HostVersionError, match=r"create\(config\) or \(config, \*\), found create\(config, "):
    version.signature("create", "(config)", "(config, *)")(module)


def test_annotations_are_no_part_of_a_signature():
  def function(a: int, b: str = "x", *, c: float) -> None:
    del a, b, c

  assert version.signature_text(function) == "(a, b='x', *, c)"


@pytest.mark.parametrize("name", table.PATCH_POINTS)
def test_a_module_without_what_the_patch_point_needs_stops_with_its_name(name):
  parts = table.PATCH_POINTS[name]
  assert table.purpose(parts)
  for part in parts:
    with pytest.raises(version.HostVersionError, match=f"expected {name}.*found nothing of that name"):
      part.check(types.ModuleType(name))


def test_a_decoder_with_a_parameter_that_we_do_not_know_is_refused():
  class NNXDecoder:

    def _get_pipeline_stage_module(self, decoder_blocks, rngs):
      pass

    def get_decoder_layers(self):
      pass

    def _create_scanned_layers(self, *args, **kwargs):
      pass

    def _apply_layers_sequentially(self, layers, x_in, *args, length, **kwargs):
      pass

  def with_parameters(names):
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])

  module = types.ModuleType("maxtext.layers.nnx_decoders")
  module.NNXDecoder = NNXDecoder
  NNXDecoder.__call__ = lambda *args: None
  NNXDecoder.__call__.__signature__ = with_parameters(table.DECODER_PARAMETERS)
  table.PATCH_POINTS[module.__name__][0].check(module)
  NNXDecoder.__call__.__signature__ = with_parameters([*table.DECODER_PARAMETERS, "new_thing"])
  with pytest.raises(version.HostVersionError, match=r"found __call__\(self, shared_embedding, .*new_thing\)"):
    table.PATCH_POINTS[module.__name__][0].check(module)


def test_a_from_pretrained_that_makes_its_model_another_way_is_refused():
  module = types.ModuleType("maxtext.utils.model_creation_utils")
  module.create_nnx_abstract_model = lambda config, mesh=None: None
  module.from_pretrained = lambda config: create_nnx_abstract_model(config)  # noqa: F821
  table.PRETRAINED.check(module)
  module.from_pretrained = lambda config: create_another_model(config)  # noqa: F821
  with pytest.raises(version.HostVersionError, match="from_pretrained to call create_nnx_abstract_model"):
    table.PRETRAINED.check(module)


def _types_module(**changes):
  """A stand-in for `maxtext.configs.types` whose classes have all that the patch point needs, except for `changes`."""
  import pydantic

  def build(name, validator, fields):
    def derive(self):
      return self

    decorated = pydantic.model_validator(mode="after")(derive) if changes.get("decorated", True) else derive
    namespace = {
        "__annotations__": dict.fromkeys(fields, int),
        "__module__": "maxtext.configs.types",
        validator: decorated,
    }
    return type(pydantic.BaseModel)(name, (pydantic.BaseModel,), namespace)

  module = types.ModuleType("maxtext.configs.types")
  fields = [key for key in host_keys.REQUIRED if key != changes.get("missing")] + list(changes.get("more", ()))
  module.MaxTextConfig = build("MaxTextConfig", "set_derived_and_validate_values", fields)
  module.RLConfig = build("RLConfig", "set_derived_values_and_validate", fields)
  return module


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"missing": "num_pipeline_repeats"}, "expected the config keys num_pipeline_repeats"),
        ({"more": ["pipeline_impl"]}, "has the key pipeline_impl of its own"),
        ({"decorated": False}, "to be a pydantic validator"),
    ],
)
def test_a_config_class_that_differs_is_refused_with_what_differs(changes, words):
  table.PATCH_POINTS["maxtext.configs.types"][0].check(_types_module())
  with pytest.raises(version.HostVersionError, match=words):
    table.PATCH_POINTS["maxtext.configs.types"][0].check(_types_module(**changes))


# Keys that are read where only some of the supported versions have them, or none but this package.
JUDGING = ("config", "host/rules", "pipelines", "plan")
NOT_REQUIRED = {*config.PipelineKeys.model_fields, "te_moe_block", "prefetch_fsdp_weights"}
NOT_REQUIRED |= {"gradient_accumulation_schedule"}
REFUSED = pipelined_path._FEATURES | pipelined_path._NOT_WITH_BATCH_SPLIT | windowed_path._FEATURES


def test_every_key_that_is_read_off_a_config_is_looked_for():
  package = pathlib.Path(maxtext_pp_ext.__file__).parent
  sources = [file.read_text(encoding="utf-8") for folder in JUDGING for file in (package / folder).rglob("*.py")]
  read = {key for source in sources for key in re.findall(r"\bconfig\.([a-z]\w+)\b(?! import)", source)}
  read |= {key.partition(".")[0] for key in REFUSED}
  modules = {file.stem for folder in JUDGING for file in (package / folder).rglob("*.py")}
  assert read - modules - set(host_keys.REQUIRED) <= NOT_REQUIRED
