# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The installed JAX has all private names that the package uses, and one file has all these uses."""

import ast
import importlib.metadata
import pathlib
import re
import sys

import jax
from jax.experimental import pallas
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext import jax_private
from maxtext_pp_ext.engine.programs import jaxprs, primitives
from maxtext_pp_ext.errors import SetupError

PACKAGE = pathlib.Path(jax_private.__file__).parent
PRIVATE = re.compile(r"jax\.(_src|extend|interpreters)\b")


@pytest.mark.parametrize("use", jax_private.USES.values(), ids=jax_private.USES.keys())
def test_jax_has_every_private_name(use):
  jax_private.find(use)


def test_the_tested_version_is_that_of_the_locked_environment():
  constraints = (PACKAGE.parent / ".ci" / "constraints-cpu.txt").read_text(encoding="utf-8")
  assert f"jax=={jax_private.TRIED_WITH}" in constraints.splitlines()


def test_a_missing_name_is_reported_with_its_purpose_and_both_versions(monkeypatch):
  use = jax_private.Use("jax.interpreters.partial_eval", "no_such_function", "to find what is not needed")
  monkeypatch.setitem(jax_private.USES, "no_such_function", use)
  installed = importlib.metadata.version("jax")
  expected = (
      rf"^jax {installed} has no jax\.interpreters\.partial_eval\.no_such_function, which maxtext_pp_ext uses to find"
      rf" what is not needed\. It was tested with jax {jax_private.TRIED_WITH}: "
  )
  with pytest.raises(SetupError, match=expected):
    from maxtext_pp_ext.jax_private import no_such_function  # pylint: disable=import-outside-toplevel # noqa: F401


def test_a_missing_module_of_jax_is_reported():
  with pytest.raises(SetupError, match=r"has no jax\.no_such_module\.Var"):
    jax_private.find(jax_private.Use("jax.no_such_module", "Var", "for nothing"))


def test_no_other_module_names_private_modules():
  found = set()
  for path in PACKAGE.rglob("*.py"):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if any(PRIVATE.match(name) for name in names):
      found.add(path.relative_to(PACKAGE).as_posix())
  assert found == {"jax_private.py"}


def test_operations_are_called_what_the_engine_looks_for():
  """Names and parameters of operations are no interface of JAX either."""
  mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
  summed = jax.shard_map(
      lambda x: jax.lax.psum(x, "fsdp"),
      mesh=mesh,
      in_specs=P("fsdp"),
      out_specs=P(),
      axis_names={"fsdp"},
      check_vma=False,
  )
  call, remat, sharded = (
      jax.make_jaxpr(fn)(jnp.ones(4)).eqns[0] for fn in (jax.jit(jnp.sin), jax.checkpoint(jnp.sin), summed)
  )
  assert primitives.is_call(call) and {"in_shardings", "out_shardings"} <= call.params.keys()
  assert primitives.has(remat, primitives.Trait.CHECKPOINT) and {"prevent_cse", "differentiated"} <= remat.params.keys()
  for eqn in (call, remat, sharded):
    assert isinstance(jaxprs.inner_program(eqn)[0], jax_private.Jaxpr)
  assert sharded.primitive.name == "shard_map"
  assert {"mesh", "in_specs", "out_specs", "check_vma"} <= sharded.params.keys()
  assert {"newly_manual_axes", "manual_axes"} & sharded.params.keys()
  [psum] = jaxprs.inner_program(sharded)[0].eqns
  assert psum.primitive.name == "psum" and {"axes", "axis_index_groups"} <= psum.params.keys()


def test_jax_has_every_operation_that_the_engine_knows():
  """A renamed one would be no part of a program that the engine rewrites, without a word."""
  assert pallas.pallas_call  # its module defines a kernel's call
  values = (value for module in list(sys.modules.values()) for value in list(vars(module).values()))
  names = {each.name for each in values if isinstance(each, jax.extend.core.Primitive)}
  assert primitives.TRAITS.keys() <= names
