# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads optimised HLO text, the result of `compiled.as_text()`, into computations of instructions.

It reads only what the figures need: names, opcodes, shapes, operands and the computations that an instruction runs. In
scheduled HLO (TPU) the instructions of a computation are in the order of execution.

`program` reads a whole program and accepts no other text: figures of a part of a program would be silently wrong.

The TPU compiler can spread a collective over fusions: one that starts it, others that carry it on beside their own
compute, and one that waits for it (`xla_tpu_enable_async_collective_fusion`, on v5e by default). Each contains the whole
collective. `program` reads these as any other asynchronous collective: an `async-start` and an `async-done`.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import graphlib
import math
import re

# f8e4m3fn, f8e5m2 and the like; f4e2m1fn.
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+(?:e\d+m\d+\w*)?|c64|c128)\[([0-9,]*)\]")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
# An asynchronous computation's last line names its thread. Kernels have lines of their own that start with a brace.
_END = re.compile(r"^\}(?:\s*$|, execution_thread=)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"\b(calls|to_apply|called_computations|branch_computations|true_computation|false_computation|body)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
# The to_apply of these operations combines two elements: it runs as part of the operation, not as a step of the program.
_COMBINERS = frozenset({"all-reduce", "all-reduce-start", "reduce", "reduce-scatter", "reduce-window", "scatter"})
_COMBINERS |= {"select-and-scatter", "sort"}
_STARTS, _WAITS = 'custom_call_target="AsyncCollectiveStart"', 'custom_call_target="AsyncCollectiveDone"'
_SPREAD = "async_collective_fusion_config"  # of a collective that is spread over fusions


class HloError(ValueError):
  """A text is not a whole HLO program, or has a part that the reader does not understand; the message says where."""


@dataclasses.dataclass(frozen=True)
class Array:
  """An array type, for example f32[8,128]."""

  dtype: str
  dims: tuple[int, ...]

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    bits = 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])
    return math.ceil(self.elements * bits / 8)

  @property
  def is_floating(self) -> bool:
    return self.dtype.startswith(("f", "bf"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
  """One line `name = type opcode(operands), attributes` of a computation, or `ROOT name = …`."""

  name: str
  type: str
  opcode: str
  operands: str
  attributes: str
  is_root: bool = False

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    """The arrays of the result; for a tuple, all its arrays."""
    return arrays_in(self.type)

  @functools.cached_property
  def operand_names(self) -> tuple[str, ...]:
    named = re.findall(r"%([\w.\-]+)", self.operands)
    return tuple(named) or tuple(re.findall(r"([\w.\-]+)\s*(?:,|$)", self.operands))

  @functools.cached_property
  def called(self) -> tuple[str, ...]:
    """Names of the computations that it runs as steps of the program: the body of a loop, none for a reduction."""
    if self.opcode in _COMBINERS:
      return ()
    found = [names for _, names in _CALLED.findall(_QUOTED.sub('""', self.attributes))]
    return tuple(name.strip().lstrip("%") for names in found for name in names.strip("{}").split(",") if name.strip())

  @property
  def op_name(self) -> str:
    """JAX's name for the operation's place in the program: `jit(train_step)/transpose(jvp())/…`."""
    return self.attribute(r'op_name="([^"]*)"') or ""

  @property
  def rendezvous(self) -> str:
    """The name under which slices send and receive."""
    return self.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"') or ""

  @property
  def noted_trips(self) -> int | None:
    """How often a `while` runs its body, as the compiler notes; None without a note."""
    known = self.attribute(r'known_trip_count"?[=:]\{"?n"?[=:]"?(\d+)')
    noted = known or self.attribute(r'estimated_trip_count"?[=:]"?(\d+)')
    return int(noted) if noted else None

  def attribute(self, pattern: str) -> str | None:
    """The group of a pattern, where it occurs in the attributes."""
    return match[1] if (match := re.search(pattern, self.attributes)) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
  """A named list of instructions, in the order of the text."""

  name: str
  instructions: tuple[Instruction, ...]

  @functools.cached_property
  def by_name(self) -> dict[str, Instruction]:
    return {instruction.name: instruction for instruction in self.instructions}

  @property
  def root(self) -> Instruction:
    """The instruction whose result the computation returns."""
    return next((step for step in self.instructions if step.is_root), self.instructions[-1])

  @functools.cached_property
  def backward_share(self) -> float:
    """Of the instructions that have JAX's names, the share that comes from the transposed program."""
    named = [step.op_name for step in self.instructions if step.op_name]
    return sum("transpose(" in name for name in named) / max(len(named), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
  """An HLO module."""

  computations: dict[str, Computation]  # the computations, by name
  entry: str  # name of the computation that the program starts with
  partitions: int  # number of devices over which the program is partitioned

  def steps(self) -> Iterator[tuple[Computation, Instruction]]:
    """All instructions, each with its computation."""
    return ((computation, step) for computation in self.computations.values() for step in computation.instructions)

  def callees(self, instruction: Instruction) -> tuple[Computation, ...]:
    return tuple(self.computations[name] for name in instruction.called if name in self.computations)


def arrays_in(text: str) -> tuple[Array, ...]:
  """All array types in the text, in order."""
  return tuple(Array(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(text))


@contextlib.contextmanager
def reading() -> Iterator[None]:
  """Turns any error while figures are read into an HloError: a compiler may print text that this reader does not know."""
  try:
    yield
  except HloError:
    raise
  except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
    raise HloError(f"The reader does not understand a part of the program: {type(error).__name__}: {error}.") from error


def program(text: str) -> Module:
  """Parses the text of a whole program, as the compiler prints it.

  Raises HloError if the text is cut off, has a part that the reader does not understand, or refers to a missing name.
  """
  with reading():
    module = parse(text)
    for computation in module.computations.values():
      _check_computation(module, computation)
    calls = graphlib.TopologicalSorter[str]()
    for computation, step in module.steps():
      calls.add(computation.name, *(callee.name for callee in module.callees(step)))
    try:
      calls.prepare()
    except graphlib.CycleError as error:
      raise HloError(f"The computation {error.args[1][0]} runs itself.") from error
    return _with_starts(module) if _STARTS in text else module


def _with_starts(module: Module) -> Module:
  """Reads a collective that is spread over fusions as a start and a done; in the fusions between there is none."""
  ends: dict[str, str] = {}  # the computations that start a collective or wait for one, and how
  channels: dict[str, str | None] = {}  # by computation
  for computation, step in module.steps():
    if step.opcode == "custom-call" and (_STARTS in step.attributes or _WAITS in step.attributes):
      ends[computation.name] = "async-start" if _STARTS in step.attributes else "async-done"
    if _SPREAD in step.attributes:
      channels[computation.name] = step.attribute(r"channel_id=(\d+)")
  starting = {name for name, opcode in ends.items() if opcode == "async-start"}
  computations = {}
  for computation in module.computations.values():
    started: dict[str | None, str] = {}
    steps = []
    for step in computation.instructions:
      end = next((name for name in step.called if name in ends), None) if step.opcode == "fusion" else None
      if end is not None:
        step = dataclasses.replace(step, opcode=ends[end])
        if end in starting:
          started[channels.get(end)] = step.name
        elif (start := started.pop(channels.get(end), None)) is not None:
          step = dataclasses.replace(step, operands=f"%{start}")
        else:
          raise HloError(f"{step.name} waits for a collective that nothing in {computation.name} starts.")
      elif _SPREAD in step.attributes and computation.name not in starting:
        step = dataclasses.replace(step, opcode=f"{step.opcode}-update")
      steps.append(step)
    computations[computation.name] = dataclasses.replace(computation, instructions=tuple(steps))
  return dataclasses.replace(module, computations=computations)


def _check_computation(module: Module, computation: Computation) -> None:
  of = f"in the computation {computation.name}"
  if sum(step.is_root for step in computation.instructions) != 1:
    raise HloError(f"There is no ROOT, or more than one, {of}.")
  if len(computation.by_name) != len(computation.instructions):
    raise HloError(f"Two instructions have the same name {of}.")
  for step in computation.instructions:
    operands = _QUOTED.sub('""', step.operands)
    if missing := [name for name in re.findall(r"%([\w.\-]+)", operands) if name not in computation.by_name]:
      raise HloError(f"The operand {missing[0]} of {step.name} is not defined {of}.")
    condition = step.attribute(r"condition=%?([\w.\-]+)") if step.opcode == "while" else None
    called = [*step.called, *([condition] if condition else [])]
    if missing := [name for name in called if name not in module.computations]:
      raise HloError(f"{step.name} runs {missing[0]}, which is not defined ({of}).")


def parse(text: str) -> Module:
  """Parses whole computations of one HLO module. Names may be missing.

  Raises HloError if there is no entry computation, or a line is not understood.
  """
  computations: dict[str, Computation] = {}
  entries: list[str] = []
  name = ""  # of the computation that has begun
  lines: list[str] = []

  def check(sound: bool, words: str) -> None:
    if not sound:
      raise HloError(words)

  for number, line in enumerate(text.splitlines(), start=1):
    if start := _COMPUTATION.match(line):
      check(not name, f"Line {number}: the computation {start[2]} begins within {name}.")
      check(start[2] not in computations, f"Line {number}: the computation {start[2]} is defined twice.")
      name, lines = start[2], []
      entries += [name] if start[1] else []
    elif _END.match(line):
      check(bool(name), f"Line {number} ends a computation, but none has begun.")
      computations[name] = Computation(name=name, instructions=tuple(filter(None, map(_parse_instruction, lines))))
      name, lines = "", []
    elif _INSTRUCTION.match(line):
      is_sound = bool(name) and _parse_instruction(line) is not None
      check(is_sound, f"Line {number} is no instruction in a computation: {line.strip()[:100]}")
      lines.append(line)
    elif lines:
      lines[-1] += f" {line}"  # the metadata of kernels have lines of their own
  check(not name, f"The text ends within the computation {name}.")
  check(bool(entries), "No ENTRY computation: not the text of an HLO module.")
  check(len(entries) == 1, f"There are {len(entries)} entry computations.")
  partitions = re.search(r"num_partitions=(\d+)", text)
  return Module(computations=computations, entry=entries[-1], partitions=int(partitions[1]) if partitions else 1)


def _parse_instruction(line: str) -> Instruction | None:
  if not (match := _INSTRUCTION.match(line)):
    return None
  rest = match[3]
  end_of_type = _closing(rest, 0) + 1 if rest.startswith("(") else len(rest.partition(" ")[0])
  if not (opcode := _OPCODE.match(rest, end_of_type)):
    return None
  end = _closing(rest, opcode.end() - 1)
  return Instruction(
      name=match[2],
      type=rest[:end_of_type],
      opcode=opcode[1],
      operands=rest[opcode.end() : end],
      attributes=rest[end + 1 :],
      is_root=bool(match[1]),
  )


def _closing(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at start."""
  depth = 0
  for match in re.compile(r"[()]").finditer(text, start):
    depth += 1 if match[0] == "(" else -1
    if depth == 0:
      return match.start()
  return len(text)
