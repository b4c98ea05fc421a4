# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The quantities that `plan.costs` needs of a config's model on one device, and what its runs cost. Compiles nothing.

A schedule is that of the run's pipeline or window, or `costs.OwnLoop` without one. `mesh` is that of the run.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
import re

import jax.numpy as jnp
from jax.sharding import AbstractMesh
import numpy as np

from maxtext_pp_ext import registry, sharding
from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain, remembering, with_values
from maxtext_pp_ext.hardware import chips, torus
from maxtext_pp_ext.host import topology
from maxtext_pp_ext.host.models import abstract_model, cycles, flops
from maxtext_pp_ext.host.models.axes import ACTIVATION_AXES, data_mesh_axes, LOGITS_AXES
from maxtext_pp_ext.host.rules import rows as rows_of_devices
from maxtext_pp_ext.plan import costs, estimate
from maxtext_pp_ext.plan.blocks import Again
from maxtext_pp_ext.plan.experts import experts, has_formulas, layers_with_experts
from maxtext_pp_ext.plan.layers import Kept, kept_by, Layers, layers_inside, layers_of
from maxtext_pp_ext.plan.operations import Kind
from maxtext_pp_ext.plan.weights import ADAMS, axes_of, Columns, Ends, shards, Weights
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy, Schedule
from maxtext_pp_ext.sharding.resolve import read_rules, resolve

_IN_PIPELINE = re.compile(r"decoder/pipeline_module/")
_IN_SCANS = re.compile(r"decoder/(scanned_blocks|(dense_|moe_)?layers)/")
# `layers_3` without a scan; with engrams `moe_layers_engram_3`, and between them the scan `moe_layers_4_60`.
_LAYERS = r"scanned_blocks|(dense_|moe_)?layers(_(engram_)?\d+(_\d+)?|_remainder)?"
_IN_LAYERS = re.compile(rf"decoder/({_LAYERS})/")
# Axes that shard what layers compute, other than the batch, and the strategy of context parallelism whose transfers the
# program of a layer shows.
_WITHIN_LAYERS = ("tensor", "tensor_transpose", "tensor_sequence", "context", "context_usp_ulysses")
_GATHERS = "all_gather"
_FUSE_GRADIENT_OF_LOGITS = ("v5e", "v6e")  # chips
# Costs per device and step, and estimated seconds.
Predicted = tuple[costs.Costs, estimate.Estimate | None]


class Quantities:
  """What a config's model takes on one device of a run with this schedule."""

  def __init__(
      self, config: DerivedKeys, schedule: CircularSchedule, weights: Weights, its_slice: torus.Slice | None = None
  ):
    self._config, self._schedule, self._weights, self._slice = config, schedule, weights, its_slice
    self._mesh, self._own_loop = weights.mesh, isinstance(schedule, costs.OwnLoop)
    self._itemsize = jnp.dtype(config.dtype).itemsize
    # Of a step, and of a microbatch, that a device has while it computes a layer.
    tokens = config.micro_batch_size_to_train_on * config.max_target_length
    self._tokens = tokens / shards(ACTIVATION_AXES[:2], config, self._mesh)
    self._of_microbatch = self._tokens / schedule.microbatches

  @functools.cached_property
  def sizes(self) -> costs.Sizes:
    """The bytes per device, if nothing is kept and all computed again."""
    config, schedule, weights, mesh = self._config, self._schedule, self._weights, self._mesh
    # A window leaves layers that MaxText does not scan over to MaxText.
    windowed = not self._own_loop and not config.using_pipeline_parallelism
    layers = _IN_PIPELINE if config.using_pipeline_parallelism else _IN_SCANS if windowed else _IN_LAYERS
    of = functools.partial(Columns, config, mesh, schedule, self._slice)
    of_inside, of_outside = weights.parted(layers)
    inside, outside = of(of_inside), of(of_outside, outside=True)
    ends = self._ends(of, layers)
    total = lambda column, where=True: np.sum(column, where=where)
    per_repeat = lambda column, where=True: round(total(column, where) / (schedule.repeats * schedule.stages))
    share = lambda column, where: float(total(column, where) / max(total(column), 1.0))
    gradients = lambda column: round(
        total(column / inside.shards) / schedule.stages + total(outside.stored / outside.shards)
    )
    # Where nothing shards the batch, a microbatch's gradient is complete, and summed where it is stored.
    data_axes = data_mesh_axes(mesh, config.logical_axis_rules) & set(mesh.shape)
    is_shared = math.prod(mesh.shape[axis] for axis in data_axes) > 1
    has_outside = config.pipeline_parallel_layers != config.num_decoder_layers
    logits = self._logits()
    adds_up = schedule.stages > 1 and derived.adds_up_logits(config)
    return costs.Sizes(
        parameters=weights.parameters.totals["bytes_per_device"],
        gradients=gradients(inside.gathered if is_shared else inside.summed),
        gradients_at_once=gradients(inside.summed),
        optimizer=weights.moments,
        copies=round(total(inside.narrow / inside.shards, ~inside.of_experts)) if schedule.stages == 1 else 0,
        gathered=per_repeat(inside.gathered),
        summed=per_repeat(inside.summed),
        gathered_of_kernels=per_repeat(inside.gathered, inside.kernels),
        gathered_within_products=per_repeat(inside.gathered, inside.within_products),
        summed_of_kernels=per_repeat(inside.summed, inside.kernels),
        values=per_repeat(inside.count),
        cast=per_repeat(inside.cast),
        transposed=per_repeat(inside.gathered, inside.transposed),
        sent_to_gather=per_repeat(inside.to_gather),
        sent_to_gather_again=per_repeat(inside.to_gather, inside.gathers_again),
        sent_to_reduce=per_repeat(inside.reduced),
        collective_matmuls=tuple(inside.collective_matmuls(self._of_microbatch)),
        groups=tuple(
            (share(inside.to_gather, inside.within_slice == n), int(n)) for n in np.unique(inside.within_slice) if n > 1
        ),
        rings_last=share(inside.to_gather, inside.first),
        permuted=share(inside.to_gather, inside.two_devices),
        in_steps=share(inside.reduced, inside.in_steps),
        in_steps_of_kernels=share(inside.reduced, inside.in_steps & inside.kernels),
        all_reduced=share(inside.reduced, inside.all_reduced),
        all_reduced_of_kernels=share(inside.reduced, inside.all_reduced & inside.kernels),
        activations=self._activations(),
        kept=0,
        work=self._held(self._of_microbatch),
        logits=logits,
        head=ends.head,
        beside_logits=ends.beside(logits, is_fused=self._fuses_gradient_of_logits()),
        head_in_parts=round(ends.in_parts * ends.head),
        # The stages share the batch.
        work_outside=self._held(self._tokens / schedule.stages) if schedule.stages > 1 and has_outside else 0,
        head_sent=round(ends.sent),
        between_slices=(
            per_repeat(inside.gathered_between),
            per_repeat(inside.reduced_between),
            round(ends.between_slices),
        ),
        of_logits=ends.added_up if adds_up else (0, 0),
    )

  def keeping(self, kept: Kept, layers: Layers) -> costs.Sizes:
    """Returns `sizes` with what the layers keep and send: those of the pipeline, or of the model without one."""
    config, mesh, schedule, sized = self._config, self._mesh, self._schedule, self.sizes
    repeats = schedule.repeats * schedule.stages
    of_repeat = self._of_microbatch / repeats
    # The stages share the batch of layers outside of the pipeline. These are taken to keep as much as those in it.
    of_stage = self._tokens / schedule.stages
    of_others = (
        of_stage * (config.num_decoder_layers / config.pipeline_parallel_layers - 1)
        if config.using_pipeline_parallelism
        else 0.0
    )
    sent = layers_inside(config, layers).sent(kept, apart=not self._own_loop)
    # The stages share the embedding and the logits, too. These send as much in backward as in forward.
    each_axes = {*sent, *layers.rest}
    outside = {axes: of_others * sent.get(axes, 0.0) + 2 * of_stage * layers.rest.get(axes, 0.0) for axes in each_axes}
    by_devices = lambda of: tuple((size, math.prod(mesh.shape[each] for each in axes)) for axes, size in of.items())
    # Tokens go to experts.
    with_experts = layers_with_experts(config, in_pipeline=False)
    inside = layers_with_experts(config, in_pipeline=True) if schedule.stages > 1 else with_experts
    dispatched = lambda tokens: experts(config, mesh, tokens, kept.again).sent
    # A stage may keep its own input only, and not those of its layers.
    only_its_own = config.remat_policy == "custom" and plain(config.decoder_layer_input) == "remat"
    of_layers = config.num_layers_per_pipeline_stage // cycles.scanned(config)[1]
    not_kept = of_layers - 1 if only_its_own and schedule.stages > 1 else 0
    return dataclasses.replace(
        sized,
        sent_to_gather_again=round(kept.share(Kind.PRODUCT) * sized.sent_to_gather_again),
        kept=round(kept.device * of_repeat) - sized.activations * not_kept,
        offloaded=round(kept.host * of_repeat),
        on_the_way=2 * round(max(kept.host, kept.most_host) * of_repeat),
        kept_outside=round(kept.device * of_others),
        offloaded_outside=round(kept.host * of_others),
        dispatched=round(dispatched(self._of_microbatch) * inside / repeats),
        dispatched_outside=round(dispatched(of_stage) * (with_experts - inside)),
        within_layers=by_devices({axes: of_repeat * size for axes, size in sent.items()}),
        within_outside=by_devices(outside),
    )

  def work(self, sized: costs.Sizes, kept: Kept, layers_read: Layers, counted: tuple[float, float]) -> estimate.Work:
    """Returns what one device computes in a step, without bubbles, with rematerialisation.

    `counted` are FLOPs as MaxText counts them: of a step, and of attention.
    """
    config, mesh, schedule = self._config, self._mesh, self._schedule
    own_tokens = config.per_device_batch_size * config.max_target_length  # as MaxText counts FLOPs
    outside = 3 * 2 * own_tokens * config.emb_dim * config.vocab_size
    # Of one of the parts of a step. Attention: forward's two products, and backward's four.
    whole, attention = (each / config.gradient_accumulation_steps for each in (counted[0], counted[1] / 6))
    layers, stages, microbatches = cycles.layers(config) / schedule.stages, schedule.stages, schedule.microbatches
    of_experts = experts(config, mesh, self._of_microbatch, kept.again, own_loop=self._own_loop)
    times = layers_with_experts(config, in_pipeline=False) / stages * microbatches
    # Forward, and twice as much in backward for the gradients.
    products = max(whole - outside - 6 * attention - times * of_experts.flops, 0) / 3
    again, attention_again, grouped_again = map(kept.share, (Kind.PRODUCT, Kind.ATTENTION, Kind.GROUPED))
    products, grouped = products * (3 + again), times * of_experts.flops / 3 * (3 + grouped_again)
    ici = dict(zip(config.mesh_axes, abstract_model.parallelism(config, "ici"), strict=True))
    vmem_kib = derived.xla_flag(config, "xla_tpu_scoped_vmem_limit_kib") or ""
    over_sequence = shards(ACTIVATION_AXES[1:2], config, mesh)
    beside = derived.dispatches_beside_compute(config)
    stops = bool(config.sparse_matmul and of_experts.sent) and not beside
    passes = 3 + kept.again[Again.BETWEEN]
    between = passes * self._tokens * layers * self._token() / self._itemsize
    # A norm reads what it divides to add up its squares, reads it again, and writes it; backward is taken as twice that.
    normalised = 3 * passes * self._tokens * layers_read.normalised / stages
    # Of what is kept, what kernels compute is copied, and in MaxText's own loop what products compute, too.
    kinds = (Again.KEPT_OF_KERNELS, *([Again.KEPT_OF_PRODUCTS] if self._own_loop else []))
    copied = sum(kept.again.get(kind, 0.0) * self._tokens * layers_read.kept_at_most(kind) / stages for kind in kinds)
    return estimate.Work(
        sizes=sized,
        flops=products + grouped + attention * (6 + 2 * attention_again),
        products=products,
        # Each of the two products of backward reads or writes what forward's does.
        moved=(3 + again) * (self._tokens * layers_read.moved + microbatches * layers_read.weights) / stages,
        grouped=grouped,
        outside=outside,
        logit_values=own_tokens * config.vocab_size,
        # Splash attention computes whole blocks on the diagonal. Devices that share a sequence have rows of both ends.
        attention=attention * (1 + min(config.sa_block_q / config.max_target_length * over_sequence, 1)),
        recomputed=attention_again,
        again=again,
        elementwise=between + normalised + 4 * copied,  # each copy is read and written in forward, and again in backward
        itemsize=self._itemsize,
        experts=of_experts.times(times),
        dispatches_beside=bool(config.sparse_matmul) and beside,
        parts=rows_of_devices.parts(config),
        experts_devices=math.prod(
            ici[axis] for axis in axes_of(resolve(("exp",), mesh, config.logical_axis_rules)) - {"stage"}
        ),
        vmem_kib=int(vmem_kib) if vmem_kib.isdecimal() else None,
        # Between exchanges of tokens that stop compute, XLA hides little behind experts' kernels in our loops
        # (gpt-oss-20b; `python -m benchmarks.held_back`).
        on_sparsecores=derived.gathers_on_sparsecores(config) and (self._own_loop or not stops),
    )

  def _activations(self) -> int:
    streams = max(getattr(self._config, "mhc_expansion_rate", 1), 1)  # of hyper-connections
    rows = self._config.micro_batch_size_to_train_on // self._schedule.microbatches
    elements = rows * self._config.max_target_length * self._config.emb_dim * streams
    return math.ceil(elements * self._itemsize / shards(ACTIVATION_AXES, self._config, self._mesh))

  def _held(self, tokens: float) -> int:
    """Returns bytes of inputs and outputs of matrix products in a layer, for so many tokens on a device."""
    return math.ceil(tokens * self._token() + experts(self._config, self._mesh, tokens).held)

  def _token(self) -> float:
    """Returns bytes of inputs and outputs of matrix products, for one token and layer.

    Hidden values of the MLP are among them, but not those of a ragged dispatch, which are in `Experts.held`.
    """
    config, mesh = self._config, self._mesh
    attention = 2 * (config.num_query_heads + config.num_kv_heads) * config.head_dim
    hidden = float(config.mlp_dim)
    if config.num_experts > 1:
      routed = 0.0 if config.sparse_matmul else config.num_experts_per_tok * max(config.capacity_factor, 1.0)
      hidden = (config.moe_mlp_dim or config.mlp_dim) * (config.shared_experts + routed)
    wide = attention / shards(("heads",), config, mesh) + 3 * (hidden / shards(("mlp",), config, mesh))
    return (2 * config.emb_dim + wide) * self._itemsize

  def _ends(self, of: Callable[..., Columns], layers: re.Pattern) -> Ends:
    in_parts = 2 * 4 / self._itemsize if derived.sums_logits_in_parts(self._config) else 0.0
    tables, logits, others = (of(each, outside=True) for each in self._weights.ends(layers))
    in_products = bool(getattr(self._config, "use_iota_embed", False))
    return Ends(tables, logits, others, in_products=in_products, in_parts=in_parts)

  def _logits(self) -> int:
    config = self._config
    elements = config.micro_batch_size_to_train_on * config.max_target_length * config.vocab_size
    parts = shards(LOGITS_AXES, config, self._mesh, over_stages=True) * max(config.num_vocab_tiling, 1)
    return math.ceil(elements * self._itemsize / parts)

  def _fuses_gradient_of_logits(self) -> bool:
    """Whether XLA computes the logits' gradient within the products that read it.

    On v5e and v6e it does (`python -m benchmarks.held_back --model qwen2.5-1.5b qwen2.5-14b qwen3-32b gemma-7b`), on
    v5p most programs write it. Of other chips nobody knows. Over slices it is taken to be written, though some programs
    do not: the window of `llama3-8b-2-slices` needs it.
    """
    chip = chips.of_topology(self._slice.name) if self._slice else None
    return chip is not None and chip.name in _FUSE_GRADIENT_OF_LOGITS and self._config.num_slices == 1


def own_loop(config: DerivedKeys) -> costs.OwnLoop:
  """Returns MaxText's loop over layers without a pipeline."""
  return costs.OwnLoop(repeats=math.ceil(config.num_decoder_layers / cycles.scanned(config)[1]))


def not_counted(config: DerivedKeys) -> list[str]:
  """Returns what takes memory or traffic in this config and is not in `sizes`."""
  missing = []
  if (optimizer := plain(config.opt_type)) not in ADAMS:
    missing.append(f"the optimizer's state (opt_type={optimizer})")
  if config.using_pipeline_parallelism and not config.set_remat_policy_on_pipeline_iterations:
    missing.append("what set_remat_policy_on_pipeline_iterations=False keeps, which is all that backward needs")
  if getattr(config, "use_batch_split_schedule", False):
    missing.append("what the batch-split schedule keeps without a pipeline, where remat_policy has no effect")
  if getattr(config, "mtp_num_layers", 0):
    missing.append("the memory of multi-token prediction (mtp_num_layers)")
  if getattr(config, "use_multimodal", False):
    missing.append("the memory of encoders of images and sounds (use_multimodal)")
  if config.num_experts > 1 and config.dcn_expert_parallelism > 1:
    missing.append("the time in which tokens go to experts of other slices")
  if config.num_experts > 1 and not has_formulas(config):
    missing.append("what the layers send to dispatch tokens to experts, and hold meanwhile")
  if named := [name for name in _WITHIN_LAYERS if getattr(config, f"dcn_{name}_parallelism", 1) > 1]:
    missing.append(f"what the layers send to other slices for their {' and '.join(named)} parallelism")
  strategy = plain(getattr(config, "context_parallel_strategy", _GATHERS))
  of_sequence = ("context", "context_usp_ulysses")
  if strategy != _GATHERS and any(getattr(config, f"ici_{axis}_parallelism", 1) > 1 for axis in of_sequence):
    missing.append(f"what attention sends with context_parallel_strategy={strategy}")
  return missing


def gather_policy_with_formulas(impl: str) -> GatherPolicy | None:
  """The gather policy of an implementation; None where the closed forms do not hold: without one, or in another order.

  Raises registry.UnknownImplementationError or registry.PluginError if there is no such implementation.
  """
  if impl == registry.HOST:
    return None
  contract = registry.get(impl).contract
  return contract.gather_policy if contract.schedule_class is CircularSchedule else None


def predictor(
    config: DerivedKeys,
    parameters: sharding.Explanation,
    mesh: AbstractMesh,
    chip: chips.Chip | None = None,
    layers: Layers | None = None,
) -> Callable[..., Predicted | None]:
  """Returns a function of an implementation and a schedule: (costs per device and step, estimated seconds) of such a run.

  A third argument is what the layers keep, by default what the config says. The seconds are None without a chip, or
  without its slice, or with `timed=False`. Where there are no formulas for an implementation or its schedule the function
  returns None. It counts once what runs have in common; `layers` are those of `layers_of`.
  It raises registry.UnknownImplementationError or registry.PluginError if there is no such implementation.
  """
  layers = layers or layers_of(config)
  config = remembering(with_values(config, {"logical_axis_rules": read_rules(config.logical_axis_rules)}))
  weights = Weights(config, parameters, mesh)
  kept_of = functools.cache(lambda schedule: kept_by(config, schedule, layers))
  its_slice = topology.slice_of(chip.name, config.num_target_devices // config.num_slices) if chip else None
  quantities_of = functools.cache(lambda schedule: Quantities(config, schedule, weights, its_slice))
  counted = flops.of_step(config), flops.of_attention(config)
  known: dict[tuple[Schedule, int], tuple[Kept, costs.Sizes, Callable[[], estimate.Work]]] = {}

  def done(schedule: CircularSchedule, kept: Kept) -> tuple[Kept, costs.Sizes, Callable[[], estimate.Work]]:
    """What the implementations of a schedule have in common, found once for each object that says what is kept."""
    if (schedule, id(kept)) not in known:
      sized = quantities_of(schedule).keeping(kept, layers)
      of_device = functools.cache(lambda: quantities_of(schedule).work(sized, kept, layers, counted))
      known[schedule, id(kept)] = kept, sized, of_device
    return known[schedule, id(kept)]

  def of(impl: str, schedule: Schedule | None, kept: Kept | None = None, *, timed: bool = True) -> Predicted | None:
    circular = schedule if isinstance(schedule, CircularSchedule) else None
    gather_policy = gather_policy_with_formulas(impl) if schedule else None
    if schedule is not None and (circular is None or gather_policy is None):
      return None
    run = circular or own_loop(config)
    _, sized, of_device = done(run, kept or kept_of(circular))
    found = costs.pipelined(run, gather_policy, sized) if gather_policy else costs.without(run.repeats, sized)
    parts = config.gradient_accumulation_steps
    whole = found.accumulated(parts, sized.parameters)
    if chip is None or its_slice is None or not timed:
      return whole, None
    estimated = estimate.estimate(chip, its_slice, of_device(), found, run, gather_policy)
    return whole, estimated.accumulated(parts)

  return of
