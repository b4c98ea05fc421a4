# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The names of JAX beyond its public interface that this package uses.

JAX promises nothing about these names. They were tested with the version in `TRIED_WITH`. No other module of the package
imports from `jax._src`, `jax.extend` or `jax.interpreters`.

A name is looked up on first use (`from maxtext_pp_ext.jax_private import Var`), since some modules that import this one
must not import JAX earlier.

Raises:
  SetupError: the installed JAX does not have a name on its first use. The message gives the name, its purpose, and the
    version with which it was tested.
"""

import functools
import importlib
import importlib.metadata
import operator
from typing import Any, NamedTuple

from maxtext_pp_ext.errors import SetupError

TRIED_WITH = "0.11.2"


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
  """The object in JAX.

  Raises:
    SetupError: the installed JAX does not have it.
  """
  try:
    return operator.attrgetter(use.attribute)(importlib.import_module(use.module))
  except (ImportError, AttributeError) as error:
    raise SetupError(
        f"jax {_version()} has no {use.module}.{use.attribute}, which maxtext_pp_ext uses {use.purpose}. It was tested"
        f" with jax {TRIED_WITH}: install that version, or a version of maxtext_pp_ext that supports this jax."
    ) from error


def _version() -> str:
  try:
    return importlib.metadata.version("jax")
  except importlib.metadata.PackageNotFoundError:
    return "of unknown version"
