# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts of small models, made without MaxText."""

import numpy as np

from maxtext_pp_ext.checkpoint.layout import axes_of_stack, LayerAxis, Layout, Leaf

# What a layer has: name -> shape.
ARRAYS = {("mlp", "kernel"): (3, 5), ("norm", "scale"): (4,), ("gate",): ()}
SCAN_AXIS = 1


def layer_leaves(path, *, first=0, stacks=(), scan_axis=SCAN_AXIS):
  """Arrays of layers in nested stacks: (size, stride, whether it is a pipeline's), from the outermost."""
  for name, of_layer in ARRAYS.items():
    axes = axes_of_stack(
        [None if is_pipeline else scan_axis for _, _, is_pipeline in stacks], len(of_layer) + len(stacks)
    )
    shape, rest = [None] * (len(of_layer) + len(stacks)), iter(of_layer)
    for axis, (size, _, _) in zip(axes, stacks, strict=True):
      shape[axis] = size
    shape = tuple(next(rest) if size is None else size for size in shape)
    strides = [stride for _, stride, _ in stacks]
    layer_axes = tuple(LayerAxis(axis=a, stride=s) for a, s in zip(axes, strides, strict=True))
    yield Leaf(path=(*path, *name), shape=shape, name=name, first=first, axes=layer_axes)


def layout(description, *groups):
  rest = (
      Leaf(path=("embedding",), shape=(7, 4)),
      Leaf(path=("decoder", "rngs", "key"), shape=(), is_random_state=True),
  )
  return Layout(leaves=(*rest, *(leaf for group in groups for leaf in group)), description=description)


def stacked(layers, scan_axis=SCAN_AXIS):
  stack = ((layers, 1, False),)
  return layout("stacked", layer_leaves(("decoder", "layers"), stacks=stack, scan_axis=scan_axis))


def single(layers):
  return layout("single", *(layer_leaves(("decoder", f"layers_{layer}"), first=layer) for layer in range(layers)))


def pipeline(stages, repeats, per_stage=1, *, scanned=False, outside=0, scan_axis=SCAN_AXIS):
  path = ("decoder", "pipeline_module", "layers")
  around = ((repeats, stages * per_stage, True),) if repeats > 1 else ()
  around += ((stages, per_stage, True),)
  if scanned:
    groups = [layer_leaves((*path, "scanned_layers"), stacks=(*around, (per_stage, 1, False)), scan_axis=scan_axis)]
  else:
    names = [(f"layers_{i}",) for i in range(per_stage)] if per_stage > 1 else [()]
    groups = [layer_leaves((*path, *name), first=i, stacks=around) for i, name in enumerate(names)]
  if outside:
    last = ("decoder", "layers_outside_pipeline")
    groups.append(layer_leaves(last, first=stages * repeats * per_stage, stacks=((outside, 1, False),)))
  return layout(f"pipeline {stages}×{repeats}×{per_stage}", *groups)


def values(of):
  """A model whose numbers encode the layer and the place in it: {path: array}."""
  arrays = {}
  for leaf in of.leaves:
    arrays[leaf.path] = array = np.zeros(leaf.shape)
    if leaf.name is None:
      array[...] = -1 - np.arange(array.size).reshape(array.shape)
      continue
    own = np.arange(np.prod(leaf.of_layer, dtype=int)).reshape(leaf.of_layer)
    for layer, index in leaf.layers():
      array[index] = 1000 * layer + 100 * list(ARRAYS).index(leaf.name) + own
  return arrays
