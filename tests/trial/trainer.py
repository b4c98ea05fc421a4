# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs MaxText's pre-training loop in this process, from given weights and on given batches; keeps what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any
from unittest import mock

from flax import nnx
from flax.core.spmd import logical_axis_rules
import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.layers.moe import MoEBiasVar
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils
import numpy as np

from maxtext_pp_ext.checkpoint.layout import Layout, Path
from maxtext_pp_ext.host.models import layouts, run_config

Arrays = dict[Path, np.ndarray]
TRAINED = nnx.Any(nnx.Param, MoEBiasVar)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
  """What a training leaves.

  Attributes:
    metrics: the scalars that each step and evaluation returned, by "train 0 learning/loss".
    start: parameters and biases of experts before the first step.
    end: all arrays of the train state after the last step.
    layout: where the layers are in them.
  """

  metrics: dict[str, float]
  start: Arrays
  end: Arrays
  layout: Layout


class Batches:
  """Packed rows of very different lengths: some are full, some have one or two tokens, and targets are masked.

  It stands for the iterators that MaxText makes of a dataset.
  """

  error: Exception | None = None  # of the last iterator that failed; MaxText takes an error for the end of the data

  def __init__(self, config: Any, mesh: jax.sharding.Mesh, *, evaluation: bool = False, nan_row: int | None = None):
    """`nan_row`: the only row that has the last word of the vocabulary."""
    self._sharding = NamedSharding(mesh, P(mesh.axis_names))  # as MaxText's loaders have it
    self._config, self._seed, self._nan_row = config, 1000 * evaluation, nan_row
    self._rows = config.global_batch_size_to_load_eval if evaluation else config.global_batch_size_to_load

  def reset(self) -> None:
    pass  # each evaluation has new rows

  def __iter__(self) -> Iterator[dict[str, Any]]:
    return self

  def __next__(self) -> dict[str, Any]:
    try:
      return self._next()
    except Exception as error:
      Batches.error = error
      raise

  def _next(self) -> dict[str, Any]:
    config, numbers = self._config, np.random.default_rng(self._seed)
    self._seed += 1
    shape = (self._rows, config.max_target_length)
    found = {name: numbers.integers(1, config.vocab_size - 1, shape) for name in ("inputs", "targets")}
    segments, positions, masks = packed(numbers, *shape)
    if self._nan_row is not None:
      found["inputs"][self._nan_row, 0] = config.vocab_size - 1
    for name, of_name in (("inputs", segments), ("targets", segments * masks)):
      found[f"{name}_segmentation"], found[f"{name}_position"] = of_name, positions
    batch = {name: jnp.asarray(value, jnp.int32) for name, value in found.items()}
    return jax.device_put(batch, self._sharding)


def packed(numbers: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(segment ids, positions, masks of targets) of rows: every third one is full, and every third has hardly a token."""
  segments, positions = (np.zeros((rows, length), np.int64) for _ in range(2))
  for row in range(rows):
    used = (length, int(numbers.integers(1, 3)), int(numbers.integers(3, length + 1)))[row % 3]
    at, segment = 0, 1
    while at < used:
      size = min(int(numbers.integers(1, length)), used - at)
      segments[row, at : at + size], positions[row, at : at + size] = segment, np.arange(size)
      at, segment = at + size, segment + 1
  masks = numbers.random((rows, length)) < 0.8
  masks[:, 0] = True  # no row is without a target
  return segments, positions, masks


class _Recorded:
  """A jitted step that keeps the arguments of its calls behind the state, and what it returned."""

  def __init__(self, step: Any, kind: str, calls: list):
    self._step, self._kind, self._calls = step, kind, calls

  def lower(self, *args: Any) -> Any:
    return self._step.lower(*args)

  def __call__(self, state: Any, *args: Any) -> Any:
    found = self._step(state, *args)
    metrics = found[1] if self._kind == "train" else found
    self._calls.append((self._kind, self._step, args, jax.device_get(metrics["scalar"])))
    return found


class Training:
  """A run of MaxText's `train_loop`.

  Attributes:
    trained: what it left.
  """

  def __init__(
      self,
      config: Any,
      start: Callable[[Arrays], Arrays],
      *,
      devices: Sequence[jax.Device] | None = None,
      nan_row: int | None = None,
  ):
    """Trains.

    Args:
      config: MaxText's config, from `read`.
      start: makes the weights to begin with from those that MaxText draws.
      devices: the devices of the mesh; by default all.
      nan_row: as in `Batches`.
    """
    self.config, self._calls = config, []
    setup, jit = train_utils.setup_train_loop, train_utils.jit_train_and_eval_step

    def iterators(config, mesh):
      of_evaluation = Batches(config, mesh, evaluation=True, nan_row=nan_row) if config.eval_interval > 0 else None
      return Batches(config, mesh, nan_row=nan_row), of_evaluation

    def set_up(config, recorder, *_):
      *others, state = setup(config, recorder, devices)
      self._graph, begin = (others[3], state) if config.enable_diloco else nnx.split(state)
      self._start = {path: np.asarray(value) for path, value in start(_of_model(begin)).items()}
      self._mesh, begin = others[4], _with_weights(begin, self._start)
      # A step may take the memory of the state that it is given.
      self._begin = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, begin)
      return *others, begin if config.enable_diloco else nnx.merge(self._graph, begin)

    def jitted(*args, **kwargs):
      of_train, of_eval = jit(*args, **kwargs)
      recorded = lambda step, kind: step and _Recorded(step, kind, self._calls)
      return recorded(of_train, "train"), recorded(of_eval, "eval")

    with (
        slices_of_half_the_devices(),
        mock.patch.object(input_pipeline_interface, "create_data_iterator", iterators),
        mock.patch.object(train_utils, "setup_train_loop", set_up),
        mock.patch.object(train_utils, "jit_train_and_eval_step", jitted),
    ):
      end = train.train_loop(config, None)
    metrics = [(kind, scalars) for kind, _, _, scalars in self._calls]
    trained = sum(kind == "train" for kind, _ in metrics)
    if trained != config.steps:
      raise RuntimeError(f"{trained} of {config.steps} steps were trained") from Batches.error
    self.trained = self._trained(metrics, self._start, end)

  def again(self, start: Callable[[Arrays], Arrays]) -> Trained:
    """The same steps, already compiled, from weights that `start` makes of the first run's."""
    weights = start(self._start)
    state, metrics = _with_weights(self._begin, weights), []
    rules = {"train": self.config.logical_axis_rules, "eval": self.config.logical_axis_rules_for_eval}
    for kind, step, args, _ in self._calls:
      with jax.set_mesh(self._mesh), logical_axis_rules(rules[kind]):
        found = step(state, *args)
      if kind == "train":
        state, found = found
      metrics.append((kind, jax.device_get(found["scalar"])))
    return self._trained(metrics, weights, state)

  def _trained(self, steps: Sequence[tuple[str, Mapping[str, Any]]], start: Arrays, end: Any) -> Trained:
    metrics = {
        f"{kind} {number} {name}": float(value)
        for number, (kind, scalars) in enumerate(steps)
        for name, value in scalars.items()
        if np.ndim(value) == 0
    }
    return Trained(metrics=metrics, start=start, end=dict(_arrays(end)), layout=layouts.of_config(self.config))


def read(arguments: Sequence[str]) -> Any:
  """MaxText's config of these arguments. Raises ValueError if MaxText or this package refuses it."""
  # As the trainer's `initialize` does.
  jax.config.update("jax_default_prng_impl", "unsafe_rbg")
  return run_config.read(arguments)


@contextlib.contextmanager
def slices_of_half_the_devices() -> Iterator[None]:
  """CPU devices are in no slices: lets the axes of slices be the outer ones of all devices."""

  def hybrid(ici, dcn, devices, **_):
    sizes = [i * d for i, d in zip(ici, dcn, strict=True)]
    axes = [axis for pair in zip(range(len(ici)), range(len(ici), 2 * len(ici)), strict=True) for axis in pair]
    return np.array(devices).reshape(*dcn, *ici).transpose(axes).reshape(sizes)

  with mock.patch.object(mesh_utils, "create_hybrid_device_mesh", hybrid):
    yield


def _name(key: Any) -> str:
  for attribute in ("key", "name", "idx"):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)


_is_variable = lambda x: isinstance(x, nnx.Variable)


def _leaves(state: Any) -> Iterator[tuple[Path, Any]]:
  """(path, variable or array) of a train state, with DiLoCo or without; random state is left out."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_variable):
    if not isinstance(leaf, nnx.RngState):
      yield tuple(map(_name, path)), leaf


def _value(leaf: Any) -> jax.Array:
  return leaf.get_value() if _is_variable(leaf) else leaf


_REPLICAS = "inner_state"


def _arrays(state: Any) -> Iterator[tuple[Path, np.ndarray]]:
  """All arrays by path; those of a replica are below its number."""
  for path, leaf in _leaves(state):
    value = np.asarray(jax.device_get(_value(leaf)))
    if path[0] != _REPLICAS:
      yield path, value
      continue
    for replica, part in enumerate(value):
      yield (f"replica {replica}", *path[1:]), part


def _of_model(state: Any) -> Arrays:
  """The parameters and biases of the model, by their paths in it."""
  found = {}
  for path, leaf in _leaves(state):
    inner = path[1:] if path[0] == _REPLICAS else path
    if inner[0] == "model" and isinstance(leaf, (nnx.Param, MoEBiasVar)):
      value = np.asarray(jax.device_get(_value(leaf)))
      found[inner[1:]] = value[0] if path[0] == _REPLICAS else value
  return found


def _with_weights(state: Any, weights: Arrays) -> Any:
  """The state with these parameters and biases."""
  used = set()

  def placed(path, leaf):
    names = tuple(map(_name, path))
    of_replicas = names[0] == _REPLICAS
    inner = names[1:] if of_replicas else names
    if inner[0] not in ("model", "params") or inner[1:] not in weights:
      copied = lambda x: x.copy() if isinstance(x, jax.Array) else x
      return jax.tree.map(copied, leaf)
    used.add(inner[1:])
    before, value = _value(leaf), weights[inner[1:]]
    if of_replicas:
      value = np.broadcast_to(value, before.shape)
    if value.shape != before.shape:
      raise AssertionError(f"{names} has the shape {before.shape}, and is to get {value.shape}.")
    after = jax.device_put(jnp.asarray(value, before.dtype), before.sharding)
    return leaf.replace(after) if _is_variable(leaf) else after

  found = jax.tree_util.tree_map_with_path(placed, state, is_leaf=_is_variable)
  if missing := weights.keys() - used:
    raise AssertionError(f"The model has no {sorted(missing)[:3]}.")
  return found
