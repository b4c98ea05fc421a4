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
from maxtext_pp_ext.plan.layers import Kept, kept_by, Layers, layers_inside, layers_of
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
  search, refused = None, list[dict[str, Any]]()
  for batch in map(dict, batches):
    try:
      search = search or _Search(argv, implementations, devices, chip, memory_limit, batch, axes, every)
      search.accept(batch)
    except (ValueError, NotImplementedError) as error:
      if len(refused) + 1 == len(batches):
        raise
      refused.append({"keys": batch, "reason": _reason(error)})
  assert search is not None, "no batches"
  layouts = search.layouts()
  for done, (changed, of_layout) in enumerate(layouts):
    on_progress(done, len(layouts))
    search.look_at(changed, of_layout)
  search.found.infeasible += refused
  return search.ranked(shown)


def _reason(error: Exception) -> str:
  return " ".join(error.problems) if isinstance(error, PipelineConfigError) else str(error)


class _Search:
  """A search in progress, with what all candidates have in common."""

  def __init__(self, argv, implementations, devices, chip, memory_limit, batch, axes, every):
    """`batch` is one with which the run's config can be read. `every` says whether each candidate keeps its best."""
    for impl in implementations:
      if impl != variants.NONE and quantities.gather_policy_with_formulas(impl) is None:
        raise ValueError(f"There are no formulas for the implementation {impl!r}.")
    given = run_config.given_keys(argv)
    self._topology = given.get("compile_topology")
    extra = {} if self._topology else {"internal_compile": True, "internal_compile_num_devices": devices}
    self._none = variants.keys(variants.NONE, given)
    self._none |= {"num_pipeline_microbatches": -1, "num_pipeline_repeats": -1, "num_layers_per_pipeline_stage": 1}
    self._variations = run_config.Variations(run_config.with_keys(argv, extra | self._none | batch))
    self._without: DerivedKeys = self._variations.first
    problems.refuse_mesh(self._without, self._none)
    self._batches = list[dict[str, Any]]()
    # By the sizes of `_KEYS_OF_AXES`. What layers have is for each token, so batches share it.
    self._layers: dict[tuple[int, ...], Layers] = {}
    self._choices: dict[tuple, choice.Choices] = {}
    self._models = abstract_model.Models(_NOT_OF_PARAMETERS)
    self._every = every
    self._first = dict[tuple, float]()  # by the kind of a candidate, the seconds of a token of the first
    self._ours = [impl for impl in implementations if impl != variants.NONE]
    self._with_none = variants.NONE in implementations
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
        not_counted=quantities.not_counted(self._without),
        pinned=pinned,
    )
    # Without rates, or without a limit, there is nothing to choose by.
    has_rates = self.found.slice is not None and self.found.memory_limit is not None
    self.found.chooses_kept = has_rates and of_run.keys().isdisjoint(OF_POLICIES)
    # What the run gives our pipelines; the model without one has other values.
    self._given = {key: given[key] for key in PipelineKeys.model_fields if key in given and key != "pipeline_impl"}

  def accept(self, batch: dict[str, Any]) -> None:
    """Has these keys of a batch tried, too. Raises ValueError if the run cannot have them."""
    config = self._variations.read(self._none | batch)
    sequences = config.global_batch_size_to_train_on
    asked = config.per_device_batch_size * self.found.devices * config.gradient_accumulation_steps
    if batch and (sequences < 1 or not math.isclose(sequences, asked)):
      raise ValueError(f"That is {asked:g} sequences for {counted(self.found.devices, 'device')}, no whole number.")
    self._batches.append(batch)

  def layouts(self) -> list[tuple[dict[str, Any], list[str]]]:
    """Returns the keys of each choice of axes, stages and layers per stage, with the implementations that can have it."""
    without = lambda sizes: next(candidates.every_parallelism(self._without, "ici", sizes)) if sizes else {}
    found = [(without(sizes), [variants.NONE]) for sizes in self._sizes_of_axes if self._with_none]
    # Those with most layers in a stage come first: their models have the arrays of the others'.
    of_ours = sorted(self._with_stages(), key=lambda keys: -keys["num_layers_per_pipeline_stage"]) if self._ours else []
    found += [(keys, self._ours) for keys in of_ours]
    return [(self._none | batch | keys, of_layout) for batch in self._batches for keys, of_layout in found]

  def _with_stages(self) -> Iterator[dict[str, Any]]:
    """Yields the keys for each choice of axes, of stages on both networks and of layers per stage."""
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
          yield keys | self._given

  def look_at(self, changed: dict[str, Any], implementations: Sequence[str]) -> None:
    """Adds all candidates with one choice of axes, stages and layers per stage."""
    without, as_given = implementations[0] == variants.NONE, changed
    try:
      config = self._variations.read(changed if without else changed | {"pipeline_impl": implementations[0]})
      config, changed = self._on_torus(config, changed)
      if without and (reason := rows_of_devices.too_few(config, "tpu" if self.found.chip else None)) is not None:
        self._refused(changed, ValueError(reason), ici_pipeline_parallelism=1)
        return
      parameters, mesh = self._models.explained(config, changed)
      schedules = [None] if without else self._schedules(config, mesh)
      self._add(changed, itertools.product(schedules, implementations), config, parameters, mesh)
    except (ValueError, NotImplementedError) as error:
      if without and as_given in [self._none | batch for batch in self._batches]:
        raise  # the run is refused without a pipeline, too
      self._refused(changed, error)

  def _schedules(self, config: DerivedKeys, mesh) -> list[CircularSchedule]:
    """The schedules of a pipeline, by their microbatches. Raises ValueError if there are none."""
    least: CircularSchedule = run_config.schedule_of(config)  # type: ignore[assignment]  # __init__ refuses others
    pinned = self.found.pinned
    if (repeats := pinned.get("num_pipeline_repeats", least.repeats)) != least.repeats:
      raise ValueError(f"num_pipeline_repeats={repeats}: here it is {least.repeats}.")
    batch_shards = shards(("activation_batch",), config, mesh)
    batch = config.micro_batch_size_to_train_on
    fitting = [m for m in derived.fitting_microbatches(config) if batch // m % batch_shards == 0]
    if not fitting:
      raise ValueError(
          f"{counted(batch, 'row')} (per_device_batch_size={config.per_device_batch_size}) cannot be divided into "
          f"{counted(least.microbatches, 'microbatch')}, or a multiple of that, with a row for each of "
          f"{counted(batch_shards, 'shard')} of the batch. Set a larger per_device_batch_size."
      )
    if (microbatches := pinned.get("num_pipeline_microbatches", fitting[0])) not in fitting:
      could = ", ".join(map(str, fitting))
      raise ValueError(f"num_pipeline_microbatches={microbatches}: here only {could} can be.")
    of_run = [microbatches] if "num_pipeline_microbatches" in pinned else fitting
    return [dataclasses.replace(least, microbatches=microbatches) for microbatches in of_run]

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
    other.found, other._every = dataclasses.replace(self.found, candidates=[], infeasible=[]), True
    keys = choice.without_choice(like.keys)
    if like.schedule is None:
      other.look_at(keys | changed, [variants.NONE])
    else:
      other.look_at({key: value for key, value in keys.items() if key not in _OF_SCHEDULE} | changed, self._ours)
    return min(other.found.candidates, key=self.found.needs, default=None)

  def _on_torus(self, config: DerivedKeys, changed: dict[str, Any]) -> tuple[DerivedKeys, dict[str, Any]]:
    """Returns a config and its keys; with the key that divides axes of the torus, if JAX needs it for the mesh."""
    if self._splits_as_given or not topology.divides_axes(config, abstract_model.parallelism(config, "ici")):
      return config, changed
    return with_values(config, {_SPLITS: True}), changed | {_SPLITS: True}

  def _refused(self, changed: dict[str, Any], error: Exception, **also: int) -> None:
    names = [key for key in (*BATCH, *changed) if key in changed and self._none.get(key) != changed[key]]
    self.found.infeasible.append({"keys": {key: changed[key] for key in names} | also, "reason": _reason(error)})

  def _add(self, changed: dict[str, Any], runs, config: DerivedKeys, parameters, mesh) -> None:
    """Adds a candidate for each run: its schedule, or None, and its implementation. `changed` are the others' keys."""
    sizes_of_axes = tuple(getattr(config, key) for key in _KEYS_OF_AXES)
    if sizes_of_axes not in self._layers:
      alike = {each: layers for (*others, each), layers in self._layers.items() if (*others,) == sizes_of_axes[:-1]}
      self._layers[sizes_of_axes] = experts.between(config, alike) or layers_of(config)
    layers = self._layers[sizes_of_axes]
    inside = layers_inside(config, layers)
    predict = quantities.predictor(config, parameters, mesh, self.found.chip, layers)
    tokens = config.global_batch_size_to_train_on * config.max_target_length / self.found.devices
    of_config = functools.partial(Candidate, tokens=tokens, flops=flops.of_step(config))
    for schedule, impl in runs:
      # There are formulas for all that __init__ accepts, so it is not None.
      of: choice.Predict = functools.partial(predict, impl, schedule)  # type: ignore[assignment,arg-type]
      keys, layers_per_stage = changed, config.num_decoder_layers
      if schedule is not None:
        keys = changed | {"num_pipeline_microbatches": schedule.microbatches, "pipeline_impl": impl}
        layers_per_stage = config.num_layers_per_pipeline_stage
      of_run = functools.partial(of_config, impl=impl, schedule=schedule, layers_per_stage=layers_per_stage)
      if not self.found.chooses_kept or (schedule is None and config.use_batch_split_schedule):
        costs, estimate = of()  # type: ignore[call-arg]
        self.found.candidates.append(of_run(keys=keys, costs=costs, estimate=estimate))
        continue
      # The rates of a loop over layers, of a window and of a pipeline differ.
      kind = 0 if schedule is None else min(schedule.stages, 2)
      key = *map(changed.get, BATCH), kind, sizes_of_axes, sum(count for _, count in inside.blocks)
      if key not in self._choices:
        full = kept_by(with_values(config, {"remat_policy": "full"}), schedule, layers)
        self._choices[key] = choice.Choices(config, inside, of, full)
      self.found.candidates.append(self._chosen(self._choices[key], of, of_run, keys, kind_of(impl, keys), tokens))

  def _chosen(self, choices: choice.Choices, of: choice.Predict, of_run, keys, kind, tokens: float) -> Candidate:
    """A candidate that keeps its best; with `full` if that fits and another one of its kind is faster anyway."""
    limits = [NEARLY_FULL * (limit or 0) for limit in (self.found.memory_limit, self.found.host_limit)]

    def keeping(kept: Kept, found: tuple[Costs, Estimate]) -> Candidate:
      return of_run(keys=keys | choices.keys_of(kept), costs=found[0], estimate=found[1])

    def in_parts(iterations: int) -> Candidate | None:
      found = choices.in_parts(of, *limits, iterations=iterations)
      return keeping(*found) if found else None

    def closely() -> Candidate:
      candidate = keeping(*choices.best(of, *limits))
      if candidate.schedule is None:
        return candidate
      return dataclasses.replace(candidate, in_parts=functools.partial(in_parts, candidate.schedule.iterations))

    first = math.inf if self._every else self._first.get(kind, math.inf)
    if first < math.inf and choices.at_least(of) / tokens > first:
      candidate = keeping(choices.full, of(choices.full))
      if candidate.costs.peak <= limits[0]:
        return dataclasses.replace(candidate, closely=closely)
    candidate = closely()
    if candidate.seconds is not None and self.found.fits(candidate):
      self._first[kind] = min(first, candidate.seconds / tokens)
    return candidate
