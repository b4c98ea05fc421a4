# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A MaxText config's model without weights, on a mesh without devices.

Read in MaxText 0.2.5; in 0.2.4 models may need flags to be NNX.
"""

from collections.abc import Sequence
from typing import Any

from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import AbstractMesh, AxisType
import numpy as np

from maxtext_pp_ext.host import run_config

_QUIET = {"skip_jax_distributed_system": True, "log_config": False, "enable_checkpointing": False, "run_name": "x"}


def read_config(arguments: Sequence[str]) -> Any:
  """MaxText's config for the arguments of its trainers: a yml file, then key=value.

  The file may be left out, for base.yml. No process is connected with others, and nothing is written.

  Raises:
    ValueError: MaxText refuses the config.
  """
  given = {argument.partition("=")[0] for argument in arguments}
  quiet = _QUIET | ({"compile_topology_num_slices": 1} if "compile_topology" in given else {})
  return run_config.read(arguments, **{key: value for key, value in quiet.items() if key not in given})


def abstract_mesh(config: Any) -> AbstractMesh:
  """The mesh of a config, with the devices of its `compile_topology`, or those that are there.

  Raises:
    ValueError: the parallelism does not fit the number of devices.
  """
  from maxtext.utils import max_utils  # pylint: disable=import-outside-toplevel

  slices = config.num_slices
  try:
    ici = max_utils.fill_unspecified_mesh_axes(list(config.ici_parallelism), config.num_target_devices // slices, "ICI")
    dcn = list(config.dcn_parallelism)
    dcn = max_utils.fill_unspecified_mesh_axes(dcn, slices, "DCN") if slices > 1 else [1] * len(dcn)
  except AssertionError as error:  # MaxText's way to say so
    raise ValueError(f"{error} (compile_topology={config.compile_topology!r})") from error
  axis_type = AxisType.Explicit if config.shard_mode.value == "explicit" else AxisType.Auto
  sizes = tuple(int(i) for i in np.multiply(ici, dcn))
  return AbstractMesh(sizes, tuple(config.mesh_axes), axis_types=(axis_type,) * len(sizes))


def abstract_model(config: Any, mesh: AbstractMesh) -> nnx.State:
  """The variables of a config's model, with ShapeDtypeStructs for values."""
  from maxtext.utils import model_creation_utils  # pylint: disable=import-outside-toplevel

  with logical_axis_rules(config.logical_axis_rules):
    return nnx.state(nnx.eval_shape(model_creation_utils.get_nnx_create_model_fn(config, mesh)))
