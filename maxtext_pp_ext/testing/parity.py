# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares a pipeline with a plain Python loop over the same decoder layers with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import math
from typing import Any
import warnings

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.utils import maxtext_utils
import numpy as np

import maxtext_pp_ext
from maxtext_pp_ext.config.derived import sound_layers, sound_stages
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.host.models import decoder_layers
from maxtext_pp_ext.testing.loop import by_path, Loop, sown_beside

PyTree = Any
# (params, inputs, segment ids, positions) -> (activations, the values that layers have sown, by path).
Function = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]

# An array whose gradient is smaller than this part of the mean gradient is compared with that part instead. Some
# gradients are zero except for rounding, such as those of key biases, which softmax cancels.
LEAST_GRADIENT = 0.01


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Arguments of decoder layers, and the cotangent of their outputs."""

  #: activations [batch, sequence, embed]
  inputs: jax.Array
  cotangent: jax.Array
  #: int [batch, sequence]
  segment_ids: jax.Array
  positions: jax.Array

  @classmethod
  def random(cls, config: DerivedKeys, seed: int = 0) -> Batch:
    """Activations from a normal distribution, and packed sequences: segments and positions differ by example."""
    shape = (config.global_batch_size_to_train_on, config.max_target_length, config.emb_dim)
    keys = jax.random.split(jax.random.key(seed), 3)
    starts = jax.random.randint(keys[2], (shape[0], 1), 1, shape[1], jnp.int32)
    at = jnp.arange(shape[1], dtype=jnp.int32)[None]
    return cls(
        inputs=jax.random.normal(keys[0], shape, config.dtype),
        cotangent=jax.random.normal(keys[1], shape, config.dtype),
        segment_ids=jnp.where(at < starts, 1, 2).astype(jnp.int32),
        positions=jnp.where(at < starts, at, at - starts).astype(jnp.int32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
  """Relative errors ‖pipeline − layers‖ / ‖layers‖, in float32, per array."""

  outputs: float  #: error of the activations [batch, sequence, embed]
  #: Error of each parameter's gradient, by the parameter's path in the pipeline, and of the inputs' gradient (`inputs`).
  gradients: dict[str, float]
  #: Error of each sown value, by path in a stage: load-balance losses, updates of experts' biases, statistics.
  sown: dict[str, float] = dataclasses.field(default_factory=dict)
  #: Arrays whose gradient in the layers is zero: neither outputs nor sown values depend on them.
  without_gradient: tuple[str, ...] = ()

  @property
  def errors(self) -> list[tuple[str, float]]:
    """All arrays with their errors, the largest error first; NaN counts as the largest."""
    errors = [("outputs", self.outputs), *self.gradients.items(), *((f"sown{k}", v) for k, v in self.sown.items())]
    return sorted(errors, key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])

  def check_gradients(self, unused: Iterable[str] = ()) -> None:
    """Raises AssertionError naming the arrays that have no gradient in the layers: a pipeline might do anything to them.

    `unused` has parts of the names of parameters that need none.
    """
    names = [name for name in self.without_gradient if not any(part in name for part in unused)]
    if names:
      raise AssertionError(
          f"The gradient of {', '.join(names)} is 0 in the layers themselves, so that nothing is compared. Make outputs "
          "or sown values depend on it. If the layers do not use it on purpose, name it in `unused`."
      )

  @property
  def worst(self) -> tuple[str, float]:
    """The array with the largest error."""
    return self.errors[0]

  def check(self, bound: float, unused: Iterable[str] = ()) -> None:
    """Raises AssertionError naming every array whose error is above the bound, worst first (NaN counts as above).

    Before that it raises what `check_gradients(unused)` does.
    """
    self.check_gradients(unused)
    if bad := [f"  {name}: {error:.3e}" for name, error in self.errors if not error <= bound]:
      count = f"{len(bad)} of {len(self.errors)} arrays"
      raise AssertionError("\n".join([f"Relative error above {bound:.1e} in {count}:", *bad]))


@contextlib.contextmanager
def _sowing_without_capture() -> Iterator[None]:
  """Ignores flax's warning (0.12.8) about `sow` outside `nnx.capture`; may go when MaxText captures: 0.2.5 does not."""
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r"Using 'Module\.sow\(\)' outside", category=DeprecationWarning)
    yield


@_sowing_without_capture()
def assert_pipeline_parity(
    layer_class: type | None,
    config: Any,
    *,
    implementations: str | type | Iterable[str | type] | None = None,
    mesh: Mesh | None = None,
    reference_mesh: Mesh | None = None,
    batch: Batch | None = None,
    deterministic: bool = True,
    tolerance: float | None = None,
    unused: Iterable[str] = (),
    seed: int = 0,
) -> dict[str, Parity]:
  """Asserts that pipelines compute the same outputs and gradients as their layers called one after another.

  Compares outputs, the gradient of every parameter and of the inputs, and the values that layers sow. Gradients of sown
  values are part of the compared gradients: the differentiated function is ⟨cotangent, outputs⟩ plus the sown values,
  each with a random weight. The reference is a Python loop over microbatches and layers on one device, `testing.loop`.

  Args:
    layer_class: the decoder layer, an NNX module class with the interface of MaxText's. It is made as
      `layer_class(config=…, mesh=…, model_mode=…, quant=…, rngs=…)` and called with (inputs, segment_ids, positions,
      deterministic, model_mode). It returns activations, or a tuple that begins with them. None stands for the layers of
      the config's `decoder_block`, each as MaxText makes it for its index without a pipeline.
    config: MaxText's config, with the sizes of the pipeline.
    implementations: values of `pipeline_impl` or pipeline classes; by default the config's own.
    mesh: the pipeline's mesh; by default the config's, of the largest number of devices that the stages divide.
    reference_mesh: the loop's mesh; by default one device, so that the comparison also checks sharding. XLA's sharding
      itself may be wrong: on a mesh of more devices than divide the batch, XLA multiplies the gradient of a depthwise
      convolution's kernel (jax 0.11.2, CPU). Layers whose results depend on sharding need the pipeline's mesh. MaxText's
      sparse experts do, as they have a load-balance loss for each part of the tokens.
    batch: by default random activations, and packed sequences that differ by example.
    deterministic: False for dropout; the loop then uses the same random keys.
    tolerance: bound of relative errors; by default the result of the function `tolerance`.
    unused: parts of the names of parameters that the layers have and do not use. All others must have a gradient.
    seed: seed of weights, dropout and the batch.

  Returns:
    The errors, by name of the implementation.

  Raises:
    AssertionError: lists the arrays whose error is above the tolerance, the worst first; or those without a gradient.
  """
  mesh = mesh_of(config) if mesh is None else mesh
  batch = Batch.random(config, seed) if batch is None else batch
  bound, unused = _tolerance(config) if tolerance is None else tolerance, tuple(unused)
  if implementations is None:
    implementations = config.pipeline_impl
  if isinstance(implementations, (str, type)):
    implementations = [implementations]
  maxtext_pp_ext.install()
  expected, found = None, {}
  for implementation in implementations:
    name = implementation if isinstance(implementation, str) else implementation.__name__
    pipeline = decoder_layers.pipeline(config, mesh, implementation, layer_class, seed=seed)
    if expected is None:  # one for all: with the same seed they have the same weights, and the same dropout
      expected = reference(pipeline, layer_class, config, batch, mesh=reference_mesh, deterministic=deterministic)
    found[name] = compare(pipeline, expected, batch, mesh, config.logical_axis_rules, deterministic=deterministic)
    found[name].check_gradients(unused)
    try:
      found[name].check(bound, unused)
    except AssertionError as error:
      moves, by = sensitivity(pipeline, expected, batch, config.dtype).worst
      raise AssertionError(
          f"pipeline_impl={name}: {error}\nThe layers' own results change by up to {by:.1e} ({moves}) if each weight"
          " changes by one unit in the last place: smaller errors may be rounding."
      ) from None
  return found


def tolerance(config: DerivedKeys) -> float:
  """The largest relative error of a pipeline that rounding explains.

  Each of L layers rounds in forward and backward: 2·L times. Matrix products add up K numbers in float32, with unit
  roundoff v = 2⁻²⁴, so sums in another order differ by √K·v. Elementary functions such as exp are approximated to a few
  units, 8·v, and differently in another loop. Results are rounded to the dtype of activations, with unit roundoff u.
  Independent errors add up to √(2·L) times one of them. A factor of 4 covers several errors per layer:
  4·√(2·L)·(u + (√K + 8)·v). Gradients that are summed over M microbatches in bfloat16 (w = 2⁻⁹) round another M times,
  which adds √M·w; the loop sums gradients of bfloat16 weights in this way.

  A wrong weight, microbatch or reduction gives an error of the order of 1.
  """
  unit = lambda dtype: float(jnp.finfo(dtype).eps) / 2
  inner = max(config.emb_dim, config.mlp_dim, config.moe_mlp_dim, config.num_query_heads * config.head_dim)
  bound = 4 * math.sqrt(2 * sound_layers(config)) * (unit(config.dtype) + (math.sqrt(inner) + 8) * unit(jnp.float32))
  if "bfloat16" in (getattr(config, "pipeline_grad_accum_dtype", "auto"), jnp.dtype(config.weight_dtype).name):
    bound += math.sqrt(config.num_pipeline_microbatches) * unit(jnp.bfloat16)
  return bound


_tolerance = tolerance


def mesh_of(config: Any) -> Mesh:
  """The config's mesh, of the largest number of devices that the stages divide."""
  stages = sound_stages(config)
  return maxtext_utils.get_mesh_from_config(config, jax.devices()[: jax.device_count() // stages * stages])


def function_of(pipeline: nnx.Module, *, deterministic: bool = True) -> tuple[Function, PyTree]:
  """(a pipeline as a function of the parameters of its `layers`, these parameters)."""
  graphdef, *(params, rest) = nnx.split(pipeline, nnx.Param, ...)

  def run(of_layers, inputs, segment_ids, positions):
    module: Any = nnx.merge(graphdef, nnx.State({"layers": of_layers}), rest, copy=True)
    what_is_left = sown_beside(module.layers)
    outputs = module(inputs, segment_ids, positions, deterministic, "train")
    return outputs, by_path(nnx.state(module.layers, what_is_left))

  return run, params["layers"]


def reference(
    pipeline: nnx.Module,
    layer_class: type | None,
    config: Any,
    batch: Batch,
    *,
    mesh: Mesh | None = None,
    deterministic: bool = True,
) -> Callable:
  """The function that computes the expected results of a pipeline, for `compare`; arguments as there.

  The layers run on `mesh`, by default one device, with the pipeline's random streams.
  """
  if mesh is None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes)), config.mesh_axes)
  everywhere = NamedSharding(mesh, P())
  layers = decoder_layers.without_pipeline(config, mesh, layer_class)
  run = with_gradients(Loop(pipeline, layers, config, everywhere, deterministic=deterministic), batch)

  def on_mesh(params, inputs):
    with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
      return run(*jax.device_put((params, inputs), everywhere))

  return on_mesh


def compare(
    pipeline: nnx.Module, expected: Callable, batch: Batch, mesh: Mesh, rules: Any, *, deterministic: bool = True
) -> Parity:
  """Runs a pipeline and its reference forward and backward, and compares outputs, every gradient, and sown values.

  `expected` is the result of `reference`, `rules` are logical axis rules. Other arguments as in `assert_pipeline_parity`.
  """
  pipelined, params = function_of(pipeline, deterministic=deterministic)
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    results = with_gradients(pipelined, batch)(params, batch.inputs)
  return _difference(results, expected(params, batch.inputs))


def sensitivity(pipeline: nnx.Module, expected: Callable, batch: Batch, dtype: Any) -> Parity:
  """How far the layers' own results change if each weight changes by one unit in the last place, up or down.

  Every step of a computation rounds its values as much, so two correct computations do not agree much better. Some models
  magnify rounding far beyond `tolerance`: 36 layers of Gemma 3 do so by a factor of 2000.

  `dtype`, that of activations, defines the last place. Other arguments as in `compare`.
  """
  _, params = function_of(pipeline)
  leaves, tree = jax.tree.flatten(params)
  step = float(jnp.finfo(dtype).eps)
  keys = jax.random.split(jax.random.key(0), len(leaves))

  def move(w: jax.Array, key: jax.Array) -> jax.Array:
    if not jnp.issubdtype(w.dtype, jnp.floating):
      return w
    return (w * (1 + step * jax.random.rademacher(key, w.shape, jnp.float32))).astype(w.dtype)

  moved = list(map(move, leaves, keys))
  return _difference(expected(jax.tree.unflatten(tree, moved), batch.inputs), expected(params, batch.inputs))


def _stacked(sown: np.ndarray, like: np.ndarray) -> np.ndarray:
  """A pipeline's sown values [R, S, …] in the shape of a loop's, [layer, …]."""
  if sown.dtype == bool and like.size == like.shape[0]:  # a pipeline has a flag from each device
    return sown.reshape(like.shape[0], -1).any(axis=1).reshape(like.shape)
  return sown.reshape(like.shape) if sown.size == like.size else sown


def _difference(found: tuple, expected: tuple) -> Parity:
  (outputs, sown), gradients = found
  (expected_outputs, expected_sown), expected_gradients = expected
  if sown.keys() != expected_sown.keys():
    raise AssertionError(f"The pipeline sows {sorted(sown)}, its layers sow {sorted(expected_sown)}.")
  actual, wanted = _by_path(gradients), _by_path(expected_gradients)
  mean = math.sqrt(sum(np.sum(g**2) for g in wanted.values()) / sum(g.size for g in wanted.values()))
  least = {name: LEAST_GRADIENT * mean * math.sqrt(g.size) for name, g in wanted.items()}
  outputs, sown, expected_outputs, expected_sown = jax.device_get((outputs, sown, expected_outputs, expected_sown))
  if not np.any(expected_outputs):
    raise AssertionError("The outputs of the layers themselves are 0, so that nothing is compared.")
  return Parity(
      outputs=relative_error(outputs, expected_outputs),
      gradients={name: relative_error(actual[name], wanted[name], least[name]) for name in wanted},
      sown={name: relative_error(_stacked(sown[name], value), value) for name, value in expected_sown.items()},
      without_gradient=tuple(name for name, g in wanted.items() if not np.any(g)),
  )


def with_gradients(fn: Function, batch: Batch) -> Callable:
  """(params, inputs) -> ((outputs, sown), gradients with respect to params and inputs) of a comparison's loss, compiled.

  Outside of a compiled program, each sum of two sharded gradients would be a program of its own. Many of them at once,
  with collectives, can wait for each other for good on virtual CPU devices (jax 0.11.2).
  """

  def loss(params, inputs):
    outputs, sown = fn(params, inputs, batch.segment_ids, batch.positions)
    total = jnp.vdot(outputs.astype(jnp.float32), batch.cotangent.astype(jnp.float32))
    for index, (_, value) in enumerate(sorted(sown.items())):
      if jnp.issubdtype(value.dtype, jnp.floating):
        weights = jax.random.normal(jax.random.key(index), (value.size,))
        total += math.sqrt(outputs.size) * jnp.vdot(weights, value.astype(jnp.float32).reshape(-1))
    return total, (outputs, sown)

  def run(params, inputs):
    (_, results), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, inputs)
    return results, gradients

  return jax.jit(run)


def _by_path(gradients: tuple[PyTree, jax.Array]) -> dict[str, np.ndarray]:
  params, inputs = gradients
  return {path: np.asarray(g, np.float32) for path, g in (by_path(params) | {"inputs": inputs}).items()}


def relative_error(actual: jax.Array | np.ndarray, expected: jax.Array | np.ndarray, least: float = 0.0) -> float:
  """‖actual − expected‖ / max(‖expected‖, least) in float32; ‖actual‖ if both are zero."""
  actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
  if actual.shape != expected.shape:
    raise AssertionError(f"Shape {actual.shape} instead of {expected.shape}.")
  norm = max(float(np.linalg.norm(expected)), least)
  difference = float(np.linalg.norm(actual - expected))
  return difference / norm if norm else difference
