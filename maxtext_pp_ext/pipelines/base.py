# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The base class of every circular `pipeline_impl`; subclasses name a residency."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
from typing import Any, ClassVar

from flax import nnx
from flax.linen import spmd
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.engine import Engine, MAX, Residency, Ring, SUM, WeightLayout, Weights
from maxtext_pp_ext.engine.programs.precision import cast_on_first_use
from maxtext_pp_ext.host.models.axes import ACTIVATION_AXES, data_mesh_axes, STAGE_AXES
from maxtext_pp_ext.host.models.expert_bias import updates_from_counts
from maxtext_pp_ext.host.models.sown import SOWN
from maxtext_pp_ext.pipelines.intermediates import put_before
from maxtext_pp_ext.pipelines.stages import Differentiated, StageModule
from maxtext_pp_ext.schedule import CircularSchedule, Schedule
from maxtext_pp_ext.sharding import (
    automatic,
    constrain,
    divisible_spec,
    gathered_last,
    gathered_spec,
    is_explicit,
    logical_axes,
    resolve,
    run_automatic,
    spec_of,
)
from maxtext_pp_ext.sharding.resolve import mesh_axes


class CircularPipelineBase(nnx.Module):
  """Circular pipeline over a stack of decoder layers.

  Holds the layers stacked as `[repeat, stage, …]` (`[stage, …]` with one repeat) under `layers`, with the tree paths
  and logical axis names of MaxText's own pipeline, so that checkpoints are interchangeable. It is called like one decoder
  layer. The computation is in `engine`; this class maps config and modules to it.

  Attributes:
    residency: how long gathered weights are kept, named by the subclass.
    schedule_class: class of the schedule: which stage works on which item at which iteration.
    shards_automatically: tells `host.replacements.stage_modules` to build layers for automatic sharding, also in a model
      with explicit sharding: this package and the compiler choose the layouts within the pipeline.
    bubble_fill: the value of a stage's inputs in a bubble; see `Ring`.
    layers: the stacked stages.
  """

  residency: ClassVar[Residency]
  schedule_class: ClassVar[type[Schedule]] = CircularSchedule
  shards_automatically: ClassVar[bool] = True
  bubble_fill: ClassVar[float] = 0.0

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
    if any(_names_layouts(node) for _, node in nnx.iter_graph(self.layers)):
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
    earlier, appends = nnx.pop(self.layers, SOWN), {}
    stage = StageModule.of(self.layers, self.schedule, deterministic=deterministic, model_mode=model_mode)

    def run(weights, rest, inputs, segment_ids, positions):
      run_stage = dataclasses.replace(stage, weights=weights, rest=rest)
      microbatched = self._split_batch(inputs)
      aux = run_stage.aux(self._ids(segment_ids, "segment_ids"), self._ids(positions, "positions"))
      if earlier:
        appends.update(run_stage.appends(earlier, aux, microbatched[0]))
      outputs, sown = self._engine(run_stage, aux, microbatched)(weights, aux, microbatched)
      return outputs.reshape(inputs.shape), *run_stage.per_layer(sown)

    counters = jax.tree.leaves(nnx.state(self.layers, nnx.RngCount))
    out_specs = (spec_of(inputs), P(), [spec_of(c) for c in counters]) if is_explicit(self.mesh) else None
    run = run_automatic(run, self.mesh, out_specs)
    outputs, intermediates, counts = run(stage.weights, stage.rest, inputs, segment_ids, positions)
    stage.store_back(self.layers, intermediates, counts)
    updates_from_counts(self.layers, self.config)
    if earlier:
      put_before(self.layers, earlier, appends)
    return outputs

  def _split_batch(self, x: jax.Array, name: str = "inputs") -> jax.Array:
    """[batch, …] -> [M, batch / M, …]."""
    microbatches = self.schedule.microbatches
    if x.shape[0] % microbatches:
      raise ValueError(
          f"The batch of {name} ({x.shape[0]}) must be divisible by num_pipeline_microbatches ({microbatches})."
      )
    return x.reshape((microbatches, x.shape[0] // microbatches) + x.shape[1:])

  def _ids(self, x: jax.Array | None, name: str) -> jax.Array | None:
    """[batch, sequence] -> [M, microbatch, sequence], laid out so that every stage has the ids of every microbatch."""
    if x is None:
      return None
    if x.ndim != 2:
      raise NotImplementedError(f"A pipeline takes {name} of the shape [batch, sequence], but got {list(x.shape)}.")
    mesh = automatic(self.mesh)
    spec = resolve(ACTIVATION_AXES[:2], mesh, self._rules)
    return constrain(self._split_batch(x, name), P(None, *spec), mesh)

  @property
  def _rules(self) -> Any:
    return spmd.get_logical_axis_rules() or self.config.logical_axis_rules

  def _engine(self, stage: StageModule, aux: Any, inputs: jax.Array) -> Engine:
    rules, mesh = self._rules, automatic(self.mesh)
    ring = Ring(
        schedule=self.schedule,
        mesh=mesh,
        activation_spec=resolve(ACTIVATION_AXES, mesh, rules),
        bubble_fill=self.bubble_fill,
    )
    layouts = self._layouts(stage, aux, inputs, rules, [a for _, axes in ring.batch_axes(inputs) for a in axes])
    return Engine(
        schedule=self.schedule,
        ring=ring,
        weights=Weights(residency=self.residency, mesh=mesh, layouts=layouts, pieces=self.schedule.microbatches),
        stages=stage.over_stages("stage"),
        aux_at=stage.aux_at,
        checkpoint=self._checkpoint(),
        row_groups=self.config.batch_split_factor if self.config.use_batch_split_schedule else 1,
        loop_iterations=self.config.scan_pipeline_iterations,
        # As in the host, either key suffices to loop over repeats instead of unrolling them.
        loop_repeats=self.config.scan_pipeline_iterations or self.config.scan_pipeline_repeats,
    )

  def _checkpoint(self) -> Callable | None:
    """Wraps one iteration's stages as the host wraps its iterations; None if the config switches that off."""
    if not self.config.set_remat_policy_on_pipeline_iterations:
      return None
    # Unrolled, forward and backward are in one computation, where the compiler would merge what backward recomputes.
    prevent_cse = not self.config.scan_pipeline_iterations
    return lambda fn: jax.checkpoint(fn, policy=self._policy(), prevent_cse=prevent_cse)

  def _policy(self) -> Any:
    """The remat policy of an iteration: the host's. Unless that is custom, the stages' inputs are also saved."""
    if self.config.remat_policy == "custom":
      return self.remat_policy
    inputs = jax.checkpoint_policies.save_only_these_names("iteration_input", "decoder_layer_input")
    if self.remat_policy is None:
      return inputs
    return _save_also(inputs, self.remat_policy)

  def _layouts(
      self, stage: StageModule, aux: Any, inputs: jax.Array, rules: Any, batch_axes: list[str]
  ) -> list[WeightLayout]:
    data_axes = data_mesh_axes(self.mesh, rules)
    computes_in = self._compute_dtypes(stage, aux, inputs)
    accumulate_in = self.config.pipeline_grad_accum_dtype
    layouts = []
    weights = zip(stage.weight_axes, stage.weights, stage.overwritten, computes_in, strict=True)
    for axes, weight, overwritten, compute_dtype in weights:
      # A weight without annotation is replicated over all axes but its stages. As in a PartitionSpec, names may be
      # missing at the end: MaxText's scans within a layer name their axis even if the weight's own axes have no names.
      axes = axes or STAGE_AXES
      axes = (*axes, *(None,) * (weight.ndim - len(axes)))
      # Such names are also out of order, and one more axis has the stages' name.
      within = gathered_spec(P(*resolve(axes, self.mesh, rules)[2:]), None, ("stage",))
      stored = P("stage" if self.mesh.shape.get("stage", 1) > 1 else None, *within)
      stored = divisible_spec(stored, weight.shape[1:], self.mesh)
      gathered = gathered_spec(stored, axes[1:], data_axes)
      stored = gathered_last(stored, gathered)
      kept = {a for entry in gathered for a in mesh_axes(entry)}
      # If a weight is gathered at each use, its gradient is completed at each use. A next value is no sum.
      partial = self.residency.has_slots and not overwritten
      layouts.append(
          WeightLayout(
              sharded=stored,
              gathered=gathered,
              partial_axes=tuple(a for a in batch_axes if a not in kept) if partial else (),
              compute_dtype=compute_dtype,
              accumulation_dtype=weight.dtype if overwritten or accumulate_in == "auto" else jnp.dtype(accumulate_in),
              combine=MAX if overwritten else SUM,
          )
      )
    return layouts

  def _compute_dtypes(self, stage: StageModule, aux: Any, inputs: jax.Array) -> list[jnp.dtype]:
    """The dtype in which each weight is gathered, by `pipeline_gather_dtype`; overwritten state keeps its dtype."""
    choice = self.config.pipeline_gather_dtype
    own = [w.dtype for w in stage.weights]
    if choice == "weight":
      return own
    if choice == "compute":
      is_cast = [jnp.issubdtype(d, jnp.floating) and not o for d, o in zip(own, stage.overwritten, strict=True)]
      return [jnp.dtype(self.config.dtype) if cast else d for d, cast in zip(own, is_cast, strict=True)]
    stages = lambda weights: stage.over_stages(None)(
        [w[0] for w in weights],
        stage.aux_at(aux, 0),
        jnp.broadcast_to(inputs[:1], (self.schedule.stages, *inputs.shape[1:])),
    )
    casts = cast_on_first_use(stages, stage.weights)
    return [
        d if cast is None or overwritten else cast
        for d, cast, overwritten in zip(own, casts, stage.overwritten, strict=True)
    ]


def _save_also(names: Callable, policy: Callable) -> Callable:
  """A policy that saves what the policy `names` saves, and otherwise follows `policy`.

  The host uses `jax.checkpoint_policies.save_from_both_policies` here, which refuses policies that offload.
  """
  return lambda *args, **params: names(*args, **params) or policy(*args, **params)


def _names_layouts(node: Any) -> bool:
  mode = getattr(getattr(node, "config", None), "shard_mode", None) if isinstance(node, nnx.Module) else None
  return plain(mode) == "explicit"


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
