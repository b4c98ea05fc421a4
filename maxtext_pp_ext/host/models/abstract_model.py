# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a MaxText config's model without weights, on a mesh without devices."""

from collections.abc import Callable, Collection, Mapping
import contextvars
from typing import Any

from flax import nnx
from flax.core.spmd import logical_axis_rules
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from maxtext_pp_ext import sharding
from maxtext_pp_ext.config.derived import sound_stages
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain, with_values
from maxtext_pp_ext.host import topology
from maxtext_pp_ext.host.models.axes import rules_in_play, STAGE_AXES
from maxtext_pp_ext.host.models.run_config import as_value_errors

# Whether the model that is being built gets shapes only.
only_shapes = contextvars.ContextVar("only_shapes", default=False)
_PIPELINE = ("decoder", "pipeline_module", "layers")
_MOST_LAYERS = 1 << 13  # a model is built, and read, layer by layer


def abstract_mesh(config: DerivedKeys) -> AbstractMesh:
  """The mesh of a config. Raises ValueError unless it fits the number of devices, and the torus of `compile_topology`."""
  ici, dcn = parallelism(config, "ici"), parallelism(config, "dcn")
  if not config.allow_split_physical_axes and topology.divides_axes(config, ici):
    named = ", ".join(f"{axis} {size}" for axis, size in zip(config.mesh_axes, ici, strict=True) if size > 1)
    raise ValueError(
        f"JAX cannot lay a mesh of {named} within a slice out on the {topology.chips(config.compile_topology)} of "
        f"compile_topology={config.compile_topology} with allow_split_physical_axes=False: each mesh axis needs whole "
        "axes of the torus. Set allow_split_physical_axes=True."
    )
  axis_type = AxisType.Explicit if plain(config.shard_mode) == "explicit" else AxisType.Auto
  sizes = tuple(i * d for i, d in zip(ici, dcn, strict=True))
  return AbstractMesh(sizes, tuple(config.mesh_axes), axis_types=(axis_type,) * len(sizes))


def parallelism(config: DerivedKeys, network: str) -> list[int]:
  """The size of each mesh axis on "ici" or "dcn", -1 derived by MaxText. Raises ValueError if devices do not fit."""
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
  """A config's model, with ShapeDtypeStructs for values. Raises ValueError if MaxText cannot build it."""
  from maxtext.utils import model_creation_utils  # pylint: disable=import-outside-toplevel

  if config.num_decoder_layers > _MOST_LAYERS:
    raise ValueError(f"{config.num_decoder_layers} layers are more than the limit ({_MOST_LAYERS}).")
  token = only_shapes.set(True)
  try:
    with logical_axis_rules(config.logical_axis_rules), as_value_errors("build this model"):
      return nnx.eval_shape(model_creation_utils.get_nnx_create_model_fn(config, mesh))
  finally:
    only_shapes.reset(token)


def parameters(config: Any, mesh: Mesh | AbstractMesh) -> nnx.State:
  """The parameters of a config's model. Raises ValueError if MaxText cannot build it."""
  if config.use_qwix_quantization:
    # Qwix calls a model to quantize it, and layers ask their mesh for its devices when they are called. The parameters
    # stay as they were: what two kinds (fp8_gpu, fp8_nanoo) add are scales, which are none.
    config = with_values(config, {"quantization": ""})
  return nnx.state(abstract_model(config, mesh), nnx.Param)


def stacks(config: DerivedKeys) -> tuple[tuple[int, ...], tuple[str, ...]]:
  """The sizes and the names of the axes along which our pipelines stack their stages; none without a pipeline."""
  if not config.using_pipeline_parallelism:
    return (), ()
  stages, repeats = sound_stages(config), config.num_pipeline_repeats
  sizes = (stages,) if repeats == 1 else (repeats, stages)
  return sizes, STAGE_AXES[-len(sizes) :]


def restacked(found: nnx.State, config: DerivedKeys, other: DerivedKeys) -> nnx.State | None:
  """The parameters of `other`'s model, from those of `config`'s with other numbers of stages, repeats or layers in one.

  It takes a thousandth of the time of building the model. The configs differ in nothing else that changes parameters.
  None if the other model has more layers in a stage, if only one of them has several modules there, or if the arrays are
  stacked otherwise than by our pipelines.
  """
  (old, old_names), (new, new_names) = stacks(config), stacks(other)

  flat = dict(nnx.to_flat_state(found))
  of_pipeline = {path: variable for path, variable in flat.items() if path[: len(_PIPELINE)] == _PIPELINE}
  layers, fewer = config.num_layers_per_pipeline_stage, other.num_layers_per_pipeline_stage
  dropped = set[str]()
  if layers != fewer:  # the modules of the smaller stage are the first ones of the larger
    modules = {path[len(_PIPELINE)] for path in of_pipeline}
    kept, left = divmod(len(modules) * fewer, layers)
    # The module of a stage with one module has another place, and its name may be that of a layer inside.
    names_of_several = {f"layers_{index}" for index in range(len(modules))}
    if modules != names_of_several or left or not 1 < kept <= len(modules):
      return None
    dropped = {f"layers_{index}" for index in range(kept, len(modules))}
  for path, variable in of_pipeline.items():
    value, names = variable.get_value(), variable.get_metadata().get("out_sharding")
    if path[len(_PIPELINE)] in dropped:
      del flat[path]
    elif value.shape[: len(old)] != old or (names and tuple(names[: len(old)]) != old_names):
      return None
    else:
      metadata = {"out_sharding": (*new_names, *names[len(old) :])} if names else {}
      flat[path] = variable.replace(jax.ShapeDtypeStruct((*new, *value.shape[len(old) :]), value.dtype), **metadata)
  return nnx.from_flat_state(flat)


class Models:
  """Models of configs that differ in a few keys. Those whose parameters are alike are built once."""

  def __init__(self, without: Collection[str]):
    """`without` are keys that change no parameter's shape or logical axes, other than by `stacks`."""
    self._without = without
    self._built: dict[tuple, list[tuple[DerivedKeys, nnx.State]]] = {}

  def explained(self, config: DerivedKeys, changed: Mapping[str, Any]) -> tuple[sharding.Explanation, AbstractMesh]:
    """`explained` of a config, whose keys that differ from the others' are `changed`."""
    keys = sorted((key, value) for key, value in changed.items() if key not in self._without)
    if config.scan_layers_per_stage:
      keys.append(("num_layers_per_pipeline_stage", config.num_layers_per_pipeline_stage))
    models = self._built.setdefault((*keys, config.using_pipeline_parallelism), [])

    def make(config: DerivedKeys, mesh: AbstractMesh) -> nnx.State:
      for built, its_parameters in models:
        if (found := restacked(its_parameters, built, config)) is not None:
          return found
      models.append((config, parameters(config, mesh)))
      return models[-1][1]

    return explained(config, make)


def explained(
    config: Any, make: Callable[[Any, AbstractMesh], nnx.State] = parameters
) -> tuple[sharding.Explanation, AbstractMesh]:
  """(how parameters are sharded, the mesh); `make` gives parameters. Raises ValueError as `abstract_mesh` does."""
  mesh = abstract_mesh(config)
  return sharding.explain(make(config, mesh), mesh, rules_in_play(config.logical_axis_rules)), mesh
