# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses what the layers keep for backward: each named tensor on the device, in the host's memory, or not at all.

A tensor spares what computes it from others that are kept, so tensors do not add up. All subsets of the 13 largest are
tried, and those remain than which no other keeps less and computes less again. Of these the six largest tensors may be in
the host's memory (Beaumont et al., "Efficient combination of rematerialization and offloading for training DNNs", NeurIPS
2021, treat chains of layers so).

A pipeline, or a window, may keep less in its first iterations. So it may keep what does not fit in the rest of them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.plan.blocks import What
from maxtext_pp_ext.plan.costs import Costs, DEVICE, is_of_policy, OFFLOAD, PLACES
from maxtext_pp_ext.plan.estimate import Estimate, waiting_for_host
from maxtext_pp_ext.plan.layers import INPUT, Kept, Layers
from maxtext_pp_ext.plan.operations import Kind

_MOST = 13  # names of which all subsets are tried: 8192
_MOST_OFFLOADED = 6  # of a subset the largest tensors, of which all subsets are tried in the host's memory
# What attention's kernels return, with a number for each query and head. The TPU compiler fails where these come back
# from the host in some programs: "INTERNAL … %bitcast = f32[1,2,64,4096]" for Llama 3 70B on v5p-256,
# DENSE_VMEM_LIMIT_FLAG and SparseCore collectives, with context, decoder_layer_input, out_proj and value_proj offloaded.
_NEVER_OFFLOADED = ("context",)
_MOST_TOO_LARGE = 256  # choices that do not fit, the fastest, which are tried in a part of the iterations
_UNIT = 1024.0  # bytes for each token, to see what they change


class Predict(Protocol):
  """What a run costs whose layers keep this; with `timed=False` without its seconds."""

  def __call__(self, kept: Kept, /, *, timed: bool = True) -> tuple[Costs, Estimate]:
    ...


def without_choice(keys: Mapping[str, Any]) -> dict[str, Any]:
  """Keys of a candidate without those of its policy."""
  return {key: value for key, value in keys.items() if not is_of_policy(key, value)}


class Choices:
  """What a model's layers may keep, without what is never better than another choice."""

  def __init__(self, config: DerivedKeys, layers: Layers, predict: Predict, full: Kept):
    """`predict` is that of a way to run the model, whose rates compare choices; `full` is what that policy keeps."""
    self._own = {name: plain(getattr(config, name, None)) for name in layers.names}  # the places in the run's config
    sizes, _ = layers.cases(dict.fromkeys(layers.names, np.ones(1, bool)), 1)
    has_key = [name for name in layers.names if self._own[name] in PLACES and name != INPUT]
    names = sorted(has_key, key=lambda name: -sizes[name].sum())[:_MOST]
    number = np.arange(1 << len(names))
    keeps = dict.fromkeys(layers.names, np.zeros(len(number), bool)) | {INPUT: np.ones(len(number), bool)}
    keeps |= {name: number >> k & 1 == 1 for k, name in enumerate(names)}
    sizes, again = layers.cases(keeps, len(number))
    self._kinds = tuple(kind for kind in again if kind is not Kind.EXCHANGE)  # DISPATCHES and COMBINES are its parts
    self._examples = _Examples.of(self._kinds)
    shares = np.stack([again[kind] for kind in self._kinds], axis=1)
    seconds, whole = _Linear(predict, self._examples).parts(shares), np.sum(list(sizes.values()), axis=(0, 1))
    # The first choice is the policy `full`.
    found = [_Placements((), (), np.array([full.device]), np.zeros(1))]
    cases = [np.array([full.again[kind] for kind in self._kinds])]
    for case in _not_dominated(seconds, whole):
      found.append(_placements({name: size[:, case] for name, size in sizes.items() if size[:, case].any()}))
      cases.append(shares[case])
    counts = [len(each.device) for each in found]
    self._found = found
    self._of = [(number, mask) for number, count in enumerate(counts) for mask in range(count)]
    self._device, self._host = (np.concatenate([each[k] for each in found]) for k in (2, 3))
    self._shares = np.repeat(np.stack(cases), counts, axis=0)

  @property
  def full(self) -> Kept:
    """What the policy of this name keeps."""
    return self._kept(0)

  @functools.cached_property
  def _names(self) -> list[np.ndarray]:
    """For the device and the host, which names each choice keeps there, as bits, [cases]."""
    bits = {name: 1 << k for k, name in enumerate(self._own)}
    places = [self._places(case) for case in range(len(self._of))]
    of = lambda each, where: sum(bits[name] for name, place in each.items() if place == where)
    return [np.array([of(each, where) for each in places]) for where in (DEVICE, OFFLOAD)]

  def _places(self, case: int) -> dict[str, str]:
    number, mask = self._of[case]
    names, may_leave = self._found[number][:2]
    on_host = {name for k, name in enumerate(may_leave) if mask >> k & 1}
    return {name: OFFLOAD if name in on_host else DEVICE for name in names}

  def keys_of(self, kept: Kept) -> dict[str, Any]:
    """MaxText's keys of a choice; of tensors those whose place is another one than the run's config says."""
    if not kept.places:
      return {"remat_policy": "full"}
    places = {name: kept.places.get(name, "remat") for name, own in self._own.items() if own in PLACES}
    keys: dict[str, Any] = {"remat_policy": "custom"}
    if kept.first[0]:
      iterations, names = kept.first
      keys |= {"pipeline_remat_iterations": iterations, "pipeline_remat_tensors": ",".join(names)}
    return keys | {name: place for name, place in places.items() if place != self._own[name]}

  def at_least(self, predict: Predict) -> float:
    """The seconds of a step of which nothing is computed again, nor kept: whatever is kept, it takes no less."""
    return predict(self._examples.nothing)[1].seconds

  def best(self, predict: Predict, limit: float, of_host: float = math.inf) -> tuple[Kept, tuple[Costs, Estimate]]:
    """With which a step is fastest, of those that fit; if none fits, that which needs least memory of a device.

    Args:
      predict: what a way to run the model costs.
      limit: the bytes of a device's memory.
      of_host: the bytes of its host's memory.
    """
    linear = _Linear(predict, self._examples, self.full.device)
    peak, on_host = linear.peak(self._device, self._host), linear.on_host * self._host
    fit = np.flatnonzero((peak <= limit) & (on_host <= of_host))
    seconds = linear.seconds(self._shares[fit], self._host[fit]).round(9) if fit.size else fit
    # Of equally fast ones that which sends least to the host, then that which keeps least.
    for case in fit[np.lexsort((self._device[fit], self._host[fit], seconds))]:
      if (found := predict(self._kept(case)))[0].peak <= limit:
        return self._kept(case), found
    smallest = self._kept(int(np.argmin(peak)))
    return smallest, predict(smallest)

  def in_parts(
      self, predict: Predict, limit: float, of_host: float = math.inf, *, iterations: int
  ) -> tuple[Kept, tuple[Costs, Estimate]] | None:
    """As `best`, if of so many iterations the first keep less than the others; None if nothing that fits is faster."""
    linear = _Linear(predict, self._examples, self.full.device)
    peak, on_host = linear.peak(self._device, self._host), linear.on_host * self._host
    seconds, fits = linear.seconds(self._shares, self._host), (peak <= limit) & (on_host <= of_host)
    fits[0] = False  # with remat_policy=full, of which the first iterations could keep no less
    if not fits.any():
      return None
    fastest, best = float(seconds[fits].min()), None
    too_large = np.flatnonzero(~fits & (seconds < fastest))
    for case in too_large[np.argsort(seconds[too_large])][:_MOST_TOO_LARGE]:
      less = np.flatnonzero(fits & np.all([names & ~names[case] == 0 for names in self._names], axis=0))
      # What is on the way to the host takes as much memory as in the iterations that send most (`Kept.most_host`).
      smallest = linear.peak(self._device[less], self._host[case])
      over = np.maximum(_part(peak[case], smallest, limit), _part(on_host[case], on_host[less], of_host))
      first = np.ceil(over * iterations)
      share = (first / iterations)[:, None]
      mixed = share * self._shares[less] + (1 - share) * self._shares[case]
      takes = linear.seconds(mixed, share[:, 0] * self._host[less] + (1 - share[:, 0]) * self._host[case])
      takes[first >= iterations] = np.inf
      if less.size and (least := int(np.argmin(takes))) is not None and takes[least] < fastest:
        fastest, best = float(takes[least]), (int(case), int(less[least]), int(first[least]))
    if best is None:
      return None
    (case, other, first), kept = best, self._kept(best[0])
    names = tuple(sorted(kept.places.keys() - self._kept(other).places.keys()))
    mean = kept.averaged(self._kept(other), 1 - first / iterations)
    mean = dataclasses.replace(mean, first=(first, names))
    found = predict(mean)
    return (mean, found) if found[0].peak <= limit else None

  def _kept(self, case: int) -> Kept:
    again: dict[What, float] = dict(zip(self._kinds, map(float, self._shares[case]), strict=True))
    return Kept(device=float(self._device[case]), host=float(self._host[case]), again=again, places=self._places(case))


class _Placements(NamedTuple):
  """Tensors that are kept, with each subset of some of them in the host's memory: numbers with a bit for each tensor."""

  names: tuple[str, ...]  # those that are kept
  may_leave: tuple[str, ...]  # of these, those that may be in the host's memory
  device: np.ndarray  # for each subset the bytes on the device, for each token, [subsets]
  host: np.ndarray  # and on the host, [subsets]


class _Examples(NamedTuple):
  """What layers may keep, from which the costs of all else follow."""

  nothing: Kept
  alone: tuple[Kept, ...]  # and backward computes again all of one kind
  on_device: Kept  # so much
  on_host: Kept

  @classmethod
  def of(cls, kinds: Sequence[Any]) -> "_Examples":
    nothing: dict[Any, float] = dict.fromkeys(kinds, 0.0)
    alone = tuple(Kept(device=0.0, again=nothing | {kind: 1.0}) for kind in kinds)
    on_device, on_host = Kept(device=_UNIT, again=nothing), Kept(device=0.0, host=_UNIT, again=nothing)
    return cls(Kept(device=0.0, again=nothing), alone, on_device, on_host)


class _Linear:
  """What a run costs, as a function of what its layers keep.

  All is linear in that but what waits for the host, and what collective matmuls wait for where memory is short.
  """

  def __init__(self, predict: Predict, examples: _Examples, inputs: float = 0.0):
    """`inputs` are the bytes for each token of layers' inputs."""
    self._predict, self._examples = predict, examples
    of = (examples.nothing, examples.on_device, examples.on_host)
    self._costs, on_device, on_host = (predict(each, timed=False)[0] for each in of)
    self.on_host = on_host.on_host / _UNIT  # bytes for each byte of a token
    self._on_device, self._on_host = ((found.peak - self._costs.peak) / _UNIT for found in (on_device, on_host))
    self._inputs = inputs

  @functools.cached_property
  def _base(self) -> Estimate:
    return self._predict(self._examples.nothing)[1]

  @functools.cached_property
  def _to_host(self) -> float:
    return self._predict(self._examples.on_host)[1].to_host / _UNIT

  @functools.cached_property
  def _alone(self) -> np.ndarray:
    """By how much each kind makes what runs one after another longer, and what the pipeline computes, [2, kinds]."""
    alone = [self._predict(each)[1] for each in self._examples.alone]
    parts = [sum(each.parts.values()) - sum(self._base.parts.values()) for each in alone]
    return np.array([parts, [each.pipeline - self._base.pipeline for each in alone]])

  def parts(self, shares: np.ndarray) -> np.ndarray:
    """The seconds of what runs one after another, [cases], for shares that are computed again, [cases, kinds]."""
    return sum(self._base.parts.values()) + shares @ self._alone[0]

  def seconds(self, shares: np.ndarray, host: np.ndarray) -> np.ndarray:
    """The seconds of a step; `host` has bytes for each token in the host's memory, [cases]."""
    pipeline, forward = self._base.pipeline + shares @ self._alone[1], self._base.pipeline / 3
    hidden = max(self._base.beside.values(), default=0.0)
    sending, fetching = self._base.while_sent * forward, self._base.while_fetched * (pipeline - forward)
    waits = waiting_for_host(self._to_host * host, sending, fetching)
    return self.parts(shares) + np.maximum(hidden - pipeline, 0.0) + waits

  def peak(self, device: np.ndarray, host: np.ndarray) -> np.ndarray:
    """The memory of a device, in bytes."""
    copied = np.where(host > 0, np.maximum(device - self._inputs, 0.0), 0.0) if self._costs.copies_kept else 0.0
    return self._costs.peak + self._on_device * (device + copied) + self._on_host * host


def _part(size: float, less: np.ndarray, limit: float) -> np.ndarray:
  """In which part of the iterations the smaller sizes have to take the place of this one."""
  return np.where(size > limit, (size - limit) / np.maximum(size - less, 1e-9), 0.0)


def _placements(kept: Mapping[str | None, np.ndarray]) -> _Placements:
  """Of each tensor `kept` has the bytes for each token that may be in the host's memory, and those that stay."""
  may_leave = (name for name in kept if name and name not in _NEVER_OFFLOADED and kept[name][0])
  largest = tuple(sorted(may_leave, key=lambda name: -kept[name][0])[:_MOST_OFFLOADED])
  subsets = np.arange(1 << len(largest))[:, None] >> np.arange(len(largest)) & 1
  host = subsets @ np.array([kept[name][0] for name in largest])
  return _Placements(tuple(filter(None, kept)), largest, float(np.sum(list(kept.values()))) - host, host)


def _not_dominated(first: np.ndarray, second: np.ndarray) -> np.ndarray:
  """The cases for which no other one is smaller in one of these values, and not larger in the other."""
  order = np.lexsort((second, first))
  return order[np.flatnonzero(np.diff(np.minimum.accumulate(second[order]), prepend=np.inf) < 0)]
