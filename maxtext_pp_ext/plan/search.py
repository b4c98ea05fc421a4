# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the possible pipelines of a model on a topology, with their costs, and ranks them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import copy
import dataclasses
import functools
import itertools
import math
from typing import Any

from maxtext_pp_ext.config import derived, PipelineConfigError
from maxtext_pp_ext.config.keys import DerivedKeys, PipelineKeys
from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.hardware import chips, tiles
from maxtext_pp_ext.host import arguments, topology
from maxtext_pp_ext.host.models import abstract_model, flops, run_config, variants
from maxtext_pp_ext.host.rules import candidates, problems
from maxtext_pp_ext.host.rules import rows as rows_of_devices
from maxtext_pp_ext.plan import choice, experts, quantities
from maxtext_pp_ext.plan.costs import AXES, BATCH, Costs, OF_POLICIES
from maxtext_pp_ext.plan.estimate import Estimate
from maxtext_pp_ext.plan.layers import kept_by, Layers, layers_inside, layers_of
from maxtext_pp_ext.plan.result import Candidate, kind_of, NEARLY_FULL, Plan, remedies, Remedy
from maxtext_pp_ext.plan.weights import shards
from maxtext_pp_ext.schedule import CircularSchedule
from maxtext_pp_ext.units import counted

# The keys in which the candidates with the same stages differ.
_OF_SCHEDULE = ("num_pipeline_microbatches", "pipeline_impl")
# The key that a plan chooses for a model with experts, unless the run does.
_EXPERTS = "ici_expert_parallelism"
_KEYS_OF_AXES = (*(f"ici_{axis}_parallelism" for axis in AXES), _EXPERTS)
# The key with which a mesh may divide the axes of the chips' torus. A plan sets it where a mesh needs it.
_SPLITS = "allow_split_physical_axes"
# The keys of a layout, in the order in which those that are impossible are listed.
_OF_LAYOUT = ("ici_pipeline_parallelism", "dcn_pipeline_parallelism", *_KEYS_OF_AXES, "num_layers_per_pipeline_stage")
# What a plan chooses, unless the run says it.
_CHOSEN = (*_OF_LAYOUT[:2], _OF_LAYOUT[-1], "num_pipeline_microbatches", "num_pipeline_repeats")
# Keys that change no parameter's shape or logical axes, other than by `abstract_model.stacks`. A model that was built for
# other values serves, too. It takes longer to build than all else about a layout.
_NOT_OF_PARAMETERS = {
    *(*_OF_LAYOUT, *OF_POLICIES, _SPLITS, "per_device_batch_size", "mu_dtype", "pipeline_grad_accum_dtype"),
    *("num_pipeline_microbatches", "compile_topology", "internal_compile_num_devices", "gradient_accumulation_steps"),
    *("pipeline_impl", *(f"{network}_{axis}_parallelism" for network in derived.NETWORKS for axis in candidates.DONORS)),
}


def plan(
    argv: Sequence[str],
    *,
    implementations: Sequence[str],
    devices: int | None = None,
    chip: chips.Chip | None = None,
    memory_limit: int | None = None,
    batches: Sequence[Mapping[str, Any]] = ({},),
    axes: Sequence[str] = (),
    shown: int = 10,
    every: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
  """Finds the combinations of stages, repeats, layers per stage and microbatches, and ranks them by tokens per second.

  Stages take their devices from the axis that MaxText is asked to derive, or from FSDP, or from data parallelism. So do
  experts within a slice, unless the arguments say how many devices share them (`ici_expert_parallelism`). All other
  arguments stay.

  Args:
    argv: MaxText's arguments of a run, with or without a pipeline.
    implementations: implementations of the registry that have a gather policy, and `variants.NONE`.
    devices, chip, memory_limit: number and kind of devices, and bytes of one, where `compile_topology` does not say.
    batches: keys of batches (`costs.BATCH`), each of which is tried instead of the arguments' own.
    axes: those of `costs.AXES` whose sizes within a slice are tried. They take their devices as stages do.
    shown: how many of the best, one of each kind, must be accepted as configs by this package and MaxText.
    every: whether each candidate keeps its best. Else those have the policy `full` that are slower than the first of
      their kind whatever they keep.
    on_progress: called with the number of layouts done, and their total.

  Raises:
    ValueError: the config is refused without a pipeline, too; or there is no such implementation, or no formula for it;
      or the arguments have the size of one of `axes`.
  """
  searches, refused = list[_Search](), list[dict[str, Any]]()
  for batch in batches:
    try:
      searches.append(_Search(argv, implementations, devices, chip, memory_limit, batch, axes, every, *searches[:1]))
    except (ValueError, NotImplementedError) as error:
      if len(refused) + 1 == len(batches):
        raise
      refused.append({"keys": dict(batch), "reason": _reason(error)})
  # Those with most layers in a stage come first: their models have the arrays of the others'.
  of = lambda search: sorted(search.layouts(), key=lambda changed: -changed["num_layers_per_pipeline_stage"])
  layouts = [(search, changed) for search in searches for changed in of(search)]
  for done, (search, changed) in enumerate(layouts):
    on_progress(done, len(layouts))
    search.look_at(changed)
  first = searches[0]
  for other in searches[1:]:
    first.found.candidates += other.found.candidates
    first.found.infeasible += other.found.infeasible
  first.found.infeasible += refused
  return first.ranked(shown)


def _reason(error: Exception) -> str:
  return " ".join(error.problems) if isinstance(error, PipelineConfigError) else str(error)


class _Search:
  """A search in progress, with what all candidates have in common."""

  def __init__(
      self, argv, implementations, devices, chip, memory_limit, batch, axes, every, like: "_Search | None" = None
  ):
    """`every` says whether each candidate keeps its best. `like` is the search of the same run with another batch."""
    for impl in implementations:
      if impl != variants.NONE and quantities.gather_policy_with_formulas(impl) is None:
        raise ValueError(f"There are no formulas for the implementation {impl!r}.")
    given = run_config.given_keys(argv)
    self._topology = given.get("compile_topology")
    extra = {} if self._topology else {"internal_compile": True, "internal_compile_num_devices": devices}
    self._none = variants.keys(variants.NONE, given)
    self._none |= {"num_pipeline_microbatches": -1, "num_pipeline_repeats": -1, "num_layers_per_pipeline_stage": 1}
    self._batch = dict(batch)
    self._none |= batch
    self._variations = run_config.Variations(run_config.with_keys(argv, extra | self._none))
    self._without: DerivedKeys = self._variations.first
    problems.refuse_mesh(self._without, self._none)
    # By the sizes of `_KEYS_OF_AXES`. What layers have is for each token, so batches share it.
    self._layers: dict[tuple[int, ...], Layers] = like._layers if like else {}
    self._choices: dict[tuple, choice.Choices] = like._choices if like else {}
    self._models: abstract_model.Models = like._models if like else abstract_model.Models(_NOT_OF_PARAMETERS)
    # By the kind of a candidate the seconds of a token of the first; None if all are looked at closely.
    self._first: dict[tuple, float] | None = None if every else like._first if like else {}
    self._ours = [impl for impl in implementations if impl != variants.NONE]
    of_run = arguments.given(argv) or {}
    self._splits_as_given = _SPLITS in of_run
    sizes = {key: run_config.integer(of_run, key) for key in _CHOSEN if key in of_run}
    pinned = {key: size for key, size in sizes.items() if size > 0}  # others MaxText derives
    for axis in axes:
      if (key := f"ici_{axis}_parallelism") in of_run or getattr(self._without, key) > 1:
        raise ValueError(f"{key}={getattr(self._without, key)}: the run says the size of the axis that should be tried.")
    is_free = self._without.ici_expert_parallelism == 1 and _EXPERTS not in of_run
    # MaxText's attention does not cut heads of keys and values. Of a sequence each device has rows of both ends.
    can = {"tensor": self._without.num_kv_heads, "context": max(self._without.max_target_length // (2 * tiles.LANES), 1)}
    most = {axis: can[axis] for axis in axes}
    most |= {"expert": experts.most_expert_parallelism(self._without) if is_free else 1}
    sizes_of_axes = list(candidates.ways_to_share(self._without, most))
    most_experts = max(each.get("expert", 1) for each in sizes_of_axes)
    # Numbers of devices for experts between one and the most come last (`experts.between`).
    self._sizes_of_axes = sorted(sizes_of_axes, key=lambda each: 1 < each.get("expert", 1) < most_experts)
    chip = chip or chips.of_topology(self._topology or "")
    self.found = Plan(
        devices=self._without.num_target_devices,
        num_slices=self._without.num_slices,
        chip=chip,
        memory_limit=memory_limit or (chip.hbm_bytes if chip else None),
        host_limit=chip.host_bytes if chip else None,
        not_counted=[
            *quantities.not_counted(self._without),
        ],
        pinned=pinned,
    )
    sequences = self._without.global_batch_size_to_train_on
    asked = self._without.per_device_batch_size * self.found.devices * self._without.gradient_accumulation_steps
    if batch and (sequences < 1 or not math.isclose(sequences, asked)):
      raise ValueError(f"That is {asked:g} sequences for {counted(self.found.devices, 'device')}, no whole number.")
    self._tokens = sequences * self._without.max_target_length / self.found.devices
    self._flops = flops.of_step(self._without)
    # Without rates, or without a limit, there is nothing to choose by.
    has_rates = self.found.slice is not None and self.found.memory_limit is not None
    self.found.chooses_kept = has_rates and of_run.keys().isdisjoint(OF_POLICIES)
    # What the run gives our pipelines; the model without one has other values.
    self._given = {key: given[key] for key in PipelineKeys.model_fields if key in given and key != "pipeline_impl"}
    if variants.NONE in implementations:
      for of_axes in self._sizes_of_axes:
        keys = next(candidates.every_parallelism(self._without, "ici", of_axes)) if of_axes else {}
        self._look_at_none(self._none | keys)

  def layouts(self) -> Iterator[dict[str, Any]]:
    """Yields the keys for each choice of stages on both networks and of layers per stage."""
    if not self._ours:
      return
    layers = derived.sound_layers(self._without)
    over_slices = list(candidates.every_parallelism(self._without, "dcn"))
    within_slice = (candidates.every_parallelism(self._without, "ici", each) for each in self._sizes_of_axes)
    for ici, dcn in itertools.product(itertools.chain.from_iterable(within_slice), over_slices):
      stages = ici["ici_pipeline_parallelism"] * dcn["dcn_pipeline_parallelism"]
      if stages > layers:
        continue
      for per_stage in (candidates.layers_per_stage(layers, stages) if stages > 1 else ()) or [1]:
        keys = ici | dcn | {"num_layers_per_pipeline_stage": per_stage}
        if all(self.found.pinned.get(key, size) == size for key, size in keys.items()):
          yield self._none | keys

  def _look_at_none(self, keys: dict[str, Any]) -> None:
    """Adds the candidate without a pipeline that has these keys."""
    try:
      config = self._without if keys == self._none else self._variations.read(keys)
      config, laid_out = self._on_torus(config, keys)
      if (reason := rows_of_devices.too_few(config, "tpu" if self.found.chip else None)) is not None:
        self._refused(keys, ValueError(reason), ici_pipeline_parallelism=1)
        return
      self._add([(laid_out, variants.NONE, None)], config, *self._models.explained(config, laid_out))
    except (ValueError, NotImplementedError) as error:
      if keys == self._none:
        raise
      self._refused(keys, error)

  def look_at(self, changed: dict[str, Any]) -> None:
    """Adds all candidates with one choice of stages and layers per stage."""
    try:
      changed = changed | self._given
      chosen = changed | {"pipeline_impl": self._ours[0]}
      config, changed = self._on_torus(self._variations.read(chosen), changed)
      parameters, mesh = self._models.explained(config, chosen)
      least: CircularSchedule = run_config.schedule_of(config)  # type: ignore[assignment]  # __init__ refuses others
    except (ValueError, NotImplementedError) as error:
      self._refused(changed, error)
      return
    pinned = self.found.pinned
    if (repeats := pinned.get("num_pipeline_repeats", least.repeats)) != least.repeats:
      self._refused(changed, ValueError(f"num_pipeline_repeats={repeats}: here it is {least.repeats}."))
      return
    batch_shards = shards(("activation_batch",), config, mesh)
    batch = config.micro_batch_size_to_train_on
    fitting = [m for m in derived.fitting_microbatches(config) if batch // m % batch_shards == 0]
    if fitting and (microbatches := pinned.get("num_pipeline_microbatches", fitting[0])) not in fitting:
      reason = f"num_pipeline_microbatches={microbatches}: here only {', '.join(map(str, fitting))} can be."
      self._refused(changed, ValueError(reason))
      return
    fitting = [m for m in fitting if pinned.get("num_pipeline_microbatches", m) == m]
    if not fitting:
      reason = (
          f"{counted(batch, 'row')} (per_device_batch_size={config.per_device_batch_size}) cannot be divided into "
          f"{counted(least.microbatches, 'microbatch')}, or a multiple of that, with a row for each of "
          f"{counted(batch_shards, 'shard')} of the batch. Set a larger per_device_batch_size."
      )
      self._refused(changed, ValueError(reason))
      return
    schedules = [dataclasses.replace(least, microbatches=microbatches) for microbatches in fitting]
    runs = [
        (changed | {"num_pipeline_microbatches": schedule.microbatches, "pipeline_impl": impl}, impl, schedule)
        for schedule in schedules
        for impl in self._ours
    ]
    try:
      self._add(runs, config, parameters, mesh)
    except ValueError as error:
      self._refused(changed, error)

  def ranked(self, shown: int) -> Plan:
    """Returns the plan with its candidates in order; the first of each of `shown` kinds is accepted as a config."""
    found = self.found
    found.candidates.sort(key=found.rank)
    if found.chooses_kept:
      self._divide_iterations(shown)
    found.infeasible.sort(key=lambda each: [each["keys"].get(key, 1) for key in _OF_LAYOUT])
    if found.memory_limit and found.candidates and not found.fits(found.candidates[0]):
      found.remedies = self._remedies(found.candidates[0])
      return found
    accepted: set[tuple] = set()
    for candidate in list(found.candidates):
      if len(accepted) == shown or not found.fits(candidate):
        break
      if candidate.kind in accepted:
        continue
      try:
        self._variations.read(candidate.keys)
        accepted.add(candidate.kind)
      except (ValueError, NotImplementedError) as error:
        found.candidates.remove(candidate)
        self._refused(candidate.keys, error)
        if self._look_closely(candidate.kind):
          return self.ranked(shown)
    return found

  def _look_closely(self, kind: tuple) -> bool:
    """Has candidates of a kind keep their best that do not yet. Returns whether there were any."""
    others = [each for each in self.found.candidates if each.kind == kind and each.closely is not None]
    self.found.candidates = [each for each in self.found.candidates if each.kind != kind or each.closely is None]
    self.found.candidates += [each.closely() for each in others if each.closely is not None]
    return bool(others)

  def _divide_iterations(self, shown: int) -> None:
    """Lets the first iterations of the first candidates keep less, one of each of `shown` kinds, if that is faster."""
    found = self.found
    for candidate in list(filter(found.fits, found.distinct()))[:shown]:
      if (other := candidate.in_parts()) is not None:
        found.candidates[found.candidates.index(candidate)] = other
    found.candidates.sort(key=found.rank)

  def _remedies(self, smallest: Candidate) -> list[Remedy]:
    """Returns what would make the model fit, tried on the candidate that needs least memory."""
    donor, _ = candidates.donor(self._without, "ici")
    key = f"ici_{donor}_parallelism"
    # Of an axis that is -1 MaxText derives the size.
    fixed = next((size for size in (smallest.keys.get(key), getattr(self._without, key, -1)) if size), -1) > 0
    config = with_values(self._without, {each: smallest.keys[each] for each in (key, *BATCH) if smallest.keys.get(each)})
    more = candidates.more_devices(config, self._topology, key if donor and fixed else None)
    return remedies(config, self.found.missing, lambda changed: self._smallest(smallest, changed), more)

  def _smallest(self, like: Candidate, changed: dict[str, Any]) -> Candidate | None:
    """Returns the candidate with the stages of another one, and other keys changed, that needs least memory."""
    other = copy.copy(self)
    other.found, other._first = dataclasses.replace(self.found, candidates=[], infeasible=[]), None
    if like.schedule is None:
      other._look_at_none(choice.without_choice(like.keys) | changed)
    else:
      keys = choice.without_choice(like.keys)
      other.look_at({key: value for key, value in keys.items() if key not in _OF_SCHEDULE} | changed)
    return min(other.found.candidates, key=self.found.needs, default=None)

  def _on_torus(self, config: DerivedKeys, changed: dict[str, Any]) -> tuple[DerivedKeys, dict[str, Any]]:
    """Returns a config and its keys; with the key that divides axes of the torus, if JAX needs it for the mesh."""
    if self._splits_as_given or not topology.divides_axes(config, abstract_model.parallelism(config, "ici")):
      return config, changed
    return with_values(config, {_SPLITS: True}), changed | {_SPLITS: True}

  def _refused(self, changed: dict[str, Any], error: Exception, **also: int) -> None:
    names = self._batch | {key: value for key, value in changed.items() if self._none.get(key) != value}
    self.found.infeasible.append({"keys": names | also, "reason": _reason(error)})

  def _add(self, runs: Sequence[tuple[dict[str, Any], str, CircularSchedule | None]], config, parameters, mesh) -> None:
    """Adds a candidate for each run: its keys, implementation and schedule."""
    sizes_of_axes = tuple(getattr(config, key) for key in _KEYS_OF_AXES)
    if sizes_of_axes not in self._layers:
      alike = {each: layers for (*others, each), layers in self._layers.items() if (*others,) == sizes_of_axes[:-1]}
      self._layers[sizes_of_axes] = experts.between(config, alike) or layers_of(config)
    layers = self._layers[sizes_of_axes]
    inside = layers_inside(config, layers)
    predict = quantities.predictor(config, parameters, mesh, self.found.chip, layers)
    for changed, impl, schedule in runs:
      # There are formulas for all that __init__ accepts, so it is not None.
      of: choice.Predict = functools.partial(predict, impl, schedule)  # type: ignore[assignment,arg-type]
      of_run = functools.partial(self._candidate, impl, schedule, config)
      if not self.found.chooses_kept or (schedule is None and config.use_batch_split_schedule):
        self.found.candidates.append(of_run(changed, *of()))  # type: ignore[call-arg]
        continue
      # The rates of a loop over layers, of a window and of a pipeline differ.
      kind = 0 if schedule is None else min(schedule.stages, 2)
      key = *self._batch.values(), kind, sizes_of_axes, sum(count for _, count in inside.blocks)
      if key not in self._choices:
        full = kept_by(with_values(config, {"remat_policy": "full"}), schedule, layers)
        self._choices[key] = choice.Choices(config, inside, of, full)
      choices = self._choices[key]
      limits = [NEARLY_FULL * (limit or 0) for limit in (self.found.memory_limit, self.found.host_limit)]
      closely = functools.partial(self._closely, choices, of, limits, schedule, of_run, changed)
      if (candidate := self._slower(choices, of, of_run, impl, changed)) is not None:
        candidate = dataclasses.replace(candidate, closely=closely)
      else:
        self._note(candidate := closely())
      self.found.candidates.append(candidate)

  def _slower(self, choices: choice.Choices, of, of_run, impl: str, changed: dict[str, Any]) -> Candidate | None:
    """A candidate with the policy `full`, if it fits and another one of its kind is faster whatever this one keeps."""
    first = self._first.get(kind_of(impl, changed)) if self._first is not None else None
    if first is None or choices.at_least(of) / self._tokens <= first:
      return None
    candidate = of_run(changed | choices.keys_of(choices.full), *of(choices.full))
    return candidate if candidate.costs.peak <= NEARLY_FULL * (self.found.memory_limit or 0) else None

  def _note(self, candidate: Candidate) -> None:
    """Remembers the candidate if it is the first of its kind."""
    if self._first is not None and candidate.seconds is not None and self.found.fits(candidate):
      seconds = candidate.seconds / candidate.tokens
      self._first[candidate.kind] = min(seconds, self._first.get(candidate.kind, math.inf))

  def _closely(
      self, choices: choice.Choices, of, limits, schedule: CircularSchedule | None, of_run, changed
  ) -> Candidate:
    """A candidate that keeps its best."""
    kept, found = choices.best(of, *limits)
    candidate = of_run(changed | choices.keys_of(kept), *found)
    if schedule is None:
      return candidate
    in_parts = functools.partial(self._in_parts, choices, of, limits, schedule.iterations, of_run, changed)
    return dataclasses.replace(candidate, in_parts=in_parts)

  def _in_parts(self, choices: choice.Choices, of, limits, iterations: int, of_run, changed) -> Candidate | None:
    if (found := choices.in_parts(of, *limits, iterations=iterations)) is None:
      return None
    kept, costs = found
    return of_run(changed | choices.keys_of(kept), *costs)

  def _candidate(
      self, impl, schedule, config, keys: dict[str, Any], costs: Costs, estimate: Estimate | None
  ) -> Candidate:
    return Candidate(
        impl=impl,
        keys=keys,
        schedule=schedule,
        layers_per_stage=config.num_layers_per_pipeline_stage if schedule else config.num_decoder_layers,
        tokens=self._tokens,
        flops=self._flops,
        costs=costs,
        estimate=estimate,
    )
