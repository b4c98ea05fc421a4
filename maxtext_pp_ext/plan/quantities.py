# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The quantities that `plan.costs` needs of a config's model on one device, and what its runs cost. Compiles nothing.

A schedule is that of the run's pipeline or window; None without one. `mesh` is that of the run.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import math
import re

import jax.numpy as jnp
from jax.sharding import AbstractMesh

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
from maxtext_pp_ext.plan.weights import ADAMS, axes_of, Bytes, shards, Weight, Weights
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy, Schedule
from maxtext_pp_ext.sharding.resolve import read_rules, resolve

_IN_PIPELINE = re.compile(r"decoder/pipeline_module/")
_IN_SCANS = re.compile(r"decoder/(scanned_blocks|(dense_|moe_)?layers)/")
# `layers_3` without a scan; with engrams `moe_layers_engram_3`, and between them the scan `moe_layers_4_60`.
_LAYERS = r"scanned_blocks|(dense_|moe_)?layers(_(engram_)?\d+(_\d+)?|_remainder)?"
_IN_LAYERS = re.compile(rf"decoder/({_LAYERS})/")
# In a pipeline, in a scan or beside both; not the table of embeddings, the last norm and the logits' weights.
_ANY_LAYERS = re.compile(rf"decoder/(pipeline_module|{_LAYERS}|(moe_)?layers_outside_pipeline(_\d+)?)/")
# Axes that shard what layers compute, other than the batch, and the strategy of context parallelism whose transfers the
# program of a layer shows.
_WITHIN_LAYERS = ("tensor", "tensor_transpose", "tensor_sequence", "context", "context_usp_ulysses")
_GATHERS = "all_gather"
# Costs per device and step, and estimated seconds.
Predicted = tuple[costs.Costs, estimate.Estimate | None]


def sizes(
    config: DerivedKeys, schedule: CircularSchedule | None, weights: Weights, its_slice: torus.Slice | None = None
) -> costs.Sizes:
  """Returns the bytes per device, if nothing is kept and all computed again.

  Without a schedule, that is without a pipeline, a layer takes the place of a repeat.
  """
  mesh, own = weights.mesh, weights.parameters.totals["bytes_per_device"]
  _, ends = weights.parted(_ANY_LAYERS)
  # A window leaves layers that MaxText does not scan over to MaxText.
  windowed = schedule is not None and not config.using_pipeline_parallelism
  layers = _IN_PIPELINE if config.using_pipeline_parallelism else _IN_LAYERS
  inside, outside = weights.parted(_IN_SCANS if windowed else layers)
  stages, parts = 1 if schedule is None else schedule.stages, _parts(config, schedule)
  of = Bytes(config, mesh, schedule, its_slice)

  def per_repeat(bytes_of: Callable[[Weight], float], which: Callable[[Weight], bool] = lambda w: True) -> int:
    return round(sum(bytes_of(w) for w in inside if which(w)) / parts)

  def share(bytes_of: Callable[[Weight], float], which: Callable[[Weight], bool]) -> float:
    return sum(bytes_of(w) for w in inside if which(w)) / max(sum(map(bytes_of, inside)), 1.0)

  def gradients(bytes_of: Callable[[Weight], float]) -> int:
    of_layers = sum(of.shard(w, bytes_of(w)) for w in inside) / stages
    return round(of_layers + sum(of.shard(w, of.stored(w)) for w in outside))

  # Where nothing shards the batch, a microbatch's gradient is complete, and summed where it is stored.
  data_axes = data_mesh_axes(mesh, config.logical_axis_rules) & set(mesh.shape)
  is_shared = math.prod(mesh.shape[axis] for axis in data_axes) > 1
  tokens = _tokens(config, mesh) / (schedule.microbatches if schedule else 1)
  of_logits = weights.of_logits() if stages > 1 and derived.adds_up_logits(config) else []
  return costs.Sizes(
      parameters=own,
      gradients=gradients(of.gathered if is_shared else of.summed),
      gradients_at_once=gradients(of.summed),
      optimizer=weights.moments,
      copies=round(sum(of.stored_narrow(w) for w in inside if stages == 1 and not w.of_experts)),
      gathered=per_repeat(of.gathered),
      summed=per_repeat(of.summed),
      gathered_of_kernels=per_repeat(of.gathered, of.kernels),
      gathered_within_products=per_repeat(of.gathered, of.within_products),
      summed_of_kernels=per_repeat(of.summed, of.kernels),
      values=per_repeat(lambda w: w.count),
      cast=per_repeat(of.cast),
      transposed=per_repeat(of.gathered, lambda w: of.kernels(w) and not w.in_lanes),
      sent_to_gather=per_repeat(of.to_gather),
      sent_to_gather_again=per_repeat(of.to_gather, of.gathers_again),
      sent_to_reduce=per_repeat(of.reduced),
      collective_matmuls=tuple(of.collective_matmuls(inside, tokens)),
      groups=tuple(_groups(config, inside, of.to_gather)),
      permuted=share(of.to_gather, of.two_devices),
      in_steps=share(of.reduced, of.in_steps),
      in_steps_of_kernels=share(of.reduced, lambda w: of.kernels(w) and of.in_steps(w)),
      all_reduced=share(of.reduced, of.all_reduced),
      all_reduced_of_kernels=share(of.reduced, lambda w: of.kernels(w) and of.all_reduced(w)),
      activations=_activations(config, schedule, mesh),
      kept=0,
      work=_work(config, tokens, mesh),
      logits=_logits(config, mesh),
      head=(head := round(sum(map(of.narrow, ends))) // 2),  # the table of embeddings is not gathered
      head_in_parts=round(of.logits_in_parts * head),
      work_outside=_work_outside(config, schedule, mesh),
      head_sent=round(of.sent_outside(outside, ends)),
      between_slices=(
          per_repeat(lambda w: of.gathered_between(w, of.gathered(w))),
          per_repeat(of.reduced_between),
          round(sum(map(of.reduced_between, outside))),
      ),
      of_logits=tuple(round(sum(map(each, of_logits))) for each in (of.stored_narrow, of.reduced_over_stages)),
  )


def keeping(
    config: DerivedKeys,
    schedule: CircularSchedule | None,
    sized: costs.Sizes,
    mesh: AbstractMesh,
    kept: Kept,
    layers: Layers,
) -> costs.Sizes:
  """Returns these sizes with what the layers keep and send: those of the pipeline, or of the model without one."""
  dispatched, dispatched_outside = _dispatched(config, schedule, mesh, kept)
  tokens, pipelined = _tokens(config, mesh), config.using_pipeline_parallelism
  of_repeat = tokens / (schedule.microbatches if schedule else 1) / _parts(config, schedule)
  # Layers outside of the pipeline are taken to keep as much as those in it; the stages share their batch.
  others = config.num_decoder_layers / config.pipeline_parallel_layers - 1 if pipelined else 0.0
  of_others = others * tokens / (schedule.stages if schedule else 1)
  sent = layers_inside(config, layers).sent(kept, apart=schedule is not None)
  # The stages share the embedding and the logits, too. These send as much in backward as in forward.
  of_rest = 2 * tokens / (schedule.stages if schedule else 1)
  each_axes = {*sent, *layers.rest}
  outside = {axes: of_others * sent.get(axes, 0.0) + of_rest * layers.rest.get(axes, 0.0) for axes in each_axes}
  by_devices = lambda sizes: tuple((size, math.prod(mesh.shape[each] for each in axes)) for axes, size in sizes.items())
  return dataclasses.replace(
      sized,
      sent_to_gather_again=round(kept.share(Kind.PRODUCT) * sized.sent_to_gather_again),
      kept=round(kept.device * of_repeat) - sized.activations * _inputs_not_kept(config, schedule),
      offloaded=round(kept.host * of_repeat),
      on_the_way=2 * round(max(kept.host, kept.most_host) * of_repeat),
      kept_outside=round(kept.device * of_others),
      offloaded_outside=round(kept.host * of_others),
      dispatched=round(dispatched),
      dispatched_outside=round(dispatched_outside),
      within_layers=by_devices({axes: of_repeat * size for axes, size in sent.items()}),
      within_outside=by_devices(outside),
  )


def _parts(config: DerivedKeys, schedule: CircularSchedule | None) -> int:
  """Returns into how many repeats of a stage the layers are divided, or without a pipeline how long MaxText's loop is."""
  return loop_length(config) if schedule is None else schedule.repeats * schedule.stages


def _groups(
    config: DerivedKeys, inside: Iterable[Weight], sent: Callable[[Weight], float]
) -> Iterator[tuple[float, int]]:
  """Yields `Sizes.groups`."""
  ici = dict(zip(config.mesh_axes, abstract_model.parallelism(config, "ici"), strict=True))
  found: dict[int, float] = {}
  for w in inside:
    devices = math.prod(ici[axis] for axis in w.gathered_over)
    found[devices] = found.get(devices, 0.0) + sent(w)
  yield from ((size / sum(found.values()), devices) for devices, size in found.items() if devices > 1)


def loop_length(config: DerivedKeys) -> int:
  """Returns how many layers, or cycles of layers, MaxText's loop runs one after another without a pipeline."""
  return math.ceil(config.num_decoder_layers / cycles.scanned(config)[1])


def not_counted(config: DerivedKeys) -> list[str]:
  """Returns what takes memory or traffic in this config and is not in `sizes`."""
  missing = []
  if (optimizer := plain(config.opt_type)) not in ADAMS:
    missing.append(f"the optimizer's state (opt_type={optimizer})")
  if config.using_pipeline_parallelism and not config.set_remat_policy_on_pipeline_iterations:
    missing.append("what set_remat_policy_on_pipeline_iterations=False keeps, which is all that backward needs")
  if getattr(config, "use_batch_split_schedule", False):
    missing.append("what the batch-split schedule keeps without a pipeline, where remat_policy has no effect")
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


def work(
    config: DerivedKeys,
    schedule: CircularSchedule | None,
    sized: costs.Sizes,
    mesh: AbstractMesh,
    kept: Kept,
    layers_read: Layers,
    counted: tuple[float, float],
) -> estimate.Work:
  """Returns what one device computes in a step, without bubbles, with rematerialisation.

  `counted` are FLOPs as MaxText counts them: of a step, and of attention.
  """
  own_tokens = config.per_device_batch_size * config.max_target_length  # as MaxText counts FLOPs
  outside = 3 * 2 * own_tokens * config.emb_dim * config.vocab_size
  # Of one of the parts of a step. Attention: forward's two products, and backward's four.
  whole, attention = (each / config.gradient_accumulation_steps for each in (counted[0], counted[1] / 6))
  stages, microbatches = (schedule.stages, schedule.microbatches) if schedule else (1, 1)
  layers, tokens = config.num_decoder_layers / stages, _tokens(config, mesh)
  values = _token(config, mesh) / jnp.dtype(config.dtype).itemsize
  of_experts = experts(config, mesh, tokens / microbatches, kept.again, own_loop=schedule is None)
  times = layers_with_experts(config, in_pipeline=False) / stages * microbatches
  # Forward, and twice as much in backward for the gradients.
  products = max(whole - outside - 6 * attention - times * of_experts.flops, 0) / 3
  again = {kind: kept.share(kind) for kind in (Kind.PRODUCT, Kind.ATTENTION, Kind.GROUPED)}
  products, grouped = products * (3 + again[Kind.PRODUCT]), times * of_experts.flops / 3 * (3 + again[Kind.GROUPED])
  # The largest weight of a layer is a matrix of the MLP, or of one expert.
  width = config.moe_mlp_dim if config.num_experts > 1 and config.moe_mlp_dim else config.mlp_dim
  ici = dict(zip(config.mesh_axes, abstract_model.parallelism(config, "ici"), strict=True))
  vmem_kib = derived.xla_flag(config, "xla_tpu_scoped_vmem_limit_kib") or ""
  over_sequence = shards(ACTIVATION_AXES[1:2], config, mesh)
  kept_of = lambda kind: kept.again.get(kind, 0.0) * tokens * layers_read.kept_at_most(kind) / stages
  return estimate.Work(
      sizes=sized,
      flops=products + grouped + attention * (6 + 2 * again[Kind.ATTENTION]),
      products=products,
      # Each of the two products of backward reads or writes what forward's does.
      moved=(3 + again[Kind.PRODUCT]) * (tokens * layers_read.moved + microbatches * layers_read.weights) / stages,
      grouped=grouped,
      outside=outside,
      largest=2.0 * tokens / microbatches * (config.emb_dim * width / shards(("mlp",), config, mesh)),
      # Splash attention computes whole blocks on the diagonal. Devices that share a sequence have rows of both its ends.
      attention=attention * (1 + min(config.sa_block_q / config.max_target_length * over_sequence, 1)),
      recomputed=again[Kind.ATTENTION],
      again=again[Kind.PRODUCT],
      elementwise=(3 + kept.again[Again.BETWEEN]) * tokens * layers * values,
      itemsize=jnp.dtype(config.dtype).itemsize,
      kept_of_kernels=kept_of(Again.KEPT_OF_KERNELS),
      kept_of_products=kept_of(Again.KEPT_OF_PRODUCTS),
      experts=of_experts.times(times),
      stream=(3 + again[Kind.PRODUCT]) * layers * microbatches * _activations(config, schedule, mesh),
      dispatches_beside=bool(config.sparse_matmul) and derived.dispatches_beside_compute(config),
      parts=rows_of_devices.parts(config),
      experts_devices=math.prod(
          ici[axis] for axis in axes_of(resolve(("exp",), mesh, config.logical_axis_rules)) - {"stage"}
      ),
      loop=0 if schedule else loop_length(config),
      vmem_kib=int(vmem_kib) if vmem_kib.isdecimal() else None,
      # Between exchanges of tokens that stop compute, XLA hides little behind experts' kernels in our loops
      # (gpt-oss-20b; `python -m benchmarks.held_back`).
      on_sparsecores=derived.gathers_on_sparsecores(config)
      and not (schedule and config.sparse_matmul and of_experts.sent and not derived.dispatches_beside_compute(config)),
  )


def _activations(config: DerivedKeys, schedule: CircularSchedule | None, mesh: AbstractMesh) -> int:
  streams = max(getattr(config, "mhc_expansion_rate", 1), 1)  # of hyper-connections
  rows = config.micro_batch_size_to_train_on // (1 if schedule is None else schedule.microbatches)
  elements = rows * config.max_target_length * config.emb_dim * streams
  return math.ceil(elements * jnp.dtype(config.dtype).itemsize / shards(ACTIVATION_AXES, config, mesh))


def _work(config: DerivedKeys, tokens: float, mesh: AbstractMesh) -> int:
  """Returns bytes of inputs and outputs of matrix products in a layer, for so many tokens on a device."""
  return math.ceil(tokens * _token(config, mesh) + experts(config, mesh, tokens).held)


def _inputs_not_kept(config: DerivedKeys, schedule: CircularSchedule | None) -> int:
  """Returns how many of the inputs of its layers a stage does not keep, since it keeps its own input only."""
  only_its_own = config.remat_policy == "custom" and plain(config.decoder_layer_input) == "remat"
  pipelined = schedule is not None and schedule.stages > 1
  return config.num_layers_per_pipeline_stage // cycles.scanned(config)[1] - 1 if only_its_own and pipelined else 0


def _work_outside(config: DerivedKeys, schedule: CircularSchedule | None, mesh: AbstractMesh) -> int:
  """Returns `_work` of a layer outside the pipeline, where the stages share the batch; 0 if there is none."""
  if schedule is None or schedule.stages == 1 or config.pipeline_parallel_layers == config.num_decoder_layers:
    return 0
  return _work(config, _tokens(config, mesh) / schedule.stages, mesh)


def _tokens(config: DerivedKeys, mesh: AbstractMesh) -> float:
  """Returns the tokens of a step that a device has while it computes a layer."""
  return config.micro_batch_size_to_train_on * config.max_target_length / shards(ACTIVATION_AXES[:2], config, mesh)


def _token(config: DerivedKeys, mesh: AbstractMesh) -> float:
  """Returns bytes of inputs and outputs of matrix products, for one token and layer.

  Hidden values of the MLP are among them, but not those of a ragged dispatch, which are in `Experts.held`.
  """
  attention = 2 * (config.num_query_heads + config.num_kv_heads) * config.head_dim
  hidden = float(config.mlp_dim)
  if config.num_experts > 1:
    routed = 0.0 if config.sparse_matmul else config.num_experts_per_tok * max(config.capacity_factor, 1.0)
    hidden = (config.moe_mlp_dim or config.mlp_dim) * (config.shared_experts + routed)
  wide = attention / shards(("heads",), config, mesh) + 3 * (hidden / shards(("mlp",), config, mesh))
  return (2 * config.emb_dim + wide) * jnp.dtype(config.dtype).itemsize


def _dispatched(
    config: DerivedKeys, schedule: CircularSchedule | None, mesh: AbstractMesh, kept: Kept
) -> tuple[float, float]:
  """Returns bytes sent to dispatch tokens: for one microbatch by the layers of a repeat, and by those outside."""
  tokens = _tokens(config, mesh)
  sent = experts(config, mesh, tokens / (schedule.microbatches if schedule else 1), kept.again).sent
  every = layers_with_experts(config, in_pipeline=False)
  if schedule is None or schedule.stages == 1:
    return sent * every / (schedule.repeats if schedule else loop_length(config)), 0.0
  inside = layers_with_experts(config, in_pipeline=True)
  # The stages share the batch.
  sent_outside = experts(config, mesh, tokens / schedule.stages, kept.again).sent
  return sent * inside / (schedule.stages * schedule.repeats), sent_outside * (every - inside)


def _logits(config: DerivedKeys, mesh: AbstractMesh) -> int:
  elements = config.micro_batch_size_to_train_on * config.max_target_length * config.vocab_size
  parts = shards(LOGITS_AXES, config, mesh, over_stages=True) * max(config.num_vocab_tiling, 1)
  return math.ceil(elements * jnp.dtype(config.dtype).itemsize / parts)


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
  sizes_of = functools.cache(lambda schedule: sizes(config, schedule, weights, its_slice))
  counted = flops.of_step(config), flops.of_attention(config)
  known: dict[tuple[Schedule | None, int], tuple[Kept, costs.Sizes, Callable[[], estimate.Work]]] = {}

  def done(schedule: CircularSchedule | None, kept: Kept) -> tuple[Kept, costs.Sizes, Callable[[], estimate.Work]]:
    """What the implementations of a schedule have in common, found once for each object that says what is kept."""
    if (schedule, id(kept)) not in known:
      sized = keeping(config, schedule, sizes_of(schedule), mesh, kept, layers)
      of_device = functools.cache(lambda: work(config, schedule, sized, mesh, kept, layers, counted))
      known[schedule, id(kept)] = kept, sized, of_device
    return known[schedule, id(kept)]

  def of(impl: str, schedule: Schedule | None, kept: Kept | None = None, *, timed: bool = True) -> Predicted | None:
    circular = schedule if isinstance(schedule, CircularSchedule) else None
    gather_policy = gather_policy_with_formulas(impl) if schedule else None
    if schedule is not None and (circular is None or gather_policy is None):
      return None
    _, sized, of_device = done(circular, kept or kept_of(circular))
    if circular is None or gather_policy is None:
      found = costs.without(loop_length(config), sized)
    else:
      found = costs.pipelined(circular, gather_policy, sized)
    parts = config.gradient_accumulation_steps
    whole = found.accumulated(parts, sized.parameters)
    if chip is None or its_slice is None or not timed:
      return whole, None
    estimated = estimate.estimate(chip, its_slice, of_device(), found, circular, gather_policy)
    return whole, estimated.accumulated(parts)

  return of
