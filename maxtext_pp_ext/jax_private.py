# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The names of JAX beyond its public interface that this package uses; no other module imports such names.

JAX promises nothing about them. A name is looked up on first use (`from maxtext_pp_ext.jax_private import Var`), since
some modules that import this one must not import JAX earlier, and that raises what `find` does. Beside these names,
`PallasCall` reads the private parameters of a kernel's call.
"""

import dataclasses
import functools
import importlib
import operator
import sys
from typing import Any, NamedTuple

from maxtext_pp_ext.errors import SetupError

TRIED_WITH = "0.11.2"  # the version with which they were tested


class Use(NamedTuple):
  """The place of a name in JAX, and this package's use of it."""

  module: str  # the module of JAX
  attribute: str  # the name in that module; dots separate nested attributes
  purpose: str  # the use, as the end of a sentence: "to …"


USES = {
    "ClosedJaxpr": Use("jax.extend.core", "ClosedJaxpr", "to hold a program with its constants"),
    "Jaxpr": Use("jax.extend.core", "Jaxpr", "to hold a program"),
    "HloPrintOptions": Use("jaxlib._hlo", "HloPrintOptions", "to print a compiled program with its tables of integers"),
    "JaxprEqn": Use("jax.extend.core", "JaxprEqn", "to name the type of an operation of a program"),
    "Literal": Use("jax.extend.core", "Literal", "to tell a number in a program from a variable"),
    "Offloadable": Use("jax._src.interpreters.partial_eval", "Offloadable", "to tell what a remat policy offloads"),
    "RecomputeType": Use(
        "jax._src.interpreters.partial_eval", "RecomputeType", "to tell what a remat policy computes again"
    ),
    "Var": Use("jax.extend.core", "Var", "to tell a variable of a program from a number"),
    "backends_are_initialized": Use(
        "jax._src.xla_bridge", "backends_are_initialized", "to tell whether JAX has made its devices"
    ),
    "dce_jaxpr": Use("jax.interpreters.partial_eval", "dce_jaxpr", "to find what an output is computed from"),
    "extension": Use("jax._src.lib", "_jax", "to let processes of one machine find each other on loopback"),
    "jaxpr_as_fun": Use("jax.extend.core", "jaxpr_as_fun", "to run a program"),
}


def __getattr__(name: str) -> Any:
  if name not in USES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return find(USES[name])


@functools.cache
def find(use: Use) -> Any:
  """The object in JAX. Raises SetupError if the installed JAX does not have it."""
  try:
    return operator.attrgetter(use.attribute)(importlib.import_module(use.module))
  except (ImportError, AttributeError) as error:
    installed = getattr(sys.modules.get("jax"), "__version__", "of unknown version")
    raise SetupError(
        f"jax {installed} has no {use.module}.{use.attribute}, which maxtext_pp_ext uses {use.purpose}. It was tested"
        f" with jax {TRIED_WITH}: install that version, or a version of maxtext_pp_ext that supports this jax."
    ) from error


@dataclasses.dataclass(frozen=True)
class PallasCall:
  """A kernel's call, an operation `pallas_call`: which blocks of its operands it reads.

  Its first operands are sizes of a dynamic grid, then scalars that index maps read, then arrays.
  """

  eqn: Any  # the operation

  @property
  def _mapping(self) -> Any:
    return self.eqn.params["grid_mapping"]

  def block(self, operand: int) -> int | None:
    """The number of the block mapping of an operand; None for a scalar."""
    number = self._number(operand)
    return number if number >= 0 else None

  def _number(self, operand: int) -> int:
    return operand - (len(self.eqn.invars) - self._mapping.num_inputs)

  @property
  def blocks(self) -> range:
    """The numbers of the block mappings, of arrays and results."""
    return range(len(self._mapping.block_mappings))

  def reads_one_at_a_time(self, block: int) -> bool:
    """Whether a block has one index along the array's first dimension."""
    return type(self._mapping.block_mappings[block].block_shape[0]).__name__ == "Squeezed"

  def index_map(self, block: int) -> Any:
    """The program that computes which block is read, (indices of the grid, scalars) -> indices of the block."""
    return self._mapping.block_mappings[block].index_map_jaxpr.jaxpr

  @property
  def body(self) -> Any:
    """The kernel's program, (scalars, blocks) -> ()."""
    return self.eqn.params["jaxpr"]

  def grid_rank(self, block: int) -> int:
    """The number of the grid's indices, which come first in an index map."""
    return len(self.index_map(block).invars) - self._mapping.num_index_operands

  def operand_of_scalar(self, number: int) -> int:
    """The operand that is this scalar."""
    return len(self.eqn.invars) - self._mapping.num_inputs - self._mapping.num_index_operands + number

  def with_shape(self, operand: int, shape: tuple[int, ...]) -> Any:
    """The operation on an operand of another shape, of which it reads the same blocks."""
    blocks, number = list(self._mapping.block_mappings), self._number(operand)
    aval = blocks[number].array_aval.update(shape=shape)
    blocks[number] = dataclasses.replace(blocks[number], array_aval=aval)
    invars = list(self.eqn.invars)
    invars[operand] = find(USES["Var"])(invars[operand].aval.update(shape=shape))
    mapping = dataclasses.replace(self._mapping, block_mappings=tuple(blocks))
    return self.eqn.replace(invars=invars, params=self.eqn.params | {"grid_mapping": mapping})
