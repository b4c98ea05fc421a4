# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs stacked layers on a batch with the engine: maps config and modules to it."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from flax import nnx
from flax.linen import spmd
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext import sharding
from maxtext_pp_ext.config.derived import dispatches_beside_compute, gathers_on_sparsecores
from maxtext_pp_ext.engine import Checkpoints, Engine, GatherPolicy, MAX, Ring, SUM, WeightLayout
from maxtext_pp_ext.engine.programs.precision import cast_on_first_use
from maxtext_pp_ext.engine.traced import AuxAt
from maxtext_pp_ext.engine.transfers.torus import steps_of
from maxtext_pp_ext.host.models.axes import ACTIVATION_AXES, data_mesh_axes, STAGE_AXES
from maxtext_pp_ext.host.models.sown import SOWN, updates_from_counts
from maxtext_pp_ext.pipelines.head import Head
from maxtext_pp_ext.pipelines.intermediates import put_before
from maxtext_pp_ext.pipelines.stacking import Stacking
from maxtext_pp_ext.pipelines.stages import StageModule
from maxtext_pp_ext.schedule import Schedule
from maxtext_pp_ext.sharding.resolve import mesh_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
  """How stacked layers run on a batch; `pipelines/base.py` makes one for each call."""

  config: Any  # MaxText's
  mesh: Mesh
  schedule: Schedule  # which stage works on which item at which iteration
  gather_policy: GatherPolicy  # when weights are gathered, and how long they are kept
  stacking: Stacking  # how the layers' arrays are stacked
  call: Callable  # the call of one repeat's layers on one stage, (module, x, segment_ids, positions) -> output
  checkpoints: Checkpoints  # decides which residuals forward keeps for backward
  bubble_fill: float | None = None  # for tests: what replaces a stage's inputs in a bubble; see `Ring`

  def __call__(
      self,
      layers: nnx.Module,
      inputs: jax.Array,
      segment_ids: jax.Array | None,
      positions: jax.Array | None,
      head: Head | None = None,
  ) -> jax.Array:
    """Runs the layers, and stores in them what they sow, as well as their random counters.

    The arrays, and what is raised about them, are as in `CircularPipelineBase.__call__`. `head` gets the stages' copies.
    """
    outside = [] if head is None else [head.outside]
    earlier, appends = nnx.pop(layers, SOWN), {}
    stage = StageModule.of(layers, self.schedule, self.stacking, self.call)

    def run(weights, rest, inputs, segment_ids, positions):
      run_stage = dataclasses.replace(stage, weights=weights, rest=rest)
      microbatched = self._split_batch(self._apart_from_lookup(inputs))
      aux = run_stage.aux(self._ids(segment_ids, "segment_ids"), self._ids(positions, "positions"))
      if earlier:
        appends.update(run_stage.appends(earlier, aux, microbatched[0]))
      outputs, sown, copies = self._engine(run_stage, aux, microbatched).run(weights, aux, microbatched, outside)
      if head is not None:
        (head.copies,) = copies
      return self._join_batch(outputs), *run_stage.per_layer(sown)

    counters = jax.tree.leaves(nnx.state(layers, nnx.RngCount))
    out_specs = None
    if sharding.is_explicit(self.mesh):
      out_specs = (sharding.spec_of(inputs), P(), [sharding.spec_of(c) for c in counters])
    run = sharding.run_automatic(run, self.mesh, out_specs)
    outputs, intermediates, counts = run(stage.weights, stage.rest, inputs, segment_ids, positions)
    stage.store_back(layers, intermediates, counts)
    if stage.counts_tokens:
      updates_from_counts(layers, self.config, self.stacking.axis_of_parameters(self.config))
    if earlier:
      put_before(layers, earlier, appends)
    return outputs

  def _apart_from_lookup(self, inputs: jax.Array) -> jax.Array:
    """Gives a batch [batch, sequence, embed] its tokens' layout, if mesh axes would divide microbatches but no tokens.

    The layout of microbatches would otherwise reach the lookup of the tokens' embeddings. XLA's verifier refuses what XLA
    (jax 0.11.2) makes of a lookup whose results are divided over more devices than its tokens: "Slice dim size … greater
    than dynamic slice dimension". MaxText's rules for evaluations (`custom_mesh_and_rule_for_eval`) are such a case.
    """
    mesh = sharding.automatic(self.mesh)
    of_tokens = tuple(sharding.resolve(self.config.input_data_sharding_logical_axes, mesh, self._rules))[:2]
    entering = [{*mesh_axes(entry)} for entry in sharding.resolve(ACTIVATION_AXES[:2], mesh, self._rules)]
    if self.mesh.shape.get("stage", 1) > 1:
      entering[0].add("stage")
    if all(axes.issubset(mesh_axes(entry)) for axes, entry in zip(entering, of_tokens, strict=False)):
      return inputs
    return sharding.constrain(inputs, P(*of_tokens, *(P.UNCONSTRAINED,) * (inputs.ndim - len(of_tokens))), mesh)

  def _split_batch(self, x: jax.Array, name: str = "inputs") -> jax.Array:
    """[batch, …] -> [M, batch / M, …]."""
    microbatches = self.schedule.microbatches
    if x.shape[0] % microbatches:
      raise ValueError(
          f"The batch of {name} ({x.shape[0]}) must be divisible by num_pipeline_microbatches ({microbatches})."
      )
    parts = self._parts(x.shape[0])
    by_part = x.reshape(parts, microbatches, -1, *x.shape[1:])
    return jnp.moveaxis(by_part, 1, 0).reshape(microbatches, -1, *x.shape[1:])

  def _join_batch(self, x: jax.Array) -> jax.Array:
    """[M, batch / M, …] -> [batch, …], the inverse of `_split_batch`."""
    microbatches, parts = x.shape[0], self._parts(x.shape[0] * x.shape[1])
    by_part = x.reshape(microbatches, parts, -1, *x.shape[2:])
    return jnp.moveaxis(by_part, 0, 1).reshape(-1, *x.shape[2:])

  def _parts(self, rows: int) -> int:
    """The number of parts of the batch, each of which gives equally many rows to every microbatch.

    In a pipeline this is 1: all rows move to the first stage. Without one, each device computes on rows that it has.
    """
    if self.schedule.stages > 1:
      return 1
    mesh = sharding.automatic(self.mesh)
    parts = _devices(sharding.resolve(ACTIVATION_AXES, mesh, self._rules)[0], mesh)
    return parts if rows % (parts * self.schedule.microbatches) == 0 else 1

  def _ids(self, x: jax.Array | None, name: str) -> jax.Array | None:
    """[batch, sequence] -> [M, microbatch, sequence], laid out so that every stage has the ids of every microbatch."""
    if x is None:
      return None
    if x.ndim != 2:
      raise NotImplementedError(f"A pipeline takes {name} of the shape [batch, sequence], but got {list(x.shape)}.")
    mesh = sharding.automatic(self.mesh)
    rows, tokens = sharding.resolve(ACTIVATION_AXES[:2], mesh, self._rules)
    if self.schedule.stages > 1:
      # From devices' rows to those of microbatches XLA has no direct way. It would gather all, with a warning.
      x = sharding.constrain(x, P(None, tokens), mesh)
    return sharding.constrain(self._split_batch(x, name), P(None, rows, tokens), mesh)

  def _aux_at(self, stage: StageModule) -> AuxAt:
    """`stage.aux_at`, whose ids [S, microbatch, sequence] keep the layout of all microbatches' ids.

    Layers want rows that their devices cannot share equally on all of them. XLA (jax 0.11.2) ends the process if that
    layout reaches the lookup of a microbatch, whose operand is on fewer devices: "grouped_sharding.device_groups".
    """
    mesh = sharding.automatic(self.mesh)
    of_rows = sharding.resolve(ACTIVATION_AXES[:2], mesh, self._rules)
    spec = P("stage" if mesh.shape.get("stage", 1) > 1 else None, *of_rows)

    def laid_out(ids: jax.Array | None) -> jax.Array | None:
      if ids is None or all(ids.shape[1 + at] % _devices(entry, mesh) == 0 for at, entry in enumerate(of_rows)):
        return ids
      return sharding.constrain(ids, spec, mesh)

    def aux_at(aux: Any, t: jax.Array | int) -> Any:
      found = stage.aux_at(aux, t)
      return found | {name: laid_out(found[name]) for name in ("segment_ids", "positions")}

    return aux_at

  @property
  def _rules(self) -> Any:
    return spmd.get_logical_axis_rules() or self.config.logical_axis_rules

  def _engine(self, stage: StageModule, aux: Any, inputs: jax.Array) -> Engine:
    mesh = sharding.automatic(self.mesh)
    activation_spec = sharding.resolve(ACTIVATION_AXES, mesh, self._rules)
    ring = Ring(
        schedule=self.schedule,
        mesh=mesh,
        activation_spec=activation_spec,
        bubble_fill=self.bubble_fill,
    )
    layouts = self._layouts(stage, aux, inputs, [a for _, axes in ring.batch_axes(inputs) for a in axes])
    return Engine(
        schedule=self.schedule,
        ring=ring,
        gather_policy=self.gather_policy,
        layouts=layouts,
        stages=stage.over_stages("stage" if "stage" in mesh.axis_names else None),
        aux_at=self._aux_at(stage),
        checkpoints=self.checkpoints,
        row_groups=self.config.batch_split_factor if self.config.use_batch_split_schedule else 1,
        # Without the SparseCores only transfers between two devices overlap with compute, and XLA hides these better by
        # itself: Mixtral's pipeline takes 2.28 s, and 2.32 with its transfers beside experts (`python -m
        # benchmarks.compiler_figures --shape mixtral-8x7b-dropless --flags ENABLE_ASYNC_RAGGED_ALL_TO_ALL`).
        transfers_beside_experts=dispatches_beside_compute(self.config) and gathers_on_sparsecores(self.config),
        loop_iterations=self.config.scan_pipeline_iterations,
        # As in the host, either key suffices to loop over repeats instead of unrolling them.
        loop_repeats=self.config.scan_pipeline_iterations or self.config.scan_pipeline_repeats,
    )

  def _layouts(self, stage: StageModule, aux: Any, inputs: jax.Array, batch_axes: list[str]) -> list[WeightLayout]:
    rules = self._rules
    data_axes = data_mesh_axes(self.mesh, rules)
    computes_in = self._compute_dtypes(stage, aux, inputs)
    accumulate_in = self.config.pipeline_grad_accum_dtype
    steps = steps_of(self.mesh) if gathers_on_sparsecores(self.config) else ()
    layouts = []
    weights = zip(stage.weight_axes, stage.weights, stage.overwritten, computes_in, strict=True)
    for axes, weight, overwritten, compute_dtype in weights:
      # A weight without annotation is replicated over all axes but its stages. As in a PartitionSpec, names may be
      # missing at the end.
      axes = axes or STAGE_AXES
      axes = (*axes, *(None,) * (weight.ndim - len(axes)))
      # Rules may put names of a layer's own axes on the mesh axis of stages, too.
      within = sharding.gathered_spec(P(*sharding.resolve(axes, self.mesh, rules)[2:]), None, ("stage",))
      stored = P("stage" if self.mesh.shape.get("stage", 1) > 1 else None, *within)
      stored = sharding.divisible_spec(stored, weight.shape[1:], self.mesh)
      gathered = sharding.gathered_spec(stored, axes[1:], data_axes)
      stored = sharding.gathered_last(stored, gathered)
      kept = {a for entry in gathered for a in mesh_axes(entry)}
      # If a weight is gathered at each use, its gradient is completed there. A next value (fp8 scales) is no sum, either.
      partial = self.gather_policy.keeps_gathered and not overwritten
      # The gradient of one microbatch is no sum: it is in the dtype of the weight that the layer computes with.
      in_auto = weight.dtype if overwritten or self.schedule.microbatches > 1 else compute_dtype
      layouts.append(
          WeightLayout(
              sharded=stored,
              gathered=gathered,
              partial_axes=tuple(a for a in batch_axes if a not in kept) if partial else (),
              compute_dtype=compute_dtype,
              accumulation_dtype=in_auto if overwritten or accumulate_in == "auto" else jnp.dtype(accumulate_in),
              steps=steps,
              combine=MAX if overwritten else SUM,
          )
      )
    return layouts

  def _compute_dtypes(self, stage: StageModule, aux: Any, inputs: jax.Array) -> list[jnp.dtype]:
    """The dtype in which each weight is gathered, by `pipeline_gather_dtype`; overwritten state keeps its dtype."""
    choice, own = self.config.pipeline_gather_dtype, [w.dtype for w in stage.weights]
    if choice == "weight":
      return own
    if choice == "compute":
      casts = [jnp.dtype(self.config.dtype) if jnp.issubdtype(d, jnp.floating) else None for d in own]
    else:

      def stages(weights):
        x = jnp.broadcast_to(inputs[:1], (self.schedule.stages, *inputs.shape[1:]))
        return stage.over_stages(None)([w[0] for w in weights], stage.aux_at(aux, 0), x)

      casts = cast_on_first_use(stages, stage.weights)
    return [
        d if cast is None or overwritten else cast
        for d, cast, overwritten in zip(own, casts, stage.overwritten, strict=True)
    ]


def _devices(entry: Any, mesh: Mesh) -> int:
  """Over how many devices an entry of a PartitionSpec divides a dimension."""
  return math.prod(mesh.shape[axis] for axis in mesh_axes(entry))
