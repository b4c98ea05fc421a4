# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A backward program is cut between layers and between their blocks, and computes the same gradients."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_pp_ext.engine.order import Saved
from maxtext_pp_ext.engine.programs.jaxprs import inputs_of
from maxtext_pp_ext.engine.programs.partial import GradientProgram
from maxtext_pp_ext.engine.programs.roots import BatchSplit
from maxtext_pp_ext.engine.programs.segments import with_last_gradients
from tests.engine.gradients import evaluated

LAYERS, BATCH, EMBED, MLP = 3, 4, 8, 32
SAVED = jax.checkpoint_policies.save_only_these_names("layer_input")


def stage(weights, x, blocks=1):
  """Layers of blocks of two products each; of a layer only the input is saved."""
  for number, (up, down) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
    if number % blocks == 0:
      x = checkpoint_name(x, "layer_input")
    x = x + jnp.tanh(x @ up) @ down
  return x


def planned(layers, blocks=1, on_sparsecores=False, whole=()):
  """The program of a rematerialised stage of layers · blocks, its inputs, and the gradients of the weights and of x.

  The gradients of the weights in `whole` are not split.
  """
  rematerialised = jax.checkpoint(functools.partial(stage, blocks=blocks), policy=SAVED, prevent_cse=False)
  count = layers * blocks
  keys = iter(jax.random.split(jax.random.key(0), 2 * count + 2))
  weights = [jax.random.normal(next(keys), shape) for _ in range(count) for shape in ((EMBED, MLP), (MLP, EMBED))]
  x, d = (jax.random.normal(next(keys), (BATCH, EMBED)) for _ in range(2))
  out, pull_back = jax.vjp(rematerialised, weights, x)
  assert out.shape == d.shape
  residuals, structure = jax.tree.flatten(pull_back)
  closed = jax.make_jaxpr(lambda r, d: jax.tree.leaves(jax.tree.unflatten(structure, r)(d)))(residuals, d)
  splits = [[] if number in whole else [BatchSplit(BATCH, 2)] for number in range(len(weights))]
  program = GradientProgram.plan(closed, splits, ("fsdp",), 1, on_sparsecores, num_residuals=len(residuals))
  dweights, dx = pull_back(d)
  return program, [*residuals, d], [*dweights, dx]


def early(program):
  return tuple(number for number, each in enumerate(program.gradients) if each.is_early)


def test_each_layer_is_computed_again_after_the_gradients_of_the_layer_behind_it():
  program, _, _ = planned(LAYERS)
  assert [segment.done for segment in program.segments] == [(4, 5), (2, 3), (0, 1)]
  for segment in program.segments:
    names = [eqn.primitive.name for eqn in segment.program.jaxpr.eqns]
    assert names.count("tanh") == 1, "one layer's activation in each"


def test_no_layer_is_computed_again_before_the_gradients_of_the_layer_behind_it():
  program, _, _ = planned(LAYERS)
  *residuals, _ = program.inputs
  read = [set(segment.inputs) & set(residuals) for segment in program.segments]
  for number, segment in enumerate(program.segments[:-1]):
    later = set().union(*read[number + 1 :]) - set().union(*read[: number + 1])
    assert later and later <= set(segment.crossing)


def test_backward_is_cut_between_the_blocks_of_a_layer_too():
  program, _, _ = planned(layers=2, blocks=2)
  assert [segment.done for segment in program.segments] == [(6, 7), (4, 5), (2, 3), (0, 1)]


def test_beside_gathers_on_sparsecores_the_gradients_of_the_last_two_segments_come_last():
  program, _, _ = planned(layers=2, blocks=2, on_sparsecores=True)
  assert [segment.done for segment in program.segments] == [(6, 7), (4, 5), (), (), (0,), (1,), (2,), (3,)]
  *_, last, zeroth, first, second, third = program.segments
  assert not any(each.program.jaxpr.eqns for each in (zeroth, first, second, third))
  needed = lambda *gradients: {v for i in gradients for v in program.gradients[i].needs}
  assert needed(0, 1, 2, 3) | set(program.others) == set(last.crossing), "it waits for the cotangent of x, too"
  assert [set(each.crossing) for each in (zeroth, first, second)] == [needed(1, 2, 3), needed(2, 3), needed(3)]


def test_of_each_of_the_last_two_segments_the_largest_gradient_comes_last():
  program, _, _ = planned(layers=2, blocks=2)
  sizes = [5, 4, 1, 2, 0, 0, 0, 0]
  needs = [each.needs for each in program.gradients]
  moved = with_last_gradients(program.segments, needs, program.others, sizes)
  assert [segment.done for segment in moved] == [(6, 7), (4, 5), (), (), (1,), (0,), (2,), (3,)]


def test_gradients_that_need_no_other_product_of_backward_are_early():
  program, _, _ = planned(LAYERS)
  assert early(program) == (2 * LAYERS - 1,), "that of the last product of the last layer"


@pytest.mark.parametrize("layers, expected", [(2, ()), (LAYERS, (2 * LAYERS - 1,))])
def test_gradients_that_come_last_are_not_early(layers, expected):
  program, _, _ = planned(layers, on_sparsecores=True)
  assert early(program) == expected


@pytest.mark.parametrize(
    "layers, blocks, on_sparsecores",
    [(LAYERS, 1, False), (2, 2, False), (2, 2, True), (1, 1, True), (1, 2, True), (3, 1, True)],
)
def test_gradients_of_segments_are_those_of_the_whole(layers, blocks, on_sparsecores):
  program, (*residuals, d), (*expected, expected_dx) = planned(layers, blocks, on_sparsecores)

  def run(of_iterations, iteration, d):
    saved = [Saved(all_.__getitem__, iteration) for all_ in of_iterations]
    return evaluated(program, [*saved, d])

  of_iterations = [jnp.stack([jnp.full_like(x, jnp.nan), x]) for x in residuals]
  gradients, (dx,), *_ = jax.jit(run)(of_iterations, 1, d)
  for gradient, one in zip(gradients, expected, strict=True):
    np.testing.assert_allclose(gradient.sum(0), one, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dx, expected_dx, rtol=1e-5, atol=1e-5)


def test_what_is_computed_before_a_gradient_is_returned_in_the_gradients_place():
  program, args, (*expected, _) = planned(2, 2, on_sparsecores=True)
  before = [jnp.full((3,), float(number)) for number in range(len(expected))]
  _, _, after, behind = jax.jit(functools.partial(evaluated, program))(args, before, behind=jnp.ones(()))
  for one, other in zip([*before, 1.0], [*after, behind], strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("blocks, number", [(1, 0), (1, 3), (2, 0), (2, 3), (2, 7)])
@pytest.mark.parametrize("on_sparsecores", [False, True])
def test_gathers_on_sparsecores_begin_when_the_gradients_of_the_iteration_before_are_reduced(
    blocks, number, on_sparsecores
):
  program, args, (*expected, _) = planned(2, blocks, on_sparsecores)
  before = [jnp.ones(()) if i == number else None for i in range(len(expected))]

  def turned(before, behind):
    return evaluated(program, args, before, behind=behind)[-1]

  jaxpr = jax.make_jaxpr(turned)(before, jnp.ones(())).jaxpr
  assert program.gathers_after == (blocks - 1 if on_sparsecores else None)
  assert inputs_of(jaxpr, 0) == ({0, 1} if on_sparsecores else {1})


def test_gradients_that_cannot_be_split_do_not_prevent_cuts():
  """Of experts' weights, whose sums the compiler completes: larger than an activation, and an output of the program."""
  program, args, (*expected, expected_dx) = planned(LAYERS, whole=(1, 3))
  assert len(program.segments) == LAYERS
  gradients, (dx,), *_ = jax.jit(functools.partial(evaluated, program))(args)
  for gradient, one in zip(gradients, expected, strict=True):
    np.testing.assert_allclose(gradient.sum(0), one, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dx, expected_dx, rtol=1e-5, atol=1e-5)


def test_sums_are_returned_instead_of_gradients_and_belong_to_the_same_weights():
  program, args, (*expected, _) = planned(LAYERS)
  add = lambda i, compute, operands: compute(*operands).sum(0) + 100 * i
  totals, *_ = jax.jit(lambda args: evaluated(program, args, compute=add))(args)
  for number, (total, one) in enumerate(zip(totals, expected, strict=True)):
    np.testing.assert_allclose(total, one + 100 * number, rtol=1e-5, atol=1e-4)


def test_a_single_layer_is_not_cut():
  program, _, _ = planned(1)
  assert len(program.segments) == 1
