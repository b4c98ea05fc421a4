# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Simulates one step of a scheduled TPU program on one device: what runs when, on which lane.

The compiler has put the instructions in the order of execution. Compute follows that order, one instruction at a time,
each as long as the compiler's estimate of its cycles. A transfer occupies the links that it goes over, one transfer at
a time on a link. A transfer with a start and a done overlaps with compute between the two, and compute waits at
its done. Any other transfer stands in line with compute. Copies between memories (HBM, VMEM, host) have lanes, too.

How often loops run, and which branches, `program/execution.py` says. Where devices choose different branches, the longest
takes the time: each waits for the others at the next transfer. Then what a device computes is the average over devices,
and the rest of the longest is waiting.

This is a projection from the compiler's estimates. Nothing is measured.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from maxtext_pp_ext.compiled.program import collectives, execution, hlo
from maxtext_pp_ext.compiled.projection import costs

COMPUTE, STAGE = "compute", "stage"
_TO_NEIGHBOURS = ("collective-permute", collectives.BETWEEN_SLICES)
_MIXED = (0.2, 0.8)  # shares of backward in a loop of both directions, as gradient accumulation


class Part(NamedTuple):
  """What a device's time goes to."""

  # PRODUCTS, KERNELS, OTHER, MEMORY, DEVICES, or a transfer that compute waits for, by payload and mesh axes.
  what: str
  backward: bool  # the direction
  again: bool  # whether it is computed again (rematerialisation)
  in_pipeline: bool  # whether within a loop in which stages send to each other


@dataclasses.dataclass(frozen=True)
class Event:
  """Something that occupies a lane."""

  name: str  # of the instruction
  lane: str  # COMPUTE, links of the torus, or one of `costs`' lanes
  start: float  # seconds after the computation's begin
  seconds: float  # how long
  kind: str  # PRODUCTS, KERNELS, OTHER; of a transfer its kind
  op_name: str  # where it comes from in the program, as JAX wrote it
  detail: Mapping[str, Any]  # of a transfer mesh axes, bytes and what is carried


def _sums() -> Any:
  """A field of sums, which begin with 0."""
  return dataclasses.field(default_factory=lambda: collections.defaultdict(float))


@dataclasses.dataclass
class Run:
  """One execution of a computation, or one step."""

  seconds: float = 0.0  # from begin to end
  parts: dict[Part, float] = _sums()  # seconds of the device; they add up to `seconds`
  busy: dict[str, float] = _sums()  # seconds by lane
  sent: dict[str, float] = _sums()  # seconds of transfers, hidden or not, by the names of their parts
  sent_bytes: dict[str, float] = _sums()  # their bytes on the wire, likewise
  # What occupies lanes, and loops, in the order of execution.
  events: list[Event | Loop] = dataclasses.field(default_factory=list)

  def occupy(self, event: Event) -> None:
    self.busy[event.lane] += event.seconds
    self.events.append(event)

  def add_lanes(self, other: Run, times: int = 1) -> None:
    """Adds what overlaps with compute in executions of something else, without its events."""
    _add(self.busy, other.busy, times)
    _add(self.sent, other.sent, times)
    _add(self.sent_bytes, other.sent_bytes, times)


def _add(sums: dict[Any, float], others: Mapping[Any, float], times: float) -> None:
  for key, value in others.items():
    sums[key] += times * value


@dataclasses.dataclass(frozen=True)
class Loop:
  """A loop within a `Run`."""

  name: str  # of the instruction
  op_name: str  # where it comes from
  start: float  # seconds after the computation's begin
  seconds: float  # of all iterations
  iterations: Sequence[tuple[Run, int]]  # runs of its body, each with how many iterations in a row are like it
  backward: bool | None  # its direction; None if it has both
  in_pipeline: bool  # whether stages send to each other in it


class Timeline:
  """Simulates a program.

  Attributes:
    step: the run, simulated.
    unknown: instructions that could not be followed: loops without a trip count, which run once here; conditionals whose
      choice is not known, of which the heaviest branch runs; fusions that hide a collective, of which compute counts.
  """

  def __init__(self, run: execution.Execution, model: costs.Costs):
    self._module, self._model = run.module, model
    self.unknown: set[str] = set()
    self.step = self._run(run, _Place())
    self.unknown |= run.unknown.names

  def _run(self, executed: execution.Execution, place: _Place) -> Run:
    run = Run()
    self._advance(run, executed, _Lanes(), place)
    return run

  def _advance(self, run: Run, executed: execution.Execution, lanes: _Lanes, place: _Place) -> None:
    for step in executed.computation.instructions:
      if step.opcode == "while":
        self._loop(run, executed, step, place)
      elif step.opcode == "conditional":
        self._conditional(run, executed, step, place)
      elif step.opcode == "call":
        for call in executed.called(step):
          self._advance(run, call.execution, lanes, place)
      else:
        self._instruction(run, executed, step, lanes, place)

  def _instruction(
      self, run: Run, executed: execution.Execution, step: hlo.Instruction, lanes: _Lanes, place: _Place
  ) -> None:
    if step.opcode.endswith("-done"):
      lanes.wait(run, step, place)
      return
    if step.opcode.endswith("-update"):
      lanes.update(run, step)
      return
    if (transfer := self._model.transfer(executed.computation, step)) is not None:
      lanes.send(run, step, transfer, place)
      return
    if step.opcode == "recv":
      lanes.receive(step)
    if self._model.hides_collective(step):
      self.unknown.add(step.name)
    kind, seconds = self._model.compute(executed.scope, step)
    if seconds:
      run.occupy(Event(step.name, COMPUTE, run.seconds, seconds, kind, step.op_name, {}))
      run.parts[place.part(kind, step)] += seconds
      run.seconds += seconds

  def _loop(self, run: Run, executed: execution.Execution, step: hlo.Instruction, place: _Place) -> None:
    start, (body,) = run.seconds, self._module.callees(step)
    backward = place.backward
    if backward is None and not _MIXED[0] < body.backward_share < _MIXED[1]:
      backward = body.backward_share > 0.5
    place = _Place(place.in_pipeline or self._sends_to_stages(body.name), backward)
    run_of = functools.cache(lambda inside: self._run(inside, place))
    iterations = [(run_of(call.execution), int(call.times)) for call in executed.called(step)]
    for each, times in iterations:
      run.seconds += times * each.seconds
      _add(run.parts, each.parts, times)
      run.add_lanes(each, times)
    seconds = run.seconds - start
    run.events.append(Loop(step.name, step.op_name, start, seconds, iterations, place.backward, place.in_pipeline))

  def _conditional(self, run: Run, executed: execution.Execution, step: hlo.Instruction, place: _Place) -> None:
    runs = [(self._run(call.execution, place), call.times) for call in executed.called(step)]
    longest = max((each for each, _ in runs), key=lambda each: each.seconds)
    start = run.seconds
    run.seconds += longest.seconds
    run.events += [dataclasses.replace(event, start=start + event.start) for event in longest.events]
    run.add_lanes(longest)
    for each, share in runs:
      _add(run.parts, each.parts, share)
      run.parts[place.part(costs.DEVICES, step)] += share * (longest.seconds - each.seconds)

  @functools.cache  # noqa: B019 - a timeline lives as long as its module
  def _sends_to_stages(self, name: str) -> bool:
    """Whether stages send to each other in a computation itself, not in the loops within it."""
    computation = self._module.computations[name]
    called = (each for step in computation.instructions if step.opcode == "call" for each in self._module.callees(step))
    transfers = (self._model.transfer(computation, step) for step in computation.instructions)
    sent = (each for each in transfers if each is not None and each.kind in _TO_NEIGHBOURS)
    return any(STAGE in each.detail["axes"] for each in sent) or any(self._sends_to_stages(each.name) for each in called)


class _Lanes:
  """Which lanes are busy until when, within one execution of a computation, and which transfers are under way."""

  def __init__(self) -> None:
    self._free: dict[str, float] = collections.defaultdict(float)
    self._loaded: dict[str, tuple[hlo.Instruction, costs.Transfer]] = {}
    self._waiting: dict[str, tuple[float, costs.Transfer]] = {}
    self._sent: dict[str, tuple[float, costs.Transfer]] = {}

  def send(self, run: Run, step: hlo.Instruction, transfer: costs.Transfer, place: _Place) -> None:
    """Begins a transfer, or makes it ready: a SparseCore's program is loaded first and gets its operands later."""
    if transfer.is_asynchronous and not step.operand_names:
      self._loaded[step.name] = (step, transfer)
      return
    end = self._occupy(run, step, transfer)
    if not transfer.is_asynchronous:
      self._until(run, end, transfer, step, place)
      return
    self._waiting[step.name] = (end, transfer)
    if step.rendezvous:
      self._sent[step.rendezvous] = (end, transfer)

  def update(self, run: Run, step: hlo.Instruction) -> None:
    """Gives a transfer that is ready its operands."""
    for name in step.operand_names:
      if name in self._loaded:
        start, transfer = self._loaded.pop(name)
        self._waiting[step.name] = (self._occupy(run, start, transfer), transfer)
      elif name in self._waiting:
        self._waiting[step.name] = self._waiting.pop(name)

  def receive(self, step: hlo.Instruction) -> None:
    """What another slice sends arrives when what this slice sends has arrived there."""
    if step.rendezvous in self._sent:
      self._waiting[step.name] = self._sent[step.rendezvous]

  def wait(self, run: Run, step: hlo.Instruction, place: _Place) -> None:
    """Waits for the end of a transfer."""
    if (started := next((name for name in step.operand_names if name in self._waiting), None)) is not None:
      self._until(run, *self._waiting.pop(started), step, place)

  def _occupy(self, run: Run, step: hlo.Instruction, transfer: costs.Transfer) -> float:
    start = max([run.seconds, *(self._free[lane] for lane in transfer.lanes)])
    run.sent[transfer.part] += transfer.seconds
    run.sent_bytes[transfer.part] += transfer.detail["bytes"]
    for lane in transfer.lanes:
      self._free[lane] = start + transfer.seconds
      run.occupy(Event(step.name, lane, start, transfer.seconds, transfer.kind, step.op_name, transfer.detail))
    return start + transfer.seconds

  def _until(self, run: Run, end: float, transfer: costs.Transfer, step: hlo.Instruction, place: _Place) -> None:
    waited = max(end - run.seconds, 0.0)
    run.parts[place.part(transfer.part, step)] += waited
    run.seconds += waited


class _Place(NamedTuple):
  """Where in the program something stands: in a loop of the pipeline or not; of a loop's body the direction."""

  in_pipeline: bool = False
  backward: bool | None = None

  def part(self, what: str, step: hlo.Instruction) -> Part:
    backward = "transpose(" in step.op_name if self.backward is None else self.backward
    # Attention kernels lose the names around them; backward has none of forward's but to compute it again.
    again = "rematted_computation" in step.op_name or (backward and what == costs.KERNELS and "_fwd_" in step.name)
    return Part(what, backward, again, self.in_pipeline)
