# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""All that this package uses of JAX beyond its public interface.

JAX promises nothing about these names. They were tried with the version in `TRIED_WITH`, and no other module of the
package imports from `jax._src`, `jax.extend` or `jax.interpreters`.

A name is looked up when it is first asked for (`from maxtext_pp_ext.jax_private import Var`), since some who ask must not
import JAX before they do.

Raises:
  SetupError: when a name is asked for that the installed JAX does not have. The message says which, what it is for, and
    with which version it was tried.
"""

import functools
import importlib
import importlib.metadata
import operator
from typing import Any, NamedTuple

from maxtext_pp_ext.errors import SetupError

TRIED_WITH = "0.11.2"


class Use(NamedTuple):
  """Where JAX has something, and what this package does with it.

  Attributes:
    module: the module of JAX.
    attribute: its name there, with dots between an attribute and its own.
    purpose: what it is for.
  """

  module: str
  attribute: str
  purpose: str


USES = {
    "ClosedJaxpr": Use("jax.extend.core", "ClosedJaxpr", "to hold a program with its constants"),
    "Jaxpr": Use("jax.extend.core", "Jaxpr", "to hold a program"),
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
  """What JAX has there.

  Raises:
    SetupError: the installed JAX does not have it.
  """
  try:
    return operator.attrgetter(use.attribute)(importlib.import_module(use.module))
  except (ImportError, AttributeError) as error:
    raise SetupError(
        f"jax {_version()} has no {use.module}.{use.attribute}, which maxtext_pp_ext uses {use.purpose}. It was tried"
        f" with jax {TRIED_WITH}: install that version, or a version of maxtext_pp_ext that knows this one."
    ) from error


def _version() -> str:
  try:
    return importlib.metadata.version("jax")
  except importlib.metadata.PackageNotFoundError:
    return "of unknown version"
