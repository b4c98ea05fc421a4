# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A small program, compiled for TPUs with a workaround and without it, and the figure that the workaround lowers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import types
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.compiled.program import execution, hlo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A program that each device runs on its own arrays.

  Attributes:
    run: the program, (arrays of a device) -> results.
    given: shape and dtype of each array that a device has.
    mesh: the size of each axis of the mesh.
    topology: JAX's name of the slice.
    flags: options of the compiler.
  """

  run: Callable[..., Any]
  given: Sequence[tuple[tuple[int, ...], Any]]
  mesh: Mapping[str, int] = types.MappingProxyType({"fsdp": 4})
  topology: str = "v6e:2x2"
  flags: Mapping[str, str] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reproducer:
  """What shows that a workaround is needed.

  Attributes:
    program: (whether it has the workaround) -> the program. Its docstring says what the compiler does left to itself.
    figure: of a compiled program what the workaround lowers.
    unit: what the figure is.
    margin: the share by which a figure has to be larger without the workaround. Less is padding and scalars.
  """

  program: Callable[[bool], Program]
  figure: Callable[[execution.Execution], float]
  unit: str
  margin: float = 0.02

  def figures(self) -> tuple[float, float]:
    """(figure without the workaround, with it)."""
    without, with_ = (self.figure(compiled(self.program(workaround))) for workaround in (False, True))
    return without, with_


def is_needed(without: float, with_: float, margin: float) -> bool:
  """Whether a figure is larger without a workaround than with it, by more than this share."""
  return without > with_ * (1 + margin)


def compiled(program: Program) -> execution.Execution:
  """Compiles for a slice of TPUs, which need not be there. Raises RuntimeError if libtpu refuses the program."""
  slice_ = topologies.get_topology_desc(platform="tpu", topology_name=program.topology)
  devices = mesh_utils.create_device_mesh(tuple(program.mesh.values()), slice_.devices)
  mesh = Mesh(devices, tuple(program.mesh))
  everywhere = NamedSharding(mesh, P())
  arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in program.given]
  step = jax.shard_map(program.run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  executable = jax.jit(step).lower(*arguments).compile(compiler_options=dict(program.flags))
  return execution.of_module(hlo.program(executable.as_text() or ""))


def not_hoisted(x: jax.Array, t: jax.Array) -> jax.Array:
  """The same array, in a form that the compiler does not compute before a loop over t = 0, 1, …."""
  return x * (t >= 0).astype(x.dtype)
