# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison before MaxText loads a checkpoint, with small checkpoints of its models.

`checkpoint/test_resume` tests it through the trainer.
"""

import functools
import importlib
import json
import shlex
import sys
import types

from etils import epath
from flax import nnx
import jax
import jax.numpy as jnp
from maxtext.common import checkpointing, train_state_nnx
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_pp_ext import cli
from maxtext_pp_ext.config.view import ConfigView
from maxtext_pp_ext.host.models import abstract_model, checkpoints, layouts, run_config
from maxtext_pp_ext.host.patch_points import install
from maxtext_pp_ext.host.replacements import checkpoint_load
from tests.host.common import TINY
from tests.marks import slow_but

SGD = {"opt_type": "sgd"}
PIPELINED = ("pipeline_impl=circular_bsw", "ici_pipeline_parallelism=2")
OF_ONE_MODEL = {
    "no pipeline": (),
    "repeats": PIPELINED,
    "one repeat": (*PIPELINED, "num_layers_per_pipeline_stage=2"),
    "single layers": ("scan_layers=False",),
    "another scan axis": ("param_scan_axis=0",),
    "layers stacked in a stage": (
        *PIPELINED,
        *("num_layers_per_pipeline_stage=2", "scan_layers_per_stage=True", "param_scan_axis=0"),
    ),
}


@functools.cache
def state(*keys):
  """(config, train state without arrays) of a run."""
  config = layouts.config_of_layout([*TINY, *keys])
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes)), config.mesh_axes)
  model = abstract_model.abstract_model(config, mesh)
  return config, nnx.State({"model": nnx.state(model)})


@functools.cache
def train_state(*keys):
  """The tree that MaxText saves of a run with AdamW, without arrays."""
  config = layouts.config_of_layout([*TINY, *keys])
  return train_state_nnx.to_checkpoint_dict(checkpoints.train_state(config, {}))


def save(folder, of, form="trainer", change=lambda params: params):
  """The weights as MaxText saves them."""
  save_tree(folder, FORMS[form](change(nnx.to_pure_dict(nnx.filter_state(of["model"], nnx.Param)))))


def save_tree(folder, tree):
  handler = ocp.PyTreeCheckpointHandler()
  (folder / "items").mkdir(parents=True)
  handler.save(epath.Path(folder / "items"), args=ocp.args.PyTreeSave(item=tree))
  handler.finalize(epath.Path(folder / "items"))


def zeros(params, *leading):
  return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), params)


def with_values(params):
  return jax.tree.map(lambda x: {"value": x}, zeros(params))


FORMS = {
    "trainer": lambda params: {"params": {"params": zeros(params)}},
    "DiLoCo": lambda params: {
        "inner_state": {"params": {"params": zeros(params, 2)}},
        "params": {"params": zeros(params)},
        "outer_opt_state": [{"trace": zeros(params)}],
        "step": jnp.zeros((), jnp.int32),
    },
    "inference": with_values,
    "inference, base": lambda params: {"base": with_values(params)},
}


def load(folder, config, of, *, own=False, full=False, source_checkpoint_layout="orbax"):
  """Calls our patch point as MaxText does before it loads weights in a folder, all of it, or the run's own checkpoint."""
  manager = types.SimpleNamespace(directory=folder.parent, latest=types.SimpleNamespace(step=3))
  checkpoint_load.refuse_other_layouts(
      checkpoint_manager=manager if own else None,
      load_parameters_from_path="" if own or full else str(folder / "items"),
      load_full_state_from_path=str(folder / "items") if full else "",
      abstract_unboxed_pre_state=of,
      step=-1,
      source_checkpoint_layout=source_checkpoint_layout,
      maxtext_config=config,
  )


def test_the_step_is_that_which_managers_of_emergency_checkpoints_give(tmp_path, monkeypatch):
  """These managers of Orbax have a method instead of the attribute `latest`."""
  manager = types.SimpleNamespace(directory=tmp_path, latest_step=lambda: 7)
  monkeypatch.setattr(checkpointing, "EmergencyCheckpointManager", types.SimpleNamespace)
  assert checkpoint_load._what_is_loaded(manager, "", -1) == (str(tmp_path / "7"), 7)
  manager.latest_step = lambda: None
  assert checkpoint_load._what_is_loaded(manager, "", -1) is None


@pytest.fixture(name="states", scope="module")
def _states():
  return {name: state(*keys) for name, keys in OF_ONE_MODEL.items()}


PLACES = {"the run's own": True, "load_parameters_path": False}


@pytest.mark.parametrize("own", slow_but(["the run's own"], PLACES))
def test_a_checkpoint_of_another_layout_is_refused_with_both_layouts_and_the_command(states, tmp_path, own):
  for saved, (saved_config, of) in states.items():
    folder = tmp_path / saved / "3"
    save(folder, of)
    for wanted, (config, abstract) in states.items():
      if wanted == saved:
        load(folder, config, abstract, own=own)
        continue
      with pytest.raises(checkpoint_load.WrongLayoutError) as error:
        load(folder, config, abstract, own=own)
      text = str(error.value)
      assert f"checkpoint: {layouts.describe(saved_config)}" in text, (saved, wanted)
      assert f"this run:   {layouts.describe(config)}" in text and f"maxtext-pp convert {folder}" in text.replace("'", "")


@pytest.mark.parametrize(
    "saved, wanted",
    slow_but(
        [("another scan axis", "repeats")],
        [("no pipeline", "another scan axis"), ("another scan axis", "repeats")],
        spread=True,
    ),
)
def test_the_command_of_the_message_makes_what_the_run_loads(states, tmp_path, monkeypatch, saved, wanted):
  """In a run whose layout differs in the scan axis, alone or with others, the arguments of the run are enough."""
  folder, argv = tmp_path / "3", [str(run_config.base_yml()), *TINY, *OF_ONE_MODEL[wanted]]
  save(folder, states[saved][1])
  monkeypatch.setattr(sys, "argv", ["train.py", *argv])
  with pytest.raises(checkpoint_load.WrongLayoutError) as error:
    load(folder, *states[wanted])
  *_, command, then = str(error.value).splitlines()
  program, *arguments = shlex.split(command)
  assert program == "maxtext-pp" and arguments[3:] == argv and cli.main(arguments) == 0
  assert then == f"Then give {folder}-converted instead of it."
  load(tmp_path / "3-converted", *states[wanted])


def test_a_checkpoint_of_another_optimizer_is_converted_if_that_is_said(tmp_path, capsys):
  tree = zeros(train_state_nnx.to_checkpoint_dict(checkpoints.train_state(layouts.config_of_layout(TINY), SGD)))
  del tree["nnx_aux"]  # MaxText draws random state anew
  save_tree(tmp_path / "3", tree)
  convert = lambda *more: cli.main(["convert", str(tmp_path / "3"), str(tmp_path / "new"), *TINY, *PIPELINED, *more])
  assert convert() == 2
  said = capsys.readouterr().err
  assert "it lacks opt_state/0/mu/" in said and "it has opt_state/1/count []" in said and "--from opt_type=adamw" in said
  assert convert("--from", "opt_type=sgd", "--json") == 0
  assert json.loads(capsys.readouterr().out)["optimizer_state"] and (tmp_path / "new").exists()


@pytest.mark.parametrize("own", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("lacking", slow_but(["count"], ["nu", "count"]))
def test_a_part_of_the_optimizers_state_that_lacks_is_named_where_maxtext_would_begin_it_anew(tmp_path, own, lacking):
  config = layouts.config_of_layout(TINY)
  of = checkpoints.train_state(config, {})
  tree = zeros(train_state_nnx.to_checkpoint_dict(of))
  del tree["nnx_aux"]  # MaxText draws random state anew
  whole, part = tmp_path / "whole" / "3", tmp_path / "part" / "3"
  save_tree(whole, tree)
  del tree["opt_state"][0][lacking]
  save_tree(part, tree)
  everything = dict(own=own, full=not own)
  load(whole, config, of, **everything)
  with pytest.raises(checkpoint_load.IncompleteCheckpointError, match=f"lacks opt_state/0/{lacking}"):
    load(part, config, of, **everything)
  load(part, config, of)  # its weights alone
  load(part, ConfigView(config, (("trainable_parameters_mask", ["mlp"]),)), of, **everything)
  load(part, config, checkpoints.train_state(config, SGD), **everything)


def test_what_is_no_checkpoint_of_this_model_is_left_to_maxtext(states, tmp_path):
  config, abstract = states["repeats"]
  save(tmp_path / "3", state("base_mlp_dim=64")[1])
  load(tmp_path / "3", config, abstract)
  load(tmp_path / "4", config, abstract)
  (tmp_path / "5" / "items").mkdir(parents=True)
  (tmp_path / "5" / "items" / "_METADATA").write_text("damaged")
  load(tmp_path / "5", config, abstract)


@pytest.mark.parametrize(
    "form, words", [("DiLoCo", "Checkpoints of DiLoCo cannot be converted"), ("inference", "Checkpoints for inference")]
)
def test_no_command_is_named_for_checkpoints_that_it_cannot_convert_and_it_says_the_same(
    states, tmp_path, capsys, form, words
):
  save(tmp_path / "3", states["no pipeline"][1], form)
  load(tmp_path / "3", *states["no pipeline"])
  with pytest.raises(checkpoint_load.WrongLayoutError, match=words) as error:
    load(tmp_path / "3", *states["repeats"])
  assert "no pipeline" in str(error.value) and "maxtext-pp convert" not in str(error.value)
  places = [str(tmp_path / "3"), str(tmp_path / "new")]
  assert cli.main(["convert", *places, str(run_config.base_yml()), *TINY, *PIPELINED]) == 2
  assert words in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_weights_of_hugging_face_are_refused_for_a_pipeline_before_they_are_read(states, tmp_path):
  load(tmp_path / "3", *states["no pipeline"], source_checkpoint_layout="safetensors_dynamic")
  with pytest.raises(checkpoint_load.WrongLayoutError, match="(?s)=safetensors_dynamic: .*checkpoint_conversion"):
    load(tmp_path / "3", *states["repeats"], source_checkpoint_layout="safetensors_dynamic")


EIGHT = {"base_num_decoder_layers": 8}
FOUR_INSIDE = {**EIGHT, "pipeline_impl": "circular_bsw", "ici_pipeline_parallelism": 2, "pipeline_parallel_layers": 4}
FOUR_STAGES = {**EIGHT, "pipeline_impl": "circular_bsw", "ici_pipeline_parallelism": 4}
OF_HOST = {**EIGHT, "pipeline_impl": "host", "ici_pipeline_parallelism": 2}
# (the checkpoint's model, its form, the run's model, what the message says)
PRETRAINED = {
    "layers would be repeated": (FOUR_INSIDE, "trainer", FOUR_STAGES, ("2 stages × 2 repeats", "4 stages × 2 repeats")),
    "layers would be without values": (EIGHT, "trainer", FOUR_STAGES, ("no pipeline", "maxtext-pp convert")),
    "into no pipeline": (FOUR_STAGES, "trainer", EIGHT, ("4 stages × 2 repeats", "no pipeline", "maxtext-pp convert")),
    "into the host's own pipeline": (EIGHT, "trainer", OF_HOST, ("2 stages × 4 repeats", "maxtext-pp convert")),
    "of an NNX model": (FOUR_STAGES, "inference", EIGHT, ("4 stages × 2 repeats", "Checkpoints for inference")),
    "of a model of RL": (EIGHT, "inference, base", FOUR_STAGES, ("no pipeline", "Checkpoints for inference")),
    "of half the layers": (
        {**FOUR_STAGES, "base_num_decoder_layers": 4, "ici_pipeline_parallelism": 2},
        "trainer",
        FOUR_STAGES,
        ("is not of this run's model", "checkpoint [2, 2, 16, 32], model [2, 4, 16, 32]"),
    ),
}


def arguments(keys):
  return [f"{key}={value}" for key, value in keys.items()]


QUICK = ("layers would be repeated", "of a model of RL", "of half the layers")


@pytest.mark.parametrize("case", slow_but(QUICK, PRETRAINED))
def test_from_pretrained_refuses_another_layout_before_it_makes_the_model(make_config, monkeypatch, tmp_path, case):
  from maxtext.utils import maxtext_utils_nnx, model_creation_utils

  saved, form, wanted, words = case
  monkeypatch.setattr(maxtext_utils_nnx, "create_nnx_sharded_model", lambda *_, **__: pytest.fail("made the model"))
  save(tmp_path / "3", state(*arguments(saved))[1], form)
  config = make_config(rows=16, load_parameters_path=tmp_path / "3" / "items", **wanted)
  with pytest.raises(checkpoint_load.WrongLayoutError) as error:
    model_creation_utils.from_pretrained(config)
  assert all(word in str(error.value) for word in words), str(error.value)


def drop(*path):
  """Returns what takes an array out of parameters."""

  def dropped(params):
    node = params
    for key in path[:-1]:
      node = node[key]
    del node[path[-1]]
    return params

  return dropped


@pytest.mark.parametrize(
    "keys, path",
    [
        (FOUR_INSIDE, ("decoder", "pipeline_module", "layers", "mlp", "wi_0", "kernel")),
        (EIGHT, ("decoder", "layers", "mlp", "wi_0", "kernel")),
        (EIGHT, ("token_embedder", "embedding")),
    ],
    ids=["of a pipeline", "of layers", "of no layer"],
)
@pytest.mark.parametrize("form", slow_but(["trainer"], ["trainer", "inference"]))
def test_from_pretrained_refuses_a_checkpoint_that_lacks_a_weight(make_config, tmp_path, form, keys, path):
  from maxtext.utils import model_creation_utils

  save(tmp_path / "3", state(*arguments(keys))[1], form, change=drop(*path))
  config = make_config(rows=16, load_parameters_path=tmp_path / "3" / "items", **keys)
  error = checkpoint_load.WrongLayoutError if "pipeline_module" in path else checkpoint_load.IncompleteCheckpointError
  with pytest.raises(error, match="/".join(path)):
    model_creation_utils.from_pretrained(config)


@pytest.mark.parametrize("form", ["trainer", "inference"])
def test_from_pretrained_loads_the_models_own_layout(make_config, tmp_path, form):
  from maxtext.utils import model_creation_utils

  save(tmp_path / "3", state(*arguments(FOUR_INSIDE))[1], form)
  config = make_config(rows=16, load_parameters_path=tmp_path / "3" / "items", **FOUR_INSIDE)
  model, _ = model_creation_utils.from_pretrained(config)
  assert all(not jnp.any(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.fixture(name="engine")
def _engine(installed, monkeypatch):
  """MaxText's module of the training engine's checkpoints. It imports three names of tunix, none of which it calls."""
  del installed
  names = {
      "experimental.common.datatypes": ("RLTrainerPayload", "TrainerPayload"),
      "sft.utils": ("LossOutput", "WeightedMetric"),
  }
  for path, classes in names.items():
    for name in ("tunix", *(f"tunix.{path}".rsplit(".", n)[0] for n in range(3))):
      monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules[f"tunix.{path}"]).update({name: type(name, (), {}) for name in classes})
  name = "maxtext.training_engine.checkpointing"
  yield importlib.import_module(name)
  install._undo(name)
  for name in [name for name in sys.modules if name.startswith("maxtext.training_engine.")]:
    del sys.modules[name]


class Adapter(nnx.Module):
  """A model as Tunix's adapter holds it."""

  def __init__(self, base):
    self.base = base


def with_zeros(config):
  """A model of a config, all of whose parameters are 0."""

  def fill(x):
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.split(jax.random.key(0), x.shape) if keys else jnp.zeros(x.shape, x.dtype)

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes)), config.mesh_axes)
  graph, state = nnx.split(abstract_model.abstract_model(config, mesh))
  return nnx.merge(graph, jax.tree.map(fill, state))


@pytest.mark.parametrize("adapted", slow_but(["adapter"], {"model": False, "adapter": True}))
def test_the_training_engine_restores_its_own_layout_and_refuses_others(make_config, engine, tmp_path, adapted):
  model = lambda keys: Adapter(with_zeros(make_config(**keys))) if adapted else with_zeros(make_config(**keys))
  manager = engine.CheckpointManager(str(tmp_path), make_config(**FOUR_STAGES, async_checkpointing=False))
  other = engine.CheckpointState(model=model(EIGHT))
  assert manager.restore_checkpoint(other)[0] is None  # there is none yet
  saved = jax.tree.map(jnp.ones_like, nnx.state(model(FOUR_STAGES), nnx.Param))
  own = engine.CheckpointState(model=model(FOUR_STAGES))
  nnx.update(own.model, saved)
  assert manager.save_checkpoint(3, own)
  manager.wait_until_finished()
  for step in (None, 3):
    again = engine.CheckpointState(model=model(FOUR_STAGES))
    assert manager.restore_checkpoint(again, step)[0] == 3
    assert all(jnp.all(x == 1) for x in jax.tree.leaves(nnx.state(again.model, nnx.Param)))
    with pytest.raises(checkpoint_load.WrongLayoutError) as error:
      manager.restore_checkpoint(other, step)
    assert "4 stages × 2 repeats" in str(error.value) and "cannot be converted" in str(error.value)
  half = engine.CheckpointState(model=model(FOUR_STAGES | {"base_num_decoder_layers": 4}))
  with pytest.raises(checkpoint_load.WrongLayoutError, match="is not of this run's model"):
    manager.restore_checkpoint(half)
  manager.close()


def test_the_training_engine_refuses_a_checkpoint_that_lacks_a_weight(make_config, engine, tmp_path):
  manager = engine.CheckpointManager(str(tmp_path), make_config(**EIGHT, async_checkpointing=False))
  part = engine.CheckpointState(model=with_zeros(make_config(**EIGHT)))
  del part.model.decoder.layers.mlp.wi_0
  assert manager.save_checkpoint(3, part)
  manager.wait_until_finished()
  with pytest.raises(
      checkpoint_load.IncompleteCheckpointError, match="lacks params/params/decoder/layers/mlp/wi_0/kernel"
  ):
    manager.restore_checkpoint(engine.CheckpointState(model=with_zeros(make_config(**EIGHT))))
  manager.close()


class Model(nnx.Module):
  """A model with a decoder of the given arrays."""

  def __init__(self, **shapes):
    self.decoder = nnx.Module()
    self.decoder.layers = nnx.Module()
    for name, shape in shapes.items():
      setattr(self.decoder.layers, name, nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32)))


def test_what_from_pretrained_makes_fit_without_a_pipeline_is_left_to_it(states, tmp_path):
  """Experts' matrices in one, a matrix transposed, heads that are to be padded for vLLM, a user's own array."""
  config, _ = states["no pipeline"]
  saved = Model(wi_0=(4, 2, 8), wi_1=(4, 2, 8), matrix=(4, 8), key=(4, 2, 8))
  save(tmp_path / "3", nnx.State({"model": nnx.state(saved)}))
  view = ConfigView(config, (("load_parameters_path", str(tmp_path / "3" / "items")),))
  judge = lambda **shapes: checkpoint_load.refuse_other_layouts_of_pretrained(view, Model(**shapes))
  judge(wi=(4, 2, 16), matrix=(8, 4), key=(4, 2, 8))
  judge(wi=(4, 2, 16), matrix=(4, 8), key=(4, 4, 8))
  judge(wi=(4, 2, 16), matrix=(4, 8), key=(4, 2, 8), custom_linear_1=(4, 8))
  with pytest.raises(checkpoint_load.WrongLayoutError):
    judge(wi=(2, 4, 16), matrix=(4, 8), key=(4, 2, 8))
