# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a search finds: the ways to run a model, which of them fit, and what would make one fit if none does."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.hardware import chips, torus
from maxtext_pp_ext.host import topology
from maxtext_pp_ext.host.rules import candidates
from maxtext_pp_ext.plan.costs import BATCH, Costs
from maxtext_pp_ext.plan.estimate import Estimate
from maxtext_pp_ext.schedule import CircularSchedule

# Keys that make a state smaller, with the value to try. They change what is trained, by rounding.
_NARROWER = ("mu_dtype", "pipeline_grad_accum_dtype", "weight_dtype")
_NARROW = "bfloat16"
# Of DeepSeek-V3's layers, with the largest buffers for tokens, XLA's arrangement needs up to 1.2 times what is in use.
NEARLY_FULL = 0.85


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """One way to run the model."""

  impl: str  # an implementation of the registry, or `variants.NONE`
  keys: dict[str, Any]  # the MaxText keys that select it
  schedule: CircularSchedule | None  # None without a pipeline
  layers_per_stage: int  # layers per stage and repeat
  tokens: float  # of a device in a step
  flops: float  # of a device in a step, as MaxText counts them
  costs: Costs  # costs per device and step
  estimate: Estimate | None  # of the seconds of a step; None if the device or its slice is not known
  # The same one, if its first iterations keep less than the others; None if that is no choice, or no faster.
  in_parts: Callable[[], "Candidate | None"] = dataclasses.field(default=lambda: None, repr=False, compare=False)
  # The same one with its best policy, if it has `full` since another one of its kind is faster anyway.
  closely: Callable[[], "Candidate"] | None = dataclasses.field(default=None, repr=False, compare=False)

  @property
  def seconds(self) -> float | None:
    """The seconds that a step is estimated to take."""
    return self.estimate.seconds if self.estimate else None

  @property
  def kind(self) -> tuple:
    return kind_of(self.impl, self.keys)

  @property
  def bound_by(self) -> str | None:
    """What takes longest at the vendor's peak rates."""
    return max(self.estimate.at_peak, key=self.estimate.at_peak.__getitem__) if self.estimate else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
  """A change of some keys, and the memory that the model needs after it."""

  keys: dict[str, Any]  # the keys with their new values
  before: dict[str, Any]  # their values in the run
  memory: int  # bytes of a device that the smallest candidate needs then
  candidate: dict[str, Any]  # the keys of that candidate
  missing: int  # bytes that a device, and its host, lack then; 0 if it fits


def kind_of(impl: str, keys: Mapping[str, Any]) -> tuple:
  """What makes two candidates alike: layers, repeats, microbatches, other axes and the batch make no other kind."""
  return (impl, *(keys.get(f"{network}_pipeline_parallelism", 1) for network in derived.NETWORKS))


@dataclasses.dataclass(kw_only=True)
class Plan:
  """The result of a search."""

  devices: int  # number of devices
  num_slices: int  # number of slices that have them
  chip: chips.Chip | None  # kind of the devices; None if it is not known
  memory_limit: int | None  # bytes of a device; None if it is not known
  host_limit: int | None  # bytes of the host's memory for a device; None if it is not known
  # Those that fit, the best first; then those that do not, the smallest first.
  candidates: list[Candidate] = dataclasses.field(default_factory=list)
  # Combinations with which the model cannot be run: their `keys` and the `reason`.
  infeasible: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  # What takes memory or traffic in all of them and is not in their costs.
  not_counted: list[str] = dataclasses.field(default_factory=list)
  pinned: dict[str, int] = dataclasses.field(default_factory=dict)  # sizes of the pipeline that the run says itself
  chooses_kept: bool = True  # whether the plan chooses what layers keep for backward; else the run's policy says it
  remedies: list[Remedy] = dataclasses.field(default_factory=list)  # if none fits: with these one fits, or nearly

  @property
  def slice(self) -> torus.Slice | None:
    """The chips of a slice; None if their kind is not known, or if MaxText has no slice of this size."""
    return topology.slice_of(self.chip.name, self.devices // self.num_slices) if self.chip else None

  def distinct(self) -> list[Candidate]:
    """Returns the first candidate of each kind."""
    found: dict[tuple, Candidate] = {}
    for candidate in self.candidates:
      found.setdefault(candidate.kind, candidate)
    return list(found.values())

  def fits(self, candidate: Candidate) -> bool:
    """Whether the memory of a device, and of its host, is enough."""
    return not any(self.missing(candidate.costs))

  def missing(self, costs: Costs) -> tuple[int, int]:
    """By how many bytes the memory of a device, and of its host, is too small."""
    limits = ((self.memory_limit, costs.peak), (self.host_limit, costs.on_host))
    of_device, of_host = (0 if limit is None else max(size - limit, 0) for limit, size in limits)
    return of_device, of_host

  def needs(self, candidate: Candidate) -> tuple[int, int]:
    """How much memory is missing, and how much a candidate needs."""
    return sum(self.missing(candidate.costs)), candidate.costs.peak

  def rank(self, candidate: Candidate) -> tuple:
    """Ranks candidates that fit by a token's estimated time, then by what they send for it; the others by memory."""
    if not self.fits(candidate):
      return (1, *self.needs(candidate), 0)
    bubble = candidate.schedule.bubble_fraction if candidate.schedule else 0.0
    # The time of transfers is unknown if the device is not known: then the bubble decides.
    first = bubble if candidate.seconds is None else candidate.seconds / candidate.tokens
    return (0, first, candidate.costs.sent / candidate.tokens, candidate.costs.peak)

  def nearly_full(self, peak: int) -> bool:
    """Whether so many bytes fit and leave little room. What XLA arranges in memory may need more than is in use."""
    return self.memory_limit is not None and NEARLY_FULL * self.memory_limit < peak <= self.memory_limit


def divisions(sequences: int, devices: int) -> list[dict[str, Any]]:
  """The keys of each way to divide the sequences of a step: over devices, and into parts that follow one another.

  Each device has whole sequences in each part; if the devices do not divide the sequences, there is one part.
  """
  whole, rest = divmod(sequences, devices)
  sizes = [(sequences / devices, 1)] if rest else [(whole // parts, parts) for parts in derived.divisors(whole)]
  return [dict(zip(BATCH, each, strict=True)) for each in sizes]


def remedies(
    config: Any,
    missing: Callable[[Any], tuple[int, int]],
    smallest: Callable[[dict[str, Any]], Any],
    more_devices: Iterator[dict[str, Any]],
) -> list[Remedy]:
  """Returns changes with which the model needs less memory: the batch, narrower states, and more devices; then several.

  `config` has no pipeline. `missing` says what costs lack (`Plan.missing`). `smallest` returns the candidate that
  needs least memory with these values for keys, or None. `more_devices` is the result of `candidates.more_devices`.
  """

  def tried(keys: dict[str, Any]) -> Remedy | None:
    if (candidate := smallest(keys)) is None:
      return None
    peak = candidate.costs.peak
    before = {key: _value(config, key) for key in keys}
    lacks = sum(missing(candidate.costs))
    return Remedy(keys=keys, before=before, memory=peak, candidate=candidate.keys, missing=lacks)

  def first_that_fits(several: Iterator[dict[str, Any]]) -> Remedy | None:
    best = None
    for keys in several:
      if (remedy := tried(keys)) is None:
        break
      if best is None or _needs(remedy) < _needs(best):
        best = remedy
      if not remedy.missing:
        break
    return best

  unchanged = tried({})
  batch = first_that_fits(candidates.smaller_batches(config))
  # A key is wide if it has a type of more than two bytes, or one that follows from others.
  wide = [key for key in _NARROWER if _value(config, key) in (None, "", "auto", "float32")]
  narrower = [tried({key: _NARROW}) for key in wide]
  devices = first_that_fits(more_devices)
  found = [each for each in (batch, *narrower, devices) if each and (not unchanged or _needs(each) < _needs(unchanged))]
  if len(found) > 1 and all(remedy.missing for remedy in found):
    together = tried({key: value for remedy in found for key, value in remedy.keys.items()})
    found += [together] if together and _needs(together) < min(map(_needs, found)) else []
  return sorted(found, key=lambda remedy: remedy.missing)


def _needs(remedy: Remedy) -> tuple[int, int]:
  return remedy.missing, remedy.memory


def _value(config: Any, key: str) -> Any:
  """A key's value as in a yml file; a dtype by its name."""
  value = plain(getattr(config, key, None))
  return value if value is None or isinstance(value, (str, int, float)) else str(value)
