# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traces the loss of a config's model without arrays and devices, and asks MaxText what a remat policy keeps."""

from collections.abc import Callable
import dataclasses
import functools
import types
from typing import Any

from flax import nnx
from flax.core.spmd import logical_axis_rules
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
import numpy as np

from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.host.models import abstract_model
from maxtext_pp_ext.host.models.run_config import as_value_errors
from maxtext_pp_ext.jax_private import ClosedJaxpr, Offloadable, RecomputeType

# The arrays of a batch, each int32 [batch, sequence].
_BATCH = tuple(f"{of}{suffix}" for of in ("inputs", "targets") for suffix in ("", "_position", "_segmentation"))


@dataclasses.dataclass(frozen=True)
class _Device:
  """A TPU that is not there. Layers ask their mesh's devices for their platform."""

  id: int
  device_kind: str = "TPU"
  platform: str = "tpu"
  process_index: int = 0
  slice_index: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
  """The program of a loss: (parameters, other variables, batch) -> loss."""

  program: ClosedJaxpr
  parameters: nnx.State  # of ShapeDtypeStructs; its leaves are the first inputs
  batch: int  # how many inputs are those of the batch, int32 [batch, sequence]; they are the last


def traced(config: DerivedKeys, mesh: AbstractMesh) -> Loss:
  """Traces MaxText's `loss_fn` of a training step. Raises ValueError if MaxText cannot build or run this model."""
  from maxtext.trainers.pre_train import train  # pylint: disable=import-outside-toplevel

  devices = np.empty(mesh.size, object)
  devices[:] = [_Device(index) for index in range(mesh.size)]
  of_devices = Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)
  model = abstract_model.abstract_model(config, of_devices)
  definition, *states = nnx.split(model, nnx.Param, ...)
  parameters, others = states
  ids = jax.ShapeDtypeStruct((config.micro_batch_size_to_train_on, config.max_target_length), jnp.int32)

  def loss(parameters: nnx.State, others: nnx.State, batch: dict[str, Any]) -> jax.Array:
    model = nnx.merge(definition, parameters, others)
    value, _ = train.loss_fn(model, config, dict(batch), None, None, is_train=True)
    return value

  token = abstract_model.only_shapes.set(True)
  try:
    with (
        logical_axis_rules(config.logical_axis_rules),
        jax.sharding.use_abstract_mesh(of_devices.abstract_mesh),
        as_value_errors("trace this model's loss"),
    ):
      program = jax.make_jaxpr(loss)(parameters, others, dict.fromkeys(_BATCH, ids))
  except (NotImplementedError, ImportError) as error:
    raise ValueError(f"MaxText cannot trace this model's loss here: {error}") from error
  finally:
    abstract_model.only_shapes.reset(token)
  return Loss(program=program, parameters=parameters, batch=len(_BATCH))


def places(config: DerivedKeys) -> Callable[[str], str | None]:
  """Where the run's remat policy keeps what has a name: "device", "offload", or None if backward computes it again."""
  from maxtext.layers import nnx_decoders  # pylint: disable=import-outside-toplevel

  decoder = types.SimpleNamespace(config=config)
  decoder.minimal_policy = functools.partial(nnx_decoders.NNXDecoder.minimal_policy, decoder)
  return functools.cache(functools.partial(place, nnx_decoders.NNXDecoder.get_remat_policy(decoder)))


def place(policy: Callable | None, name: str) -> str | None:
  """Where a policy of `jax.checkpoint` keeps what has this name, as in `places`."""
  primitive, avals = _named()
  kept = policy is not None and policy(primitive, *avals, name=name)
  if not kept or isinstance(kept, RecomputeType):
    return None
  return "offload" if isinstance(kept, Offloadable) else "device"


@functools.cache
def _named() -> tuple[Any, tuple[Any, ...]]:
  """The operation that gives a value a name, and the types of its operands."""
  (named,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "name"))(0.0).eqns
  return named.primitive, tuple(v.aval for v in named.invars)
