# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is compared before MaxText loads a checkpoint, with small checkpoints of its models; see `checkpoint/test_resume`
for the same through the trainer."""

import types

from etils import epath
from flax import nnx
import jax
import jax.numpy as jnp
from maxtext_pp_ext.host import abstract_model, checkpoint_load, layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.host.common import TINY

PIPELINED = ("pipeline_impl=circular_bsw", "ici_pipeline_parallelism=2")
OF_ONE_MODEL = {
    "no pipeline": (),
    "repeats": PIPELINED,
    "one repeat": (*PIPELINED, "num_layers_per_pipeline_stage=2"),
    "single layers": ("scan_layers=False",),
}


def state(*keys):
  """(config, train state without arrays) of a run."""
  config = layouts.config_of_layout([*TINY, *keys])
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes)), config.mesh_axes)
  model = abstract_model.abstract_model(config, mesh)
  return config, nnx.State({"model": nnx.state(model)})


def save(folder, of):
  """The weights as MaxText saves them."""
  params = nnx.to_pure_dict(nnx.filter_state(of["model"], nnx.Param))
  arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
  handler = ocp.PyTreeCheckpointHandler()
  (folder / "items").mkdir(parents=True)
  handler.save(epath.Path(folder / "items"), args=ocp.args.PyTreeSave(item={"params": {"params": arrays}}))
  handler.finalize(epath.Path(folder / "items"))


def load(folder, config, of, *, own=False):
  """What our seam does before MaxText loads a folder, or the run's own checkpoint in it."""
  manager = types.SimpleNamespace(directory=folder.parent, latest=types.SimpleNamespace(step=int(folder.name)))
  checkpoint_load.refuse_other_layouts(
      checkpoint_manager=manager if own else None,
      load_parameters_from_path="" if own else str(folder / "items"),
      load_full_state_from_path="",
      abstract_unboxed_pre_state=of,
      step=-1,
      source_checkpoint_layout="orbax",
      maxtext_config=config,
  )


@pytest.fixture(name="states", scope="module")
def _states():
  return {name: state(*keys) for name, keys in OF_ONE_MODEL.items()}


@pytest.mark.parametrize("own", [True, False], ids=["the run's own", "load_parameters_path"])
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


def test_what_is_no_checkpoint_of_this_model_is_left_to_maxtext(states, tmp_path):
  config, abstract = states["repeats"]
  save(tmp_path / "3", state("base_mlp_dim=64")[1])
  load(tmp_path / "3", config, abstract)
  load(tmp_path / "4", config, abstract)
  (tmp_path / "5" / "items").mkdir(parents=True)
  (tmp_path / "5" / "items" / "_METADATA").write_text("damaged")
  load(tmp_path / "5", config, abstract)
