# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The base class of every circular `pipeline_impl`; subclasses name a gather policy."""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, ClassVar

from flax import nnx
import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.config.derived import keys_of_window
from maxtext_pp_ext.config.keys import remat_tensors
from maxtext_pp_ext.config.view import plain, with_values
from maxtext_pp_ext.engine import Checkpoints, GatherPolicy
from maxtext_pp_ext.engine.programs.checkpoints import recomputed_once
from maxtext_pp_ext.host.models.loss import place
from maxtext_pp_ext.pipelines.execution import Execution
from maxtext_pp_ext.pipelines.head import current
from maxtext_pp_ext.pipelines.stacking import OfPipeline, OfScan
from maxtext_pp_ext.pipelines.stages import Differentiated
from maxtext_pp_ext.schedule import CircularSchedule, Schedule
from maxtext_pp_ext.sharding import is_explicit, logical_axes

_INPUTS = ("iteration_input", "decoder_layer_input")  # of stages, and of their layers


class CircularPipelineBase(nnx.Module):
  """Circular pipeline over a stack of decoder layers, called like one decoder layer.

  Holds the layers stacked as `[repeat, stage, …]` (`[stage, …]` with one repeat) under `layers`, with the tree paths
  and logical axis names of MaxText's own pipeline, so that checkpoints are interchangeable.
  """

  #: when weights are gathered, and how long they are kept; named by the subclass
  gather_policy: ClassVar[GatherPolicy]
  schedule_class: ClassVar[type[Schedule]] = CircularSchedule  #: which stage works on which item at which iteration
  #: tells `host.replacements.stage_modules` to build layers for automatic sharding, also in a model with explicit
  #: sharding: this package and the compiler choose the layouts within the pipeline
  shards_automatically: ClassVar[bool] = True
  bubble_fill: ClassVar[float | None] = None  #: for tests: what replaces a stage's inputs in a bubble; see `Ring`

  def __init__(
      self,
      config: Any,
      stage_factory: Callable[[nnx.Rngs], nnx.Module],
      mesh: Mesh,
      remat_policy: Any = None,
      *,
      rngs: nnx.Rngs,
  ):
    """Builds the stages.

    Args:
      config: MaxText's config.
      stage_factory: builds one stage's module from random streams.
      mesh: device mesh with a `stage` axis.
      remat_policy: the host's rematerialisation policy for decoder layers.
      rngs: random streams; each stage of each repeat gets its own keys, split as the host splits them.

    Raises:
      ValueError: if stages, microbatches and repeats do not fit together.
      NotImplementedError: if the stage's layers are built for explicit sharding.
    """
    self.config = config
    self.mesh = mesh
    self.remat_policy = remat_policy
    self.schedule = self.schedule_class.of_config(config)
    self.layers = self._stack(stage_factory, rngs)
    configs = [getattr(node, "config", None) for _, node in nnx.iter_graph(self.layers) if isinstance(node, nnx.Module)]
    if any(plain(getattr(each, "shard_mode", None)) == "explicit" for each in configs):
      raise NotImplementedError(
          "shard_mode=explicit: the layers of a stage are built for explicit sharding. They would name layouts where the"
          " pipeline shards automatically. Build them with a config that has shard_mode=auto, or set shard_mode=auto."
      )

  def _stack(self, stage_factory: Callable, rngs: nnx.Rngs) -> nnx.Module:
    """Stacks the stages along `circular_repeats` and `layers`, as the host does."""
    schedule = self.schedule
    create: Callable[[nnx.Rngs], Any] = lambda r: nnx.split(stage_factory(r), nnx.Param, ...)
    shape: tuple[int, ...] = ()
    sizes = (schedule.stages,) if schedule.repeats == 1 else (schedule.repeats, schedule.stages)
    for size, name in zip(reversed(sizes), ("layers", "circular_repeats"), strict=False):
      on_stages: dict[str, Any] = {"spmd_axis_name": "stage"} if name == "layers" and not is_explicit(self.mesh) else {}
      create = nnx.vmap(
          create, in_axes=0, out_axes=(None, 0, 0), transform_metadata={nnx.PARTITION_NAME: name}, **on_stages
      )
      shape = (size, *shape)
    graphdef, params, rest = create(_split_keys(rngs, shape))
    return nnx.merge(graphdef, _with_one_annotation(params), rest)

  def get_weight_sharding(self, *init_args: Any) -> Any:
    """Logical PartitionSpecs of the parameters, in the tree of `layers`' parameter state (the host's contract)."""
    del init_args
    params = nnx.state(self.layers, Differentiated)
    return jax.tree.map(lambda v: P(*(logical_axes(v) or ())), params, is_leaf=lambda v: isinstance(v, nnx.Variable))

  def __call__(
      self,
      inputs: jax.Array,
      segment_ids: jax.Array | None,
      positions: jax.Array | None,
      deterministic: bool,
      model_mode: str = "train",
      logical_partition_spec: Any = None,
  ) -> jax.Array:
    """Runs the decoder layers of the pipeline on a batch.

    Args:
      inputs: activations [batch, sequence, embed].
      segment_ids: [batch, sequence] int, or None.
      positions: [batch, sequence] int, or None.
      deterministic: whether dropout is off.
      model_mode: must be `train`; a pipeline keeps no decoding state.
      logical_partition_spec: ignored; layouts come from the parameters' own metadata.

    Returns:
      Activations [batch, sequence, embed].

    Raises:
      NotImplementedError: for another model mode, ids of another rank, or state that a pipeline cannot carry.
      TypeError: if `deterministic` is no Python bool.
      ValueError: if the batch is not divisible by the microbatches.
    """
    del logical_partition_spec
    if model_mode != "train":
      raise NotImplementedError(f"Pipelines run training and evaluation only, got model_mode={model_mode!r}.")
    if not isinstance(deterministic, bool):
      raise TypeError(f"deterministic must be a Python bool, got {type(deterministic).__name__}.")
    run = self.execution(deterministic=deterministic, model_mode=model_mode)
    head = current.get()
    return run(self.layers, inputs, segment_ids, positions, *([] if head is None else [head]))

  def execution(self, *, deterministic: bool, model_mode: str) -> Execution:
    """How the pipeline runs its layers, whose call has these arguments."""
    call = lambda module, x, segment_ids, positions: module(x, segment_ids, positions, deterministic, model_mode)
    return Execution(
        config=self.config,
        mesh=self.mesh,
        schedule=self.schedule,
        gather_policy=self.gather_policy,
        stacking=OfPipeline(self.schedule.repeats),
        call=call,
        checkpoints=self._checkpoints(),
        bubble_fill=self.bubble_fill,
    )

  def _checkpoints(self) -> Checkpoints:
    """Wrap one iteration's stages as the host wraps its iterations; they keep everything if the config switches that off.

    The remat policy is the host's. Unless that is custom, the stages' inputs are also saved.
    """
    if not self.config.set_remat_policy_on_pipeline_iterations:
      return ((0, None),)
    own, policy = self.remat_policy, self.remat_policy
    if self.config.remat_policy != "custom":
      inputs = jax.checkpoint_policies.save_only_these_names(*_INPUTS)
      # The host uses `jax.checkpoint_policies.save_from_both_policies`, which refuses policies that offload.
      policy = inputs if own is None else lambda *args, **params: inputs(*args, **params) or own(*args, **params)
    of_layers = self.config.set_remat_policy_on_layers_per_stage and self.config.remat_policy != "none"
    return checkpoints(self.config, policy, self.schedule.iterations, layer_by_layer=of_layers)

  @classmethod
  def run_scanned(
      cls,
      layers: nnx.Module,
      inputs: jax.Array,
      segment_ids: jax.Array | None,
      positions: jax.Array | None,
      *,
      config: Any,
      mesh: Mesh,
      length: int,
      call: Callable,
      policy: Any,
      recomputes: bool,
  ) -> jax.Array:
    """Runs layers that MaxText scans over, without a pipeline: each of them is a repeat of the only stage.

    Stores in the layers what they sow, as MaxText's scan does, and their random counters. The arrays, and what is raised
    about them, are as in `__call__`.

    Args:
      layers: the stacked layers, or blocks of layers: parameters along `param_scan_axis`, other state along the first
        axis.
      config: MaxText's config. A batch is divided into `num_pipeline_microbatches`; −1 stands for 1.
      mesh: device mesh.
      length: the number of stacked layers.
      call: the call of a layer, (layer, x, segment_ids, positions) -> output.
      policy: the host's remat policy for a layer.
      recomputes: whether the policy applies to the call; False if layers within it apply it themselves.
    """
    config = with_values(config, keys_of_window(config, length))
    schedule = cls.schedule_class.of_config(config)
    if config.pipeline_remat_iterations and not recomputes:
      raise ValueError(
          f"pipeline_remat_iterations={config.pipeline_remat_iterations}: layers of decoder_block="
          f"{plain(config.decoder_block)} apply the remat policy themselves, to a part of what they compute. Leave "
          "pipeline_remat_iterations out."
      )
    run = Execution(
        config=config,
        mesh=mesh,
        schedule=schedule,
        gather_policy=cls.gather_policy,
        stacking=OfScan(length, config.param_scan_axis),
        call=call,
        checkpoints=checkpoints(config, policy, schedule.iterations) if recomputes else ((0, None),),
    )
    return run(layers, inputs, segment_ids, positions)


def checkpoints(config: Any, policy: Any, iterations: int, *, layer_by_layer: bool = False) -> Checkpoints:
  """Wrappers of stages in `jax.checkpoint` with a remat policy; the first iterations keep less, if the config says so.

  `layer_by_layer` is as in `recomputed_once`. Raises ValueError if `pipeline_remat_tensors` names what the policy does
  not keep.
  """
  # Unrolled, forward and backward are in one computation, where the compiler would merge what backward recomputes.
  prevent_cse = not config.scan_pipeline_iterations
  once = functools.partial(recomputed_once, layer_by_layer=layer_by_layer)
  wrap = lambda policy: lambda fn: jax.checkpoint(once(fn), policy=policy, prevent_cse=prevent_cse)
  # No policy keeps inputs only: that of a step which is run again without dropping tokens, in MaxText's own words "full".
  first = min(config.pipeline_remat_iterations, iterations) if policy is not None else 0
  less = [(0, wrap(_without(policy, _kept_tensors(config, policy))))] if first else []
  return (*less, *([(first, wrap(policy))] if first < iterations else []))


def _kept_tensors(config: Any, policy: Any) -> Sequence[str]:
  """The tensors in `pipeline_remat_tensors`, which the policy keeps."""
  names = remat_tensors(config)
  for name in names:
    if place(policy, name) is None:
      raise ValueError(
          f"pipeline_remat_tensors={config.pipeline_remat_tensors}: remat_policy={config.remat_policy} keeps no tensor "
          f"{name!r}. Leave it out."
      )
  return names


def _without(policy: Any, names: Sequence[str]) -> Any:
  """A remat policy that recomputes these tensors, or with no names all but the layers' inputs."""

  def keeps(primitive, *args, **params):
    name = params.get("name") if primitive.name == "name" else None
    recomputed = name in names if names else name not in _INPUTS
    return not recomputed and policy(primitive, *args, **params)

  return keeps


def _with_one_annotation(params: nnx.State) -> nnx.State:
  """The parameters without the older annotation of their axes, `sharding_names`.

  Blocks that scan over layers themselves (Qwen3-Next's) have both `sharding_names` and `out_sharding`, and `nnx.vmap`
  adds the stages' name to `out_sharding` only. Flax lays optimizer moments out by `sharding_names`, so they would be
  sharded over the wrong axes (MaxText 0.2.5, flax 0.12.12; MaxText's own pipeline fails, too).
  """

  def one(variable):
    metadata = variable.get_metadata()
    if "sharding_names" in metadata and "out_sharding" in metadata:
      variable.set_metadata({key: value for key, value in metadata.items() if key != "sharding_names"})
    return variable

  return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _split_keys(rngs: nnx.Rngs, shape: tuple[int, ...]) -> nnx.Rngs:
  """Random streams with one key per stage of each repeat, split from each stream's key as the host splits them."""
  streams = {}
  for path, key in jax.tree_util.tree_leaves_with_path(nnx.state(rngs, nnx.RngState)):
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
      key = jax.random.key(key)  # a stream's counter; the host also turns it into a key
    streams[getattr(path[0], "key", str(path[0]))] = jax.random.split(key, math.prod(shape)).reshape(shape + key.shape)
  return nnx.Rngs(**streams)
