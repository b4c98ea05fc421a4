# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A program computes the same of one of several arrays as of a copy of it. Kernels of grouped products read no copy."""

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import megablox
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from maxtext.kernels import megablox as of_maxtext
import numpy as np
import pytest

from maxtext_pp_ext.engine.programs import one_of
from maxtext_pp_ext.engine.programs.one_of import OneOf
from tests.engine.common import primitives

GROUPS, ROWS, K, N, STAGES = 3, 16, 8, 8, 2
SIZES = jnp.array([5, 0, 11], jnp.int32)
KERNELS = {
    "jax": lambda x, w, sizes: megablox.gmm(x, w, sizes, jnp.float32, (8, 8, 8), interpret=True),
    "MaxText": lambda x, w, sizes: of_maxtext.gmm(x, w, sizes, jnp.float32, (8, 8, 8, 8, 8, 8, 8, 8, 8), interpret=True),
}
KEYS = jax.random.split(jax.random.key(0), 3)
ARRAYS = jax.random.normal(KEYS[0], (2, STAGES, GROUPS, K, N))
X = jax.random.normal(KEYS[1], (STAGES, ROWS, K))
D = jax.random.normal(KEYS[2], (STAGES, ROWS, N))


@pytest.fixture(name="mesh", scope="module")
def _mesh():
  return Mesh(np.array(jax.devices()[:STAGES]), ("stage",))


def experts(kernel, mesh, keeps=()):
  """Experts as MaxText's layers run them: in a shard_map that stages are a vmap of, with names that policies may keep."""

  def of_device(w, x):
    # Of what a `shard_map` keeps JAX gives scalars an axis, and so makes an `eval_jaxpr` of its program.
    scale = checkpoint_name(jnp.cos(jax.lax.axis_index("stage").astype(jnp.float32)), "scale")
    return scale * checkpoint_name(jnp.sin(KERNELS[kernel](x, w, SIZES)), "computed")

  def layer(w, x):
    on_devices = jax.shard_map(of_device, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return jnp.tanh(on_devices(w, x))

  layers = jax.vmap(layer, spmd_axis_name="stage")
  return jax.checkpoint(layers, policy=jax.checkpoint_policies.save_only_these_names(*keeps)) if keeps else layers


def both(closed, number, *others):
  """(what the program gives with one of the arrays, with a copy of it)."""
  expected = jnp.stack([ARRAYS[n, s] for s, n in enumerate(number)])

  @jax.jit
  def run(arrays, number, *others):
    return [one_of.chosen(x) for x in one_of.run(closed, OneOf(arrays, number), *others)]

  return run(ARRAYS, number, *others), jax.jit(jax.extend.core.jaxpr_as_fun(closed))(expected, *others)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number, keeps", [((0, 1), ()), ((1, 1), ()), ((0, 1), ("scale", "computed"))])
def test_a_kernel_reads_the_array_with_the_number_of_its_stage(mesh, kernel, number, keeps):
  layers = experts(kernel, mesh, keeps)
  backward = lambda w, x, d: jax.vjp(layers, w, x)[1](d)
  for fn, others in ((layers, (X,)), (backward, (X, D))):
    closed = jax.make_jaxpr(fn)(ARRAYS[0], *others)
    for found, expected in zip(*both(closed, jnp.array(number), *others), strict=True):
      np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("keeps", [(), ("scale", "computed")])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_array_is_copied_for_a_kernel(mesh, kernel, keeps):
  layers = experts(kernel, mesh, keeps)
  closed = jax.make_jaxpr(lambda w, x: jax.vjp(layers, w, x)[0])(ARRAYS[0], X)
  assert bool(primitives(closed.jaxpr)["eval_jaxpr"]) == bool(keeps)
  assert one_of.read_by_kernels(closed, 2) == (True, False)
  number = jnp.array([0, 1])
  program = jax.make_jaxpr(lambda arrays: one_of.run(closed, OneOf(arrays, number), X))(ARRAYS)
  found = primitives(program.jaxpr)
  assert found["pallas_call"] == primitives(closed.jaxpr)["pallas_call"] == 1
  assert found["dynamic_slice"] == primitives(closed.jaxpr)["dynamic_slice"]


USES = {
    "a product": lambda w, x: jnp.einsum("srk,sgkn->srn", x, w),
    "an output": lambda w, x: (w, x),
    "a kernel and a product": lambda w, x: (KERNELS["jax"](x[0], w[0], SIZES), w.sum()),
    "a kernel of all stages": lambda w, x: jax.vmap(lambda w, x: KERNELS["jax"](x, w, SIZES))(w, x),
    "a loop": lambda w, x: jax.lax.scan(lambda c, w: (c + w.sum(), None), 0.0, w)[0],
    "a call with a number": lambda w, x: jax.jit(lambda w, x, n: n * w.sum() + x.sum())(w, x, 2),
    "a barrier": lambda w, x: jnp.sin(jax.lax.optimization_barrier((w, x))[0]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_whatever_else_reads_it_reads_a_copy(use):
  closed = jax.make_jaxpr(use)(ARRAYS[0], X)
  found, expected = both(closed, jnp.array([1, 0]), X)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("several", [False, True])
def test_what_follows_a_variable_reads_what_takes_its_place(several):
  closed = jax.make_jaxpr(lambda w, x: ((x2 := x * 2) + w.sum(), x2 - x))(ARRAYS[0], X)
  doubled = next(eqn.outvars[0] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "mul")
  number = jnp.zeros((ARRAYS.shape[1],), jnp.int32)
  w = OneOf(ARRAYS, number) if several else ARRAYS[0]
  seen = []
  total, rest = one_of.run(closed, w, X, replaced={doubled: lambda x: seen.append(x) or x + 1})
  (x,) = seen
  np.testing.assert_array_equal(x, X * 2)
  np.testing.assert_allclose(total, X * 2 + 1 + ARRAYS[0].sum(), rtol=1e-5)
  np.testing.assert_allclose(rest, X + 1, rtol=1e-5)
