# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How long each instruction of a scheduled TPU program takes, and on which lane.

- Compute: the compiler's `estimated_cycles` at the chip's clock. They are of all cores of a device together.
- Pallas kernels have no such estimate. Their FLOPs (`kernels`) count at a share of the peak, their bytes at HBM's rate.
- What the compiler writes no cycles for and is larger than `_SMALL_BYTES`: bytes read and written at the HBM's rate.
- Collectives: bytes over the links that `torus` finds. Of a ragged all-to-all the bytes that balanced routing sends: its
  buffers are as large as if all tokens went to one device.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
import re
from typing import Any

from maxtext_pp_ext.compiled.program import collectives, hlo, integers, products
from maxtext_pp_ext.compiled.projection import kernels, torus
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.hardware.kernels import EFFICIENCY

PRODUCTS, KERNELS, OTHER = "products", "kernels", "other compute"
COMPUTED = (PRODUCTS, KERNELS, OTHER)
TRANSFERS, MEMORY, DEVICES = "exposed transfers", "waiting for memory", "waiting for other devices"
SPARSECORE, TO_HOST, DMA = "SparseCore", "host", "HBM"

_NOTHING = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency"})
_NOTHING |= {"partition-id", "replica-id", "optimization-barrier", "opt-barrier", "recv"}
_SMALL_BYTES = 1 << 16
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_HOST_MEMORY = "S(5)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
  """One execution of a transfer."""

  kind: str  # of the collective; "copy" between memories
  part: str  # what the time counts as that compute waits for it
  seconds: float  # on its lanes
  lanes: tuple[str, ...]  # that it occupies
  is_asynchronous: bool  # whether a later instruction waits for it
  detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # mesh axes, bytes and payload


class Costs:
  """Of one scheduled program on chips of a torus.

  The mesh is its axes' sizes by name, in order. `payloads` has those of collectives, by computation and name of the
  instruction.
  """

  def __init__(
      self,
      module: hlo.Module,
      chip: chips.Chip,
      grid: torus.Torus,
      mesh: Mapping[str, int],
      payloads: Mapping[tuple[str, str], str | None],
  ):
    self._module, self._chip, self._grid, self._mesh, self._payloads = module, chip, grid, dict(mesh), payloads
    self._route = functools.cache(grid.route)
    self._network = chip.network_measured or chip.network
    ragged = (found for found in module.steps() if found[1].opcode.removesuffix("-start") == collectives.RAGGED)
    self._filled = dict(itertools.starmap(collectives.balanced_rows, ragged))

  def compute(self, scope: integers.Scope, step: hlo.Instruction) -> tuple[str, float]:
    """The kind of an instruction's compute, and its seconds."""
    if step.opcode in _NOTHING:
      return OTHER, 0.0
    computation = scope.computation
    operands = collectives.operand_arrays(computation, step)
    if step.opcode == "custom-call":
      if '"tpu_custom_call"' not in step.attributes:
        return OTHER, 0.0
      found = kernels.kernel(step, operands, functools.partial(_blocks, scope, step), self._filled)
      reached = self._chip.flops * EFFICIENCY[found.kind]
      return KERNELS, max(found.flops / reached, found.bytes / self._chip.hbm_bandwidth)
    kind = PRODUCTS if self._is_product(step.name, computation.name) else OTHER
    if cycles := _CYCLES.search(step.attributes):
      return kind, int(cycles[1]) / self._chip.clock
    moved = _moved(step, operands)
    rate = self._chip.host_bandwidth if _HOST_MEMORY in step.type else self._chip.hbm_bandwidth
    return kind, moved / rate if moved >= _SMALL_BYTES else 0.0

  def transfer(self, computation: hlo.Computation, step: hlo.Instruction) -> Transfer | None:
    """The transfer that an instruction is, or starts; None if it is none."""
    if (found := collectives.collective_at(self._module, computation, step)) is None:
      return self._copy(computation, step) if step.opcode.endswith("-start") else None
    source, collective = found
    sent = collective.balanced_bytes
    lanes, seconds, axes = self._collective(source, dataclasses.replace(collective, wire_bytes=sent))
    payload = self._payloads.get((computation.name, step.name)) or "not told"
    return Transfer(
        kind=collective.kind,
        part=f"{TRANSFERS}: {payload} over {'+'.join(axes) or 'one device'}",
        seconds=seconds,
        lanes=(*lanes, SPARSECORE) if step.opcode == "call-start" else lanes,
        is_asynchronous=step.opcode.endswith("-start") or step.opcode == "send",
        detail={"axes": axes, "bytes": sent, "payload": payload},
    )

  def hides_collective(self, step: hlo.Instruction) -> bool:
    """Whether a fusion runs a collective beside its compute, of which only the compute is counted."""
    if step.opcode != "fusion" or collectives.collective_inside(self._module, step):
      return False
    inner = [(callee, each) for callee in self._module.callees(step) for each in callee.instructions]
    return any(collectives.collective_of(self._module, callee, each) for callee, each in inner)

  def _copy(self, computation: hlo.Computation, step: hlo.Instruction) -> Transfer:
    """A copy between memories: `copy-start`, `slice-start` and others like them."""
    moved = _copied(computation, step)
    lane, rate = (TO_HOST, self._chip.host_bandwidth) if _HOST_MEMORY in step.type else (DMA, self._chip.hbm_bandwidth)
    return Transfer(
        kind="copy",
        part=MEMORY if lane == DMA else f"{TRANSFERS}: to the host's memory",
        seconds=moved / rate,
        lanes=(lane,),
        is_asynchronous=True,
        detail={"bytes": moved},
    )

  def _collective(
      self, source: hlo.Instruction, collective: collectives.Collective
  ) -> tuple[tuple[str, ...], float, tuple[str, ...]]:
    """Lanes, seconds and mesh axes."""
    if collective.kind == collectives.BETWEEN_SLICES:
      slices = [device.slice for device in self._grid.devices]
      axes = torus.axes_of_groups([slices.index(each) for each in dict.fromkeys(slices)], self._mesh)
      return (torus.DCN,), collective.wire_bytes / self._network, axes
    if collective.kind == "collective-permute":
      listed = source.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
      pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", listed or "")]
      route = self._grid.permute(pairs)
      axes = torus.axes_of_groups(next((pair for pair in pairs if pair[0] != pair[1]), ()), self._mesh)
      seconds = collective.wire_bytes / route.rate
    else:
      group = collectives.first_group(self._module, source)
      route, axes = self._route(group), torus.axes_of_groups(group, self._mesh)
      rate = self._grid.all_to_all_rate(group) if "all-to-all" in collective.kind else route.rate
      seconds = collective.wire_bytes / rate
    return route.lanes, seconds / chips.LINK_EFFICIENCY + route.hops * chips.HOP_SECONDS, axes

  @functools.cache  # noqa: B019 - the costs live as long as their module
  def _is_product(self, name: str, where: str) -> bool:
    computation = self._module.computations[where]
    step = computation.by_name[name]
    return products.dot_flops(computation, step) > 0 or any(
        self._is_product(inner.name, callee.name)
        for callee in self._module.callees(step)
        for inner in callee.instructions
    )


def _moved(step: hlo.Instruction, operands: Sequence[hlo.Array]) -> float:
  """Bytes read and written in HBM. What updates a part of its operand in place reads and writes that part."""
  if step.opcode == "dynamic-update-slice" and len(operands) > 1:
    return 2.0 * operands[1].bytes
  if step.opcode in ("dynamic-slice", "slice", "gather"):
    return 2.0 * sum(array.bytes for array in step.arrays)
  return float(sum(array.bytes for array in (*operands, *step.arrays)))


def _copied(computation: hlo.Computation, step: hlo.Instruction) -> int:
  """Bytes that an asynchronous copy moves. Its type holds operands and result side by side, and a context."""
  operands = collectives.operand_arrays(computation, step)
  if "update-slice" in step.opcode or "update-slice" in step.attributes:
    return operands[1].bytes if len(operands) > 1 else 0
  if step.opcode == "copy-start" or len(step.arrays) <= len(operands):
    return max((array.bytes for array in step.arrays), default=0)
  return step.arrays[len(operands)].bytes


def _blocks(scope: integers.Scope, step: hlo.Instruction) -> Any:
  """The blocks that an attention kernel computes, bool [heads, blocks of queries, blocks of keys]; None if unknown."""
  try:
    return scope.value(step.operand_names[1])[0] != 0
  except integers.UnknownError:
    return None
