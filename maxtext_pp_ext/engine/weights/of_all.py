# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is done with all weights at once: what each of them does on its stages, in one program (`together`).

Unless a function says otherwise, `repeat` is the repeat that each stage is at, and `chunk` the number of a chunk, 0 …
chunks − 1.
"""

from collections.abc import Callable, Collection, Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxtext_pp_ext.engine.per_stage import joined, Layout, OnDevices, OnStage, together
from maxtext_pp_ext.engine.programs.one_of import OneOf
from maxtext_pp_ext.engine.shapes import Mask, Numbers, OfRepeat, Param
from maxtext_pp_ext.engine.weights.layout import WeightLayout
from maxtext_pp_ext.engine.weights.weight import there, Weight
from maxtext_pp_ext.engine.weights.whole import WholeWeight
from maxtext_pp_ext.schedule import GatherPolicy

Weights = list[Weight]
PyTree = Any


def weights_of(
    layouts: Sequence[WeightLayout],
    params: Sequence[jax.Array | jax.ShapeDtypeStruct],
    mesh: Mesh,
    gather_policy: GatherPolicy,
    chunks: int,
) -> Weights:
  """The weights of parameters [R, S, …], before anything is gathered; of one chunk with one microbatch."""
  of = WholeWeight if chunks == 1 else Weight
  given: dict[str, Any] = {"mesh": mesh, "gather_policy": gather_policy, "chunks": chunks}
  return [of(layout=layouts[k], shape=w.shape, dtype=w.dtype, **given) for k, w in enumerate(params)]


class Carried(NamedTuple):
  """What a loop carries of all weights: one array each, or None."""

  buffers: list[jax.Array | None]
  total: list[jax.Array | None]
  finished: list[jax.Array | None]
  scattered: list[jax.Array | None]
  stored: list[jax.Array | None]


def carried(weights: Sequence[Weight]) -> Carried:
  """What there is of the weights between iterations."""
  return Carried(*([getattr(w, name) for w in weights] for name in Carried._fields))


def in_iteration(carry: Carried, loaded: Sequence[Weight]) -> Weights:
  """The weights, from what the loop carries and from what they are gathered from."""
  return [w.with_(**{name: arrays[k] for name, arrays in carry._asdict().items()}) for k, w in enumerate(loaded)]


def behind_barrier(
    weights: Sequence[Weight], names: Sequence[str] | Callable[[Weight], Sequence[str]], others: PyTree = None
) -> tuple[Weights, PyTree]:
  """(the weights, other arrays), all behind one barrier: what reads any of them comes after all are computed.

  Args:
    weights: the weights.
    names: those of their arrays that the barrier ties; the same for each, or by the weight.
    others: arrays that it ties to them.
  """
  of = [set(names(w) if callable(names) else names) for w in weights]
  tied = {name: [getattr(w, name) if name in of[k] else None for k, w in enumerate(weights)] for name in set().union(*of)}
  others, tied = jax.lax.optimization_barrier((others, tied))
  return [w.with_(**{name: tied[name][k] for name in of[k]}) for k, w in enumerate(weights)], others


def ordered(weights: Sequence[Weight]) -> Weights:
  """The weights with the dimensions of their buffers in their order in memory."""
  return [w.ordered() for w in weights]


def close(weights: Sequence[Weight], repeat: Numbers) -> Weights:
  """The weights with the current repeat of each stage instead of buffers."""
  return _with(weights, "current", [repeat], [w.close() for w in weights], buffers=None)


@jax.named_scope("gather")
def gather(weights: Sequence[Weight], following: Numbers, chunk: Numbers, but: Collection[int] = ()) -> Weights:
  """The weights with one arriving chunk of the repeat that each stage works on next, but for those of these numbers."""
  computed = [None if k in but else w.gather() for k, w in enumerate(weights)]
  return _with(weights, "arriving", [following, chunk], computed)


def in_groups(weights: Sequence[Weight], count: int) -> list[list[int]]:
  """The numbers of the weights that are gathered while devices compute, in groups of about as many elements.

  Each group has successive weights, which are those of successive layers. Without such weights there are no groups.
  """
  size = {k: math.prod(w.shape[2:]) for k, w in enumerate(weights) if w.is_gather_overlapped}
  if not size or not count:
    return []
  groups: list[list[int]] = [[] for _ in range(count)]
  before, total = 0, max(sum(size.values()), 1)
  for k, own in size.items():
    groups[min((2 * before + own) * count // (2 * total), count - 1)].append(k)
    before += own
  return groups


def gathers(
    weights: Sequence[Weight], following: Numbers, chunk: Numbers, groups: Sequence[Sequence[int]]
) -> list[OnDevices | None]:
  """For each group of weights, how devices gather their arriving chunks."""
  found = [joined(weights[0].mesh, [following, chunk], [weights[k].gather() for k in group]) for group in groups]
  return [each and each._replace(fn=jax.named_scope("gather")(each.fn)) for each in found]


def transferred(weights: Sequence[Weight]) -> list[tuple[int, str, Layout]]:
  """(number of the weight, name, layout) of each array whose transfer must end before a gradient of the same iteration.

  Of transfers that devices compute beside.
  """
  found = []
  for k, w in enumerate(weights):
    layouts = {"arriving": w.layout.chunk(w.transfer)} if w.is_gather_overlapped else {}
    if w.is_partial and not w.is_reduction_exposed:
      layouts[w.reduced] = w.layout.stored if w.scattered is None else w.layout.scattered(w.transfer)
    found += [(k, name, layouts[name]) for name in w.overlapped if name in layouts and getattr(w, name) is not None]
  return found


@jax.named_scope("repeat")
def place(weights: Sequence[Weight], repeat: Numbers, chunk: Numbers) -> Weights:
  """The weights with their arriving chunks in the next buffers; of a repeat in one chunk, in the current one's place.

  All else that reads the buffers in an iteration has to come before. Otherwise the compiler copies them.
  """
  return _with(weights, "buffers", [repeat, chunk], [w.place() for w in weights], arriving=None)


def use(weights: Sequence[Weight], repeat: Numbers) -> list[OfRepeat | OneOf]:
  """The gathered weights of an iteration, in the compute dtypes; `OneOf`s of those that kernels read."""
  found: list[Any] = together(weights[0].mesh, [repeat], [w.use() for w in weights])
  with jax.named_scope("gather"):  # of the weights without buffers
    return [w.used(found[k], repeat) for k, w in enumerate(weights)]


@jax.named_scope("reduce")
def add_complete(
    weights: Sequence[Weight], gradients: Sequence[OfRepeat | None], repeat: Numbers, works: Mask
) -> Weights:
  """The weights with an iteration's complete gradients added; None stands for a partial sum, which is added already.

  `works` is as in `Item`.
  """
  added = [w.add_complete(gradients[k]) for k, w in enumerate(weights)]
  return _with(weights, "stored", [repeat, works], added)


@jax.named_scope("repeat")
def finish_repeat(weights: Sequence[Weight], repeat: Numbers, finishes: Mask) -> Weights:
  """The weights with totals where they wait for their reduction, if they are not there: the next repeat's next buffer.

  `finishes` has the stages that have finished the repeat.
  """
  waiting = together(weights[0].mesh, [repeat], [w.finish_repeat() for w in weights], where=finishes)
  return [w if waiting[k] is None else w.with_(**{w.where_sums_wait: waiting[k]}) for k, w in enumerate(weights)]


def cut_out(weights: Sequence[Weight], repeat: Numbers, chunk: Numbers) -> Weights:
  """The weights with one leaving chunk of their finished sums."""
  return _with(weights, "leaving", [repeat, chunk], [w.cut_out() for w in weights])


def reduce(weights: Sequence[Weight], finished: Numbers, chunk: Numbers) -> Weights:
  """The weights with their leaving chunks reduced into the place of the repeat that each stage has finished last."""
  return add_scattered(scatter(weights, finished, chunk), finished, chunk)


@jax.named_scope("reduce")
def scatter(weights: Sequence[Weight], finished: Numbers, chunk: Numbers) -> Weights:
  """As `reduce`, but what is to be summed over replicas in other slices is only scattered."""
  weights = _with(weights, "scattered", [finished, chunk], [w.scatter() for w in weights], leaving=None)
  at_once = [None if w.leaving is None else w.reduce() for w in weights]
  return _with(weights, "stored", [finished, chunk], at_once, leaving=None)


@jax.named_scope("reduce")
def add_scattered(weights: Sequence[Weight], finished: Numbers, chunk: Numbers) -> Weights:
  """The weights with their scattered chunks summed over replicas into the place of the repeat `finished`."""
  summed = [None if w.scattered is None else w.reduce() for w in weights]
  return _with(weights, "stored", [finished, chunk], summed)


def finish(weights: Sequence[Weight]) -> list[Param]:
  """The gradients in the parameters' dtypes, when `total` holds repeat 0 and no other sum is left."""
  zeros = jnp.zeros((weights[0].shape[1],), jnp.int32)
  whole = [w.with_(chunks=1, scattered=None) for w in weights]
  leaving = _with(whole, "leaving", [zeros], [w.cut_out_total() for w in whole])
  return [there(w.stored).astype(w.dtype) for w in reduce(leaving, zeros, zeros)]


def _with(
    weights: Sequence[Weight],
    name: str,
    indices: Sequence[jax.Array],
    computed: Sequence[OnStage | None],
    **others: None,
) -> Weights:
  """The weights with an array that each computes on its stages; those that compute nothing are left as they are."""
  found = together(weights[0].mesh, indices, computed)
  return [w if found[k] is None else w.with_(**{name: found[k]}, **others) for k, w in enumerate(weights)]
