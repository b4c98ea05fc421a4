# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model's layers keep for backward, and what backward computes again, under any remat policy.

Read off the program of MaxText's loss: JAX differentiates each layer that is rematerialised, and says which values
backward needs. A walk from these through forward, which stops at the names that a policy keeps, finds what is kept and
what is computed again, as JAX's partial evaluation does (`jax.checkpoint`, jax/_src/ad_checkpoint.py).
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import enum
import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
import numpy as np

from maxtext_pp_ext import sharding
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.engine.programs.jaxprs import closed, inner_program
from maxtext_pp_ext.engine.programs.primitives import has, Trait
from maxtext_pp_ext.engine.programs.stage import Traced
from maxtext_pp_ext.host.models import loss
from maxtext_pp_ext.host.models.axes import ACTIVATION_AXES, data_mesh_axes, rules_in_play
from maxtext_pp_ext.jax_private import ClosedJaxpr, jaxpr_as_fun, JaxprEqn
from maxtext_pp_ext.plan.costs import DEVICE, OFFLOAD
from maxtext_pp_ext.plan.operations import Array, Axes, between, Kind, kind_of_maker, of_spec, Operation, Reader
from maxtext_pp_ext.plan.weights import gathered
from maxtext_pp_ext.sharding.resolve import resolve

INPUT = "decoder_layer_input"  # MaxText's name of the input of a layer
# With it MaxText rematerialises each layer. Some layers keep on the device what it offloads (maxtext/models/gemma4.py).
_POLICY = {"remat_policy": "custom", "tensors_on_device": [], "tensors_to_offload": [INPUT]}
# name -> DEVICE or OFFLOAD; None if backward computes it again
Places = Callable[[str], str | None]
Cases = np.ndarray  # a value, or a truth, for each of several policies


class Again(enum.Enum):
  """What a policy decides beside which kinds of operations backward computes again."""

  BETWEEN = enum.auto()  # reads and writes, of what is between products
  DISPATCHES = enum.auto()  # tokens that go to experts
  COMBINES = enum.auto()  # their results that come back
  # What kernels compute and a policy keeps is copied to where it is kept, and back for backward. What products compute is
  # copied by MaxText's own loop; ours has products write it there.
  KEPT_OF_KERNELS = enum.auto()
  KEPT_OF_PRODUCTS = enum.auto()


_KEPT_OF = dict.fromkeys((Kind.ATTENTION, Kind.GROUPED), Again.KEPT_OF_KERNELS) | {Kind.PRODUCT: Again.KEPT_OF_PRODUCTS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
  """What the layers keep on one device for backward, and which share of forward backward computes again."""

  device: float  # bytes in the device's memory for each token of the device, of all layers, their inputs among them
  host: float = 0.0  # the same in the host's memory
  most_host: float = 0.0  # the same, if all iterations sent as much as those that send most
  again: Mapping[Kind | Again, float]  # shares of forward, and of what kernels and products compute that which is kept
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


class Amounts(collections.defaultdict[Kind | Again, float]):
  """How much of each kind."""

  def __init__(self):
    super().__init__(float)

  def add(self, others: Mapping[Kind | Again, float], times: float = 1.0) -> None:
    for kind, amount in others.items():
      self[kind] += times * amount


class Block:
  """A layer, or a cycle of layers, that is rematerialised together.

  What is computed again is found for many policies at once. A region is what computes a value from named ones: one for
  what backward needs, and one for each named value. The region of a named value runs if another one that runs reads the
  value, and the policy does not keep it.
  """

  def __init__(self, forward: Sequence[Operation], needs: Sequence[Array], x: Array, *, offloads: bool = True):
    self.offloads = offloads  # whether what a policy offloads goes to the host's memory; else it stays on the device
    named = [each for each in forward if each.name]
    # The last ones first.
    self._stops: dict[Array, str | None] = {each.results[0]: each.name for each in reversed(named)} | {x: None}
    starts: dict[Array | None, Sequence[Array]] = {None: [each for each in needs if each not in self._stops]}
    starts |= {each.results[0]: each.operands for each in named}
    self._needed = {each for each in needs if each in self._stops}
    self._reads, of = dict[Array | None, set[Array]](), dict[Operation, set[Array | None]]()
    for region, arrays in starts.items():
      operations, self._reads[region] = self._walk(arrays)
      for each in operations:
        of.setdefault(each, set()).add(region)
    of_between = between(forward, x)
    products = [array for each in forward if each.kind is Kind.PRODUCT for array in (*each.operands, *each.results)]
    # Bytes that its products read and write: activations, and weights.
    self.moved = sum(array.bytes for array in products if array in of_between)
    self.weights = sum(array.bytes for array in products if array not in of_between)
    made = {array: kind_of_maker(array) for array, name in self._stops.items() if name}
    self._copied = {a: (_KEPT_OF[kind], a.bytes / a.itemsize) for a, kind in made.items() if kind in _KEPT_OF}
    # Operations that the same regions run: their amounts.
    self._amounts = collections.defaultdict[frozenset[Array | None], Amounts](Amounts)
    exchanges = [each for each in forward if each.kind is Kind.EXCHANGE]
    self.whole = Amounts()
    for kind, values in self._copied.values():
      self.whole[kind] += values
    for each in forward:
      amounts: dict[Kind | Again, float] = {each.kind: each.amount}
      if each.kind is Kind.EXCHANGE:
        back = exchanges.index(each) >= len(exchanges) // 2
        amounts[Again.COMBINES if back else Again.DISPATCHES] = each.amount
      amounts[Again.BETWEEN] = sum((of_between.get(result, 0.0) for result in each.results), 0.0)
      for into in (self.whole, *([self._amounts[frozenset(of[each])]] if each in of else [])):
        into.add(amounts)

  @property
  def names(self) -> frozenset[str]:
    """The names that stand on the way to what backward needs."""
    return frozenset(name for name in self._stops.values() if name)

  def under(self, keeps: Mapping[str, Cases], size: int) -> tuple[dict[str | None, Cases], dict[Kind | Again, Cases]]:
    """({name: bytes that are kept}, {kind: amount that is computed again}) of `size` policies; the input has no name."""
    runs: dict[Array | None, Cases] = {None: np.ones(size, bool)}
    kept, again = dict[str | None, Cases](), dict[Kind | Again, Cases]()
    for array, name in self._stops.items():
      reached = np.full(size, array in self._needed)
      for region, running in runs.items():
        if array in self._reads[region]:
          reached = reached | running
      stays = reached & keeps[name] if name else reached
      kept[name] = kept.get(name, 0.0) + stays * array.bytes
      if array in self._copied:
        of, values = self._copied[array]
        again[of] = again.get(of, 0.0) + stays * values
      if name:
        runs[array] = reached & ~keeps[name]
    for regions, amounts in self._amounts.items():
      running = np.any([runs[region] for region in regions], axis=0)
      for kind, amount in amounts.items():
        again[kind] = again.get(kind, 0.0) + running * amount
    return kept, again

  def _walk(self, arrays: Iterable[Array]) -> tuple[set[Operation], set[Array]]:
    """(the operations that compute these arrays from named ones, the named ones that they read)."""
    operations, read, waiting = set[Operation](), set[Array](), list(arrays)
    while waiting:
      array = waiting.pop()
      if array in self._stops:
        read.add(array)
      elif array.maker and array.maker not in operations:
        operations.add(array.maker)
        waiting += array.maker.operands
    return operations, read


class _Mixed(Block):
  """A block whose amounts are those of two that compute the same, each to its share."""

  def __init__(self, one: Block, other: Block, share: float):
    """`share` is that of the other one."""
    self._of = ((one, 1 - share), (other, share))
    mean = lambda value: sum(part * value(block) for block, part in self._of)
    self.offloads = one.offloads and other.offloads
    self.moved, self.weights = mean(lambda block: block.moved), mean(lambda block: block.weights)
    self.whole = Amounts()
    for block, part in self._of:
      self.whole.add(block.whole, part)

  @property
  def names(self) -> frozenset[str]:
    return frozenset().union(*(block.names for block, _ in self._of))

  def under(self, keeps: Mapping[str, Cases], size: int) -> tuple[dict[str | None, Cases], dict[Kind | Again, Cases]]:
    found = [(part, *block.under(keeps, size)) for block, part in self._of]
    return _sums((part, kept) for part, kept, _ in found), _sums((part, again) for part, _, again in found)


def _sums[K](weighted: Iterable[tuple[float, Mapping[K, Cases]]]) -> dict[K, Cases]:
  found = dict[K, Cases]()
  for part, amounts in weighted:
    for what, amount in amounts.items():
      found[what] = found.get(what, 0.0) + part * amount
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
  """The blocks of a model, each with how many of them run one after another, on one device of a mesh."""

  blocks: tuple[tuple[Block, float], ...]
  tokens: float  # of the whole batch, on one device

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    """The names whose place makes a difference."""
    return tuple(sorted(frozenset().union(*(block.names for block, _ in self.blocks))))

  @property
  def moved(self) -> float:
    """Bytes of activations that forward's products read and write, for each token."""
    return sum(count * block.moved for block, count in self.blocks) / self.tokens

  def kept_at_most(self, kind: Again) -> float:
    """Values that kernels, or products, compute and a policy may keep, for each token."""
    return sum(count * block.whole[kind] for block, count in self.blocks) / self.tokens

  @property
  def weights(self) -> float:
    """Bytes of weights that forward's products read, of all layers once."""
    return sum(count * block.weights for block, count in self.blocks)

  def last(self, share: float) -> "Layers":
    """The last layers alone, this share of all of them."""
    left = share * sum(count for _, count in self.blocks)
    found = []
    for block, count in reversed(self.blocks):
      found.append((block, min(count, left)))
      left -= found[-1][1]
    return dataclasses.replace(self, blocks=tuple(found[::-1]))

  def mixed(self, other: "Layers", share: float) -> "Layers":
    """Layers whose amounts are in between these and other ones that compute the same; `share` is that of the others."""
    pairs = zip(self.blocks, other.blocks, strict=True)
    blocks = tuple((_Mixed(one, of_other, share), count) for (one, count), (of_other, _) in pairs)
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

  def cases(self, keeps: Mapping[str, Cases], size: int) -> tuple[dict[str | None, Cases], dict[Kind | Again, Cases]]:
    """What `size` policies keep, and what they compute again.

    Args:
      keeps: name -> for each policy whether it keeps what has this name.
      size: the number of policies.

    Returns:
      ({name: bytes for each token, [2, size]: those that a policy may offload, and those that stay on the device}, {kind:
      share that is computed again, [size]}).
    """
    sizes, again, whole = dict[str | None, Cases](), dict[Kind | Again, Cases](), Amounts()
    for block, count in self.blocks:
      kept, computed = block.under(keeps, size)
      for name, bytes_kept in kept.items():
        of_name = sizes.setdefault(name, np.zeros((2, size)))
        of_name[0 if block.offloads else 1] += count / self.tokens * bytes_kept
      for kind, computed_again in computed.items():
        again[kind] = again.get(kind, 0.0) + count * computed_again
      whole.add(block.whole, count)
    return sizes, {kind: again.get(kind, np.zeros(size)) / all_ for kind, all_ in whole.items() if all_}


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
  return of_program(traced.program, mesh.shape, axes, len(paths))


def of_program(program: ClosedJaxpr, mesh: Mapping[str, int], axes: Sequence[Axes | None], weights: int) -> Layers:
  """Reads the layers of a loss.

  Args:
    program: the loss; its last input has the batch and the sequence as its first dimensions.
    mesh: the sizes of mesh axes.
    axes: of each input, the mesh axes of its dimensions.
    weights: how many inputs are weights; they are the first.
  """
  reader = _Blocks(mesh)
  inputs = [reader.array(aval, of) for aval, of in zip(program.in_avals, axes, strict=True)]
  reader.weights.update(inputs[:weights])
  reader.read(program.jaxpr, inputs)
  last = inputs[-1]
  tokens = last.bytes / last.itemsize / math.prod(last.shape[2:])
  return Layers(blocks=reader.blocks, tokens=tokens)


class _Blocks(Reader):
  """Reads a program, and each block in it apart."""

  def __init__(self, mesh):
    super().__init__(mesh)
    self._blocks: dict[tuple, list] = {}  # by what they compute: the block, how many, and its outputs
    self.weights = set[Array]()
    self._count = 1

  @property
  def blocks(self) -> tuple[tuple[Block, float], ...]:
    return tuple((block, count) for block, count, _ in self._blocks.values())

  def read_eqn(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    if has(eqn, Trait.CHECKPOINT):
      return self._block(eqn, operands)
    if eqn.primitive.name == "scan" and _rematerialises(eqn):
      return self._layers(eqn, operands)
    return super().read_eqn(eqn, operands)

  def add(self, kind, operands, results, amount=0.0, name=None):
    if kind is Kind.OTHER and len(operands) == 1 and operands[0] in self.weights:
      self.weights.update(results)  # casts and other layouts of a weight
    return super().add(kind, operands, results, amount, name)

  def _layers(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    """A loop over blocks. Its body is read once."""
    self._count, before = self._count * eqn.params["length"], self._count
    results, _ = self.loop(eqn, operands, self)
    self._count = before
    return results

  def sliced(self, stacked: Array) -> Array:
    one = super().sliced(stacked)
    self.weights.update([one] if stacked in self.weights else [])
    return one

  def _block(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    """Differentiates a block by its weights and its input, which is the last activation among its operands."""
    program, offloads = closed(*inner_program(eqn)), loss.place(eqn.params["policy"], INPUT) != DEVICE
    alike = (offloads, str(program.in_avals), *(each.primitive.name for each in program.jaxpr.eqns))
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
    reader = Reader(self.mesh)
    inputs = [dataclasses.replace(operands[k], maker=None) for k in (*weights, *others, at)]
    outs = reader.read(traced.forward.jaxpr, inputs)
    needs = [outs[k] for k in traced.saved]
    own = outs[: len(traced.output_avals)]
    self._blocks[alike] = [Block(reader.operations, needs, inputs[-1], offloads=offloads), self._count, own]
    return [dataclasses.replace(each, maker=None) for each in own]


def _rematerialises(eqn: JaxprEqn) -> bool:
  """Whether a loop runs blocks that are rematerialised."""
  body, _ = inner_program(eqn)
  return any(
      has(each, Trait.CHECKPOINT) or (each.primitive.name == "scan" and _rematerialises(each)) for each in body.eqns
  )
