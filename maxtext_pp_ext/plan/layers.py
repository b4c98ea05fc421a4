# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model's layers keep for backward, and what backward computes again, under any remat policy.

Read off the program of MaxText's loss: JAX differentiates each layer that is rematerialised, and says which values
backward needs. A walk from these through forward, which stops at the names that a policy keeps, finds what is kept and
what is computed again, as JAX's partial evaluation does (`jax.checkpoint`, jax/_src/ad_checkpoint.py).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
import math
import types
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
import numpy as np

from maxtext_pp_ext import registry, sharding
from maxtext_pp_ext.config.keys import DerivedKeys, remat_tensors
from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.engine.programs.jaxprs import closed, inner_program
from maxtext_pp_ext.engine.programs.primitives import has, Trait
from maxtext_pp_ext.engine.programs.stage import Traced
from maxtext_pp_ext.host.models import abstract_model, loss
from maxtext_pp_ext.host.models.axes import ACTIVATION_AXES, data_mesh_axes, rules_in_play
from maxtext_pp_ext.jax_private import ClosedJaxpr, jaxpr_as_fun, JaxprEqn
from maxtext_pp_ext.plan.blocks import Again, Amounts, Block, Cases, Mixed, What
from maxtext_pp_ext.plan.costs import DEVICE, OFFLOAD
from maxtext_pp_ext.plan.operations import Array, Axes, Kind, of_spec, Over, Reader, Why
from maxtext_pp_ext.plan.weights import axes_of, gathered
from maxtext_pp_ext.schedule import CircularSchedule
from maxtext_pp_ext.sharding.resolve import resolve

INPUT = "decoder_layer_input"  # MaxText's name of the input of a layer
# With it MaxText rematerialises each layer. Some layers keep on the device what it offloads (maxtext/models/gemma4.py).
_POLICY = {"remat_policy": "custom", "tensors_on_device": [], "tensors_to_offload": [INPUT]}
# name -> DEVICE or OFFLOAD; None if backward computes it again
Places = Callable[[str], str | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
  """What the layers keep on one device for backward, and which share of forward backward computes again."""

  device: float  # bytes in the device's memory for each token of the device, of all layers, their inputs among them
  host: float = 0.0  # the same in the host's memory
  most_host: float = 0.0  # the same, if all iterations sent as much as those that send most
  again: Mapping[What, float]  # shares of forward, and of what kernels and products compute that which is kept
  places: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the names that are kept
  # In so many iterations, the first, backward computes these names again.
  first: tuple[int, tuple[str, ...]] = (0, ())

  def share(self, kind: Kind) -> float:
    """The share of this kind that is computed again; of a kind that layers do not have, that of products."""
    return self.again.get(kind, self.again.get(Kind.PRODUCT, 0.0))

  def averaged(self, other: "Kept", share: float) -> "Kept":
    """This one in so large a share of the iterations, and another in the rest."""
    mean = lambda a, b: share * a + (1 - share) * b
    return Kept(
        device=mean(self.device, other.device),
        host=mean(self.host, other.host),
        most_host=max(self.host, other.host),
        again={kind: mean(value, other.again[kind]) for kind, value in self.again.items()},
        places=self.places,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
  """The blocks of a model, each with how many of them run one after another, on one device of a mesh."""

  blocks: tuple[tuple[Block, float], ...]
  tokens: float  # of the whole batch, on one device
  # What the rest of the model sends in forward, bytes for each token by the mesh axes over which they go.
  rest: Mapping[tuple[str, ...], float] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    """The names whose place makes a difference."""
    return tuple(sorted({name for block, _ in self.blocks for name in block.names}))

  @property
  def moved(self) -> float:
    """Bytes of activations that forward's products read and write, for each token."""
    return sum(count * block.moved for block, count in self.blocks) / self.tokens

  @property
  def normalised(self) -> float:
    """Values that norms divide and products compute, for each token."""
    return sum(count * block.normalised for block, count in self.blocks) / self.tokens

  def kept_at_most(self, kind: Again) -> float:
    """Values that kernels, or products, compute and a policy may keep, for each token."""
    return sum(count * block.whole[kind] for block, count in self.blocks) / self.tokens

  @property
  def weights(self) -> float:
    """Bytes of weights that forward's products read, of all layers once."""
    return sum(count * block.weights for block, count in self.blocks)

  def sent(self, kept: Kept, *, apart: bool) -> dict[tuple[str, ...], float]:
    """Bytes that a device sends for each token, in forward and backward, by the mesh axes over which they go.

    Where forward gathers, backward scatters, and the other way round. What forward gathers for its products backward
    gathers again, for those of weights' gradients. What else forward sends backward sends again if it is computed again.
    Our loops compute weights' gradients `apart`, behind barriers: there both of their operands are gathered once more
    (Llama 3 8B on v6e-16 with four layers and ici_tensor_parallelism=4: 13.9 GB with a window, 9.7 without).
    """
    more = {Why.WHOLE: 1, Why.SUMMED: 1} if apart else {}
    found: dict[tuple[str, ...], float] = {}
    for block, count in self.blocks:
      for over, size in block.whole.items():
        if isinstance(over, Over):
          times = more.get(over.why, 0) + (3 if over.why is Why.WHOLE else 2 + kept.again.get(over, 0.0))
          found[over.axes] = found.get(over.axes, 0.0) + times * count / self.tokens * size
    return found

  def last(self, share: float) -> "Layers":
    """The last layers alone, this share of all of them, in a pipeline's loop."""
    left = share * sum(count for _, count in self.blocks)
    found = []
    for block, count in reversed(self.blocks):
      found.append((block.in_loop(), min(count, left)))
      left -= found[-1][1]
    return dataclasses.replace(self, blocks=tuple(found[::-1]))

  def mixed(self, other: "Layers", share: float) -> "Layers":
    """Layers whose amounts are in between these and other ones that compute the same; `share` is that of the others."""
    pairs = zip(self.blocks, other.blocks, strict=True)
    blocks = tuple((Mixed(one, of_other, share), count) for (one, count), (of_other, _) in pairs)
    return dataclasses.replace(self, blocks=blocks)

  def under(self, places: Places) -> Kept:
    """What is kept under a policy."""
    of = {name: place for name in self.names if (place := places(name))}
    sizes, again = self.cases({name: np.array([name in of]) for name in self.names}, 1)
    on_host = sum(sizes[name][0, 0] for name, place in of.items() if place == OFFLOAD)
    return Kept(
        device=sum(size.sum() for size in sizes.values()) - on_host,
        host=on_host,
        again={kind: float(share[0]) for kind, share in again.items()},
        places={name: place for name, place in of.items() if sizes[name].any()},
    )

  def cases(self, keeps: Mapping[str, Cases], size: int) -> tuple[dict[str | None, Cases], dict[What, Cases]]:
    """What `size` policies keep, and what they compute again.

    Args:
      keeps: name -> for each policy whether it keeps what has this name.
      size: the number of policies.

    Returns:
      ({name: bytes for each token, [2, size]: those that a policy may offload, and those that stay on the device}, {kind:
      share that is computed again, [size]}).
    """
    sizes, again, whole = dict[str | None, Cases](), dict[What, Cases](), Amounts()
    for block, count in self.blocks:
      kept, computed = block.under(keeps, size)
      for name, bytes_kept in kept.items():
        of_name = sizes.setdefault(name, np.zeros((2, size)))
        of_name[0 if block.offloads else 1] += count / self.tokens * bytes_kept
      for kind, computed_again in computed.items():
        again[kind] = again.get(kind, 0.0) + count * computed_again
      whole.update({kind: count * amount for kind, amount in block.whole.items()})
    return sizes, {kind: again.get(kind, np.zeros(size)) / all_ for kind, all_ in whole.items() if all_}


def layers_of(config: DerivedKeys) -> Layers:
  """Reads the layers of a config's model, as it is without a pipeline. Raises ValueError if MaxText cannot trace it."""
  # With the batch-split schedule MaxText's layers are no functions that it rematerialises; they compute the same.
  others = {"using_pipeline_parallelism": False, "pipeline_impl": registry.HOST, "use_batch_split_schedule": False}
  # All that is read is for each token, and kernels want a row on each device.
  rows = math.ceil(config.micro_batch_size_to_train_on / config.num_target_devices) * config.num_target_devices
  config = with_values(config, others | {"micro_batch_size_to_train_on": rows})
  return read(config, abstract_model.abstract_mesh(config))


def layers_inside(config: DerivedKeys, layers: Layers) -> Layers:
  """Returns the layers of a run's pipeline, or all of a model without one."""
  if not config.using_pipeline_parallelism:
    return layers
  return layers.last(config.pipeline_parallel_layers / config.num_decoder_layers)


def kept_by(config: DerivedKeys, schedule: CircularSchedule | None, layers: Layers) -> Kept:
  """Returns what the config's remat policy keeps: of the layers of its pipeline, or of the model without one."""
  places, inside = loss.places(config), layers_inside(config, layers)
  if not config.using_pipeline_parallelism:
    return _in_iterations(config, schedule, inside, places)
  # Our pipelines keep layers' inputs, unless the policy is custom (pipelines/base.py).
  of_inputs = None if config.remat_policy == "custom" else DEVICE
  return _in_iterations(config, schedule, inside, lambda name: places(name) or (of_inputs if name == INPUT else None))


def _in_iterations(config: DerivedKeys, schedule: CircularSchedule | None, layers: Layers, places: Places) -> Kept:
  """Returns what a policy keeps if the first iterations keep less, as the config may say."""
  kept = layers.under(places)
  if schedule is None or not (fewer := min(config.pipeline_remat_iterations, schedule.iterations)):
    return kept
  names = remat_tensors(config) or tuple(name for name in layers.names if name != INPUT)
  less = layers.under(lambda name: None if name in names else places(name))
  return kept.averaged(less, 1 - fewer / schedule.iterations)


def read(config: DerivedKeys, mesh: AbstractMesh) -> Layers:
  """Reads the layers of a config's model, which must have no pipeline. Raises ValueError if MaxText cannot trace it."""
  traced = loss.traced(with_values(config, _POLICY), mesh)
  explained = sharding.explain(traced.parameters, mesh, rules_in_play(config.logical_axis_rules))
  layouts = {row.layout.path: row.layout for row in explained.rows}
  data = data_mesh_axes(mesh, config.logical_axis_rules)
  paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(traced.parameters)]
  of_batch = resolve(ACTIVATION_AXES[:2], mesh, config.logical_axis_rules)
  avals = traced.program.in_avals
  specs = [gathered(layouts[path], data) for path in paths]
  specs += [P()] * (len(avals) - len(paths) - traced.batch) + [of_batch] * traced.batch
  axes = [of_spec(spec, aval.ndim) for spec, aval in zip(specs, avals, strict=True)]
  # Closed forms have what goes over the axes that shard the batch: weights, gradients, and tokens to experts.
  within = set(mesh.axis_names) - axes_of(resolve(ACTIVATION_AXES[:1], mesh, config.logical_axis_rules)) - {"stage"}
  between_slices = dict(zip(config.mesh_axes, abstract_model.parallelism(config, "dcn"), strict=True))
  within = {axis for axis in within if between_slices.get(axis, 1) == 1}
  return of_program(traced.program, mesh.shape, axes, len(paths), within)


def of_program(
    program: ClosedJaxpr,
    mesh: Mapping[str, int],
    axes: Sequence[Axes | None],
    weights: int,
    within: Collection[str] = (),
) -> Layers:
  """Reads the layers of a loss.

  Args:
    program: the loss; its last input has the batch and the sequence as its first dimensions.
    mesh: the sizes of mesh axes.
    axes: of each input, the mesh axes of its dimensions.
    weights: how many inputs are weights; they are the first.
    within: the mesh axes over which what is sent counts.
  """
  reader = _Blocks(mesh, within)
  inputs = [reader.array(aval, of) for aval, of in zip(program.in_avals, axes, strict=True)]
  reader.weights.update(inputs[:weights])
  reader.read(program.jaxpr, inputs)
  last = inputs[-1]
  tokens = last.bytes / last.itemsize / math.prod(last.shape[2:])
  rest: dict[tuple[str, ...], float] = {}
  for each in reader.operations:
    for over, size in each.sends.items():
      rest[over.axes] = rest.get(over.axes, 0.0) + size / tokens
  return Layers(blocks=reader.blocks, tokens=tokens, rest=rest)


class _Blocks(Reader):
  """Reads a program, and each block in it apart."""

  def __init__(self, mesh, within):
    super().__init__(mesh, within)
    self._blocks: dict[tuple, list] = {}  # by what they compute: the block, how many, and its outputs
    self.weights = set[Array]()
    self._count, self._in_loop = 1, False

  @property
  def blocks(self) -> tuple[tuple[Block, float], ...]:
    return tuple((block, count) for block, count, _ in self._blocks.values())

  def read_eqn(self, eqn: JaxprEqn, operands: list[Array], asked: Sequence[Axes | None]) -> list[Array]:
    if has(eqn, Trait.CHECKPOINT):
      return self._block(eqn, operands)
    if eqn.primitive.name == "scan" and _rematerialises(eqn):
      return self._layers(eqn, operands)
    return super().read_eqn(eqn, operands, asked)

  def add(self, kind, operands, results, amount=0.0, name=None, sends=types.MappingProxyType({})):
    if kind is Kind.OTHER and len(operands) == 1 and operands[0] in self.weights:
      self.weights.update(results)  # casts and other layouts of a weight
    return super().add(kind, operands, results, amount, name, {over: self._count * each for over, each in sends.items()})

  def _layers(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    """A loop over blocks. Its body is read once."""
    before = self._count, self._in_loop
    self._count, self._in_loop = self._count * eqn.params["length"], True
    results, _ = self.loop(eqn, operands, self)
    self._count, self._in_loop = before
    return results

  def sliced(self, stacked: Array) -> Array:
    one = super().sliced(stacked)
    self.weights.update([one] if stacked in self.weights else [])
    return one

  def _block(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    """Differentiates a block by its weights and its input, which is the last activation among its operands."""
    program, offloads = closed(*inner_program(eqn)), loss.place(eqn.params["policy"], INPUT) != DEVICE
    # Outside of a loop XLA finds that forward has computed the same, unless the checkpoint prevents it. MaxText 0.2.5 has
    # there what is left over from cycles: the last two of Gemma 3 27B's 62 (patches/reports/remat-outside-scan.md).
    keeps_all = not self._in_loop and not eqn.params["prevent_cse"]
    alike = (offloads, keeps_all, str(program.in_avals), *(each.primitive.name for each in program.jaxpr.eqns))
    if alike in self._blocks:  # layers that MaxText does not scan over
      self._blocks[alike][1] += self._count
      return [dataclasses.replace(each, maker=None) for each in self._blocks[alike][2]]
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.invars]
    floats = [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)]
    weights = [k for k in floats if operands[k] in self.weights]
    if not (activations := [k for k in floats if k not in weights and avals[k].ndim > 2]):
      raise ValueError("A layer that MaxText rematerialises has no activations among its inputs, so it cannot be read.")
    at = max(activations)
    others = [k for k in range(len(avals)) if k != at and k not in weights]
    order = [[*weights, *others, at].index(k) for k in range(len(avals))]

    def layer(weights, others, x):
      given = [*weights, *others, x]
      first, *rest = jaxpr_as_fun(program)(*(given[k] for k in order))
      return first, rest

    x: Any = avals[at]  # only its type matters
    traced = Traced.of(layer, [avals[k] for k in weights], [avals[k] for k in others], x, None)
    reader = Reader(self.mesh, self.within)
    inputs = [dataclasses.replace(operands[k], maker=None) for k in (*weights, *others, at)]
    # The next layer reads what this one returns, so both have the same axes.
    next_one = [inputs[-1].axes] if traced.output_avals[0].shape == inputs[-1].shape else []
    outs = reader.read(traced.forward.jaxpr, inputs, next_one)
    needs = [outs[k] for k in traced.saved]
    own = outs[: len(traced.output_avals)]
    block = Block(reader.operations, needs, inputs[-1], offloads=offloads, keeps_all=keeps_all)
    self._blocks[alike] = [block, self._count, own]
    return [dataclasses.replace(each, maker=None) for each in own]


def _rematerialises(eqn: JaxprEqn) -> bool:
  """Whether a loop runs blocks that are rematerialised."""
  body, _ = inner_program(eqn)
  return any(
      has(each, Trait.CHECKPOINT) or (each.primitive.name == "scan" and _rematerialises(each)) for each in body.eqns
  )
