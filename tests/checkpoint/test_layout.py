# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Moves between layouts: every layer arrives whole at its place in the other layout."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext_pp_ext.checkpoint import moves
from maxtext_pp_ext.checkpoint.layout import axes_of_stack, Layout, LayoutError
from maxtext_pp_ext.checkpoint.moves import converted
from tests.checkpoint import models


@st.composite
def layouts_of(draw, layers):
  """Any layout of a model with this number of layers."""
  kind = draw(st.sampled_from(["stacked", "single", "pipeline"]))
  scan_axis = draw(st.integers(0, 3))
  if kind != "pipeline":
    return models.stacked(layers, scan_axis) if kind == "stacked" else models.single(layers)
  inside = draw(st.integers(1, layers))
  stages = draw(st.sampled_from([n for n in range(1, inside + 1) if inside % n == 0]))
  per_stage = draw(st.sampled_from([n for n in range(1, inside // stages + 1) if inside // stages % n == 0]))
  return models.pipeline(
      stages,
      inside // stages // per_stage,
      per_stage,
      scanned=draw(st.booleans()),
      outside=layers - inside,
      scan_axis=scan_axis,
  )


@given(st.data(), st.integers(1, 24))
def test_every_layer_arrives_where_the_other_layout_has_it_and_comes_back(data, layers):
  source, target = data.draw(layouts_of(layers)), data.draw(layouts_of(layers))
  arrays = models.values(source)
  there = converted(arrays, source, target)
  expected = models.values(target)
  assert there.keys() == expected.keys()
  for path, array in expected.items():
    np.testing.assert_array_equal(there[path], array)
  back = converted(there, target, source)
  for path, array in arrays.items():
    np.testing.assert_array_equal(back[path], array)


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=4), st.integers(0, 3))
def test_axes_of_stacks_are_those_that_stacking_makes(stacks, ndim):
  """Stacks real arrays, from the innermost stack. Entry i of a stack adds i times the stack's own power of ten."""
  array = np.zeros((1,) * ndim)
  for place, axis in reversed(list(enumerate(stacks))):
    array = np.stack([array + i * 10**place for i in range(2)], 0 if axis is None else min(axis, array.ndim))
  for place, axis in enumerate(axes_of_stack(stacks, array.ndim)):
    step = np.unique(np.diff(array, axis=axis))
    assert step.tolist() == [10**place]


@pytest.mark.parametrize("scan_axis", [0, 1, 2])
def test_layers_of_a_stage_are_along_the_scan_axis_behind_repeat_and_stage(scan_axis):
  """layer = (repeat · S + stage) · P + index, as MaxText's pipelines run them."""
  source, target = models.stacked(24), models.pipeline(4, 2, 3, scanned=True, scan_axis=scan_axis)
  moved = converted(models.values(source), source, target)
  kernel = moved["decoder", "pipeline_module", "layers", "scanned_layers", "mlp", "kernel"]
  for layer in range(24):
    repeat, stage, index = np.unravel_index(layer, (2, 4, 3))
    of_layer = np.take(kernel[repeat, stage], index, axis=scan_axis)
    np.testing.assert_array_equal(of_layer, 1000 * layer + np.arange(15).reshape(3, 5))


def checkpoint(of, *prefixes, **more):
  shapes = {(*prefix, *leaf.path): leaf.shape for prefix in prefixes for leaf in of.leaves if leaf.name is not None}
  return shapes | {tuple(key.split("/")): shape for key, shape in more.items()}


def test_moments_go_with_their_parameters_and_what_is_no_models_passes():
  source, target = models.stacked(6), models.pipeline(3, 2)
  prefixes = (("params", "params"), ("opt_state", "0", "mu", "params"))
  plan = moves.plan(checkpoint(source, *prefixes, step=()), source, target)
  paths = {entry.path for entry in plan.entries}
  assert paths == {*checkpoint(target, *prefixes, step=())}
  [step] = plan.moves[("step",)]
  assert step.path == ("step",) and step.layer is None


def test_random_state_that_has_no_counterpart_is_left_behind_and_nothing_else():
  source, target = models.stacked(6), models.pipeline(3, 2)
  of_layers = next(leaf for leaf in source.leaves if leaf.name == ("gate",))
  key = dataclasses.replace(of_layers, path=("decoder", "layers", "rng"), name=("rng",), is_random_state=True)
  source = Layout(leaves=(*source.leaves, key), description="with rng")
  shapes = checkpoint(source, ("params", "params")) | {("params", "params", *key.path): (*key.shape, 4)}
  plan = moves.plan(shapes, source, target)
  assert plan.dropped == (("params", "params", *key.path),)
  weight = dataclasses.replace(key, is_random_state=False)
  source = Layout(leaves=(*source.leaves[:-1], weight), description="with more")
  shapes["params", "params", *key.path] = key.shape
  with pytest.raises(LayoutError, match="no place for all of params/params/decoder/layers/rng"):
    moves.plan(shapes, source, target)


REFUSED = {
    "an array of another shape": (
        lambda shapes: shapes | {("params", "params", "decoder", "layers", "mlp", "kernel"): (3, 7, 5)},
        r"has the shape \[3, 7, 5\] in the checkpoint, but \[3, 6, 5\] in the model",
    ),
    "an array that the model has not": (
        lambda shapes: shapes | {("params", "params", "decoder", "layers", "mlp", "bias"): (6, 5)},
        "mlp/bias is not in the model",
    ),
    "a factored moment, which is no stack of layers": (
        lambda shapes: shapes | {("opt_state", "v_row", "decoder", "layers", "mlp", "kernel"): (3,)},
        r"has the shape \[3\] in the checkpoint",
    ),
    "no array of the model": (lambda shapes: {("step",): ()}, "no array of this model"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED.keys())
def test_a_checkpoint_of_another_model_is_refused(change, message):
  source = models.stacked(6)
  with pytest.raises(LayoutError, match=message):
    moves.plan(change(checkpoint(source, ("params", "params"))), source, models.pipeline(3, 2))


def test_layouts_of_different_depth_are_refused():
  source = models.stacked(6)
  shapes = checkpoint(source, ("params", "params"))
  with pytest.raises(LayoutError, match="is to hold the layers 6, 7, which the checkpoint lacks"):
    moves.plan(shapes, source, models.pipeline(4, 2))
  with pytest.raises(LayoutError, match="no place for all of .*gate"):
    moves.plan(shapes, source, models.pipeline(2, 2))


def test_a_layer_that_is_there_twice_is_refused():
  leaves = models.stacked(2).leaves
  with pytest.raises(LayoutError, match="layer 0 has mlp/kernel more than once"):
    Layout(leaves=(*leaves, *models.single(1).leaves), description="twice")
