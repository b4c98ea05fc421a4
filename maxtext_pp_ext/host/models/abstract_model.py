# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a MaxText config's model without weights, on a mesh without devices."""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
from typing import Any

from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import AbstractMesh, AxisType, Mesh

from maxtext_pp_ext import sharding
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain, with_values
from maxtext_pp_ext.host.models.axes import rules_in_play
from maxtext_pp_ext.host.models.refusals import as_value_errors

_only_shapes = contextvars.ContextVar("_only_shapes", default=False)


@contextlib.contextmanager
def _shapes_only() -> Iterator[None]:
  token = _only_shapes.set(True)
  try:
    yield
  finally:
    _only_shapes.reset(token)


def of_shapes_only() -> bool:
  """Whether a model is being built of which nobody reads values."""
  return _only_shapes.get()


# A model is built, and read, layer by layer.
MOST_LAYERS = 1 << 13


def abstract_mesh(config: DerivedKeys) -> AbstractMesh:
  """Returns the mesh of a config, for the devices of its `compile_topology` or those present.

  Raises:
    ValueError: the parallelism does not fit the number of devices.
  """
  ici, dcn = parallelism(config, "ici"), parallelism(config, "dcn")
  axis_type = AxisType.Explicit if plain(config.shard_mode) == "explicit" else AxisType.Auto
  sizes = tuple(i * d for i, d in zip(ici, dcn, strict=True))
  return AbstractMesh(sizes, tuple(config.mesh_axes), axis_types=(axis_type,) * len(sizes))


def parallelism(config: DerivedKeys, network: str) -> list[int]:
  """Returns the size of each mesh axis on "ici" (within a slice) or "dcn" (over slices), with -1 derived by MaxText.

  Raises:
    ValueError: the parallelism does not fit the number of devices.
  """
  from maxtext.utils import max_utils  # pylint: disable=import-outside-toplevel

  given, slices = list(getattr(config, f"{network}_parallelism")), config.num_slices
  if network == "dcn" and slices <= 1:
    return [1] * len(given)
  target = slices if network == "dcn" else config.num_target_devices // slices
  try:
    return [int(size) for size in max_utils.fill_unspecified_mesh_axes(given, target, network.upper())]
  except AssertionError as error:  # how MaxText reports it
    raise ValueError(f"{error} (compile_topology={config.compile_topology!r})") from error


def abstract_model(config: Any, mesh: Mesh | AbstractMesh) -> nnx.Module:
  """Returns a config's model, with ShapeDtypeStructs for values.

  Raises:
    ValueError: MaxText cannot build it.
  """
  from maxtext.utils import model_creation_utils  # pylint: disable=import-outside-toplevel

  if config.num_decoder_layers > MOST_LAYERS:
    raise ValueError(f"{config.num_decoder_layers} layers are more than the limit ({MOST_LAYERS}).")
  with _shapes_only(), logical_axis_rules(config.logical_axis_rules), as_value_errors("build this model"):
    return nnx.eval_shape(model_creation_utils.get_nnx_create_model_fn(config, mesh))


def parameters(config: Any, mesh: Mesh | AbstractMesh) -> nnx.State:
  """Returns the parameters of a config's model. Raises ValueError if MaxText cannot build it."""
  if config.use_qwix_quantization:
    # Qwix calls a model to quantize it, and layers ask their mesh for its devices when they are called. The parameters
    # stay as they were: what two kinds (fp8_gpu, fp8_nanoo) add are scales, which are none.
    config = with_values(config, {"quantization": ""})
  return nnx.state(abstract_model(config, mesh), nnx.Param)


def explained(
    config: Any, make: Callable[[Any, AbstractMesh], nnx.State] = parameters
) -> tuple[sharding.Explanation, AbstractMesh]:
  """Returns (how a config's parameters are sharded, its mesh).

  Args:
    config: MaxText's config.
    make: makes the parameters, for a caller that has them.

  Raises:
    ValueError: the parallelism does not fit the number of devices.
  """
  mesh = abstract_mesh(config)
  return sharding.explain(make(config, mesh), mesh, rules_in_play(config.logical_axis_rules)), mesh
