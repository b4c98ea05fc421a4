# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traffic and FLOPs of a step, on hand-made HLO and on programs compiled here."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.compiled import compare, reading, spans
from maxtext_pp_ext.compiled.program import collectives, execution, hlo, products

# A whole array of 1024 float32; groups of 4 of 8 devices.
SIZE, GROUP = 4096, 4


def of(line: str, *, computation: str = "main", more: str = "") -> dict[str, Any]:
  """The figures of one instruction in the entry computation, or in a computation that the entry calls."""
  if computation == "main":
    text = f"ENTRY %main (a: f32[]) -> f32[] {{\n  {line}\n}}\n"
  else:
    text = f"%{computation} (a: f32[]) -> f32[] {{\n  {line}\n}}\n\n"
    text += f"ENTRY %main (a: f32[]) -> f32[] {{\n  %f = f32[] fusion(%a), calls=%{computation}\n}}\n"
  return analyse(f"HloModule m, num_partitions=8\n{more}{text}")


def analyse(text: str) -> dict[str, Any]:
  run = execution.of_module(hlo.parse(text))
  found = tuple(spans.spans(run))
  return compare.of_step(reading.Step(run=run, collectives=found, payloads=(None,) * len(found)))


def by_kind(figures: dict[str, Any]) -> dict[str, int]:
  """Bytes by kind of collective; no kind is at two depths of loops here."""
  return {row["kind"]: row["wire_bytes"] for row in figures["transfers"]}


@pytest.mark.parametrize(
    "kind, line, wire",
    [
        ("all-gather", "%g = f32[1024] all-gather(%a), GROUPS, dimensions={0}", SIZE * 3 / 4),
        ("all-gather", "%g = (f32[256], f32[1024]) all-gather-start(%a), GROUPS, dimensions={0}", SIZE * 3 / 4),
        ("all-gather", "%g = (f32[512], f32[512]) all-gather(%a, %b), GROUPS, dimensions={0}", SIZE * 3 / 4),
        ("reduce-scatter", "%g = f32[256] reduce-scatter(%a), GROUPS, to_apply=%add", SIZE * 3 / 4),
        ("all-reduce", "%g = f32[1024] all-reduce(%a), GROUPS, to_apply=%add", 2 * SIZE * 3 / 4),
        ("all-reduce", "%g = (f32[512], f32[512]) all-reduce-start(%a, %b), GROUPS, to_apply=%add", 2 * SIZE * 3 / 4),
        ("all-to-all", "%g = f32[1024] all-to-all(%a), GROUPS", SIZE * 3 / 4),
        ("collective-permute", "%g = f32[1024] collective-permute(%a), source_target_pairs={{0,1}}", SIZE),
        (
            "collective-permute",
            "%g = (f32[1024], f32[1024], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1}}",
            SIZE,
        ),
        (collectives.BETWEEN_SLICES, "%g = (f32[1024], u32[], token[]) send(%a, %t), channel_id=1", SIZE),
    ],
)
def test_a_collective_puts_on_the_wire_what_a_device_has_to_send(kind, line, wire):
  found = of(line.replace("GROUPS", "replica_groups=[2,4]<=[8]"))
  assert by_kind(found) == {kind: wire}
  assert found["count"] == {kind: 1}


@pytest.mark.parametrize("sent, received", [(256, 1024), (1024, 256), (256, 256)])
@pytest.mark.parametrize("is_started", [False, True])
def test_a_ragged_all_to_all_counts_as_its_buffer_and_as_what_balanced_routing_sends(sent, received, is_started):
  line = f"%g = f32[{received}] ragged-all-to-all(%a, %b, %o), replica_groups=[2,4]<=[8]"
  if is_started:
    result = f"((f32[{sent}], f32[{received}], s32[4]), f32[{received}])"
    line = line.replace(f"f32[{received}] ragged-all-to-all", f"{result} ragged-all-to-all-start")
  buffers = [f"%a = f32[{sent}] parameter(0)", f"%b = f32[{received}] parameter(1)", "%o = s32[4] parameter(2)"]
  found = of("\n  ".join([*buffers, line]))
  assert by_kind(found) == {"ragged-all-to-all": 4 * received}
  assert found["transfers"][0]["balanced_bytes"] == 4 * 256 * 3 / 4


@pytest.mark.parametrize(
    "notation, first",
    [
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("replica_groups={{0,1},{2,3}}", (0, 1)),
        ("replica_groups=mesh['stage'=2,'fsdp'=2,'data'=2] {'stage','fsdp'}", (0, 2, 4, 6)),
        # jaxlib 0.11.1
        ("replica_groups=mesh['stage'=1,'fsdp'=4,'data'=2], device_ids=([4,2]T(1,0)) {'fsdp'}", (0, 4, 1, 5)),
        ("replica_groups=mesh['fsdp'=4,'data'=2], device_ids=(7,6,5,4,3,2,1,0) {'data'}", (7, 6)),
        ("replica_groups={}", tuple(range(8))),  # all
    ],
)
def test_the_first_group_is_read_in_every_notation(notation, first):
  module = hlo.parse(
      f"HloModule m, num_partitions=8\nENTRY %main (a: f32[]) -> f32[] {{\n  %g = f32[8] all-gather(%a), {notation}\n}}\n"
  )
  assert collectives.first_group(module, module.computations["main"].instructions[0]) == first


@pytest.mark.parametrize(
    "transfer, target, wire",
    [
        ("ALL_GATHER", "{1,2,3,4}x{0:7}", 3 * SIZE),  # the operand is what each contributes
        ("ALL_REDUCE", "{1:4}x{0:7}", 2 * SIZE * 3 / 4),
        ("REDUCE_SCATTER", "{{1,2},{3,4}}x{0:7}", SIZE / 2),
        ("ALL_TO_ALL", "{1,3}x{0:7}", SIZE / 2),
    ],
)
def test_between_slices_a_send_is_one_slices_part_in_a_collective(transfer, target, wire):
  attributes = f'_xla_megascale_target="{target}",_xla_megascale_transfer_type="{transfer}"'
  line = f"%g = (f32[1024], u32[], token[]) send(%a, %t), channel_id=1, frontend_attributes={{{attributes}}}"
  assert by_kind(of(line)) == {collectives.BETWEEN_SLICES: wire}


def test_waiting_for_a_collective_does_not_count_again():
  assert not of("%g = f32[1024] all-gather-done(%s)")["count"]


def test_an_all_reduce_that_the_tpu_compiler_fused_with_a_slice_is_a_reduce_scatter():
  line = "%g = f32[1024] all-reduce(%a), replica_groups=[2,4]<=[8], to_apply=%add"
  assert by_kind(of(line, computation="all-reduce-scatter.3")) == {"reduce-scatter": SIZE * 3 / 4}


def test_loops_multiply_what_their_bodies_do():
  text = """HloModule m, num_partitions=4
%inner (p: f32[8]) -> f32[8] {
  ROOT %permute = f32[8] collective-permute(%p), source_target_pairs={{0,1}}
}

%outer (p: f32[8]) -> f32[8] {
  %w = f32[8] while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %permute.1 = f32[8] collective-permute(%w), source_target_pairs={{0,1}}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  ROOT %w.1 = f32[8] while(%a), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
}
"""
  found = analyse(text)
  assert found["count"]["collective-permute"] == 5 * (3 + 1)
  assert compare.wire_bytes(found) == 20 * 32
  unknown = analyse(text.replace('"known_trip_count":{"n":"3"}', ""))
  assert unknown["count"]["collective-permute"] == 5 * 2


def test_of_a_conditional_that_depends_on_data_the_branch_counts_that_sends_most_or_else_computes_most():
  dot = "%d = f32[8,8] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
  gather = f"%g = f32[1024] all-gather(%b), replica_groups=[2,{GROUP}]<=[8], dimensions={{0}}"
  of_branches = lambda *branches: of(
      "%p = pred[] parameter(0)\n  %f = f32[8,8] conditional(%p, %x, %x), true_computation=%one, false_computation=%two",
      more="".join(
          f"%{name} (a: f32[8,8]) -> f32[8,8] {{\n  %a = f32[8,8] parameter(0)\n  {branch}\n}}\n\n"
          for name, branch in zip(("one", "two"), branches, strict=True)
      ),
  )
  counted = lambda *branches: (compare.wire_bytes(of_branches(*branches)), of_branches(*branches)["dot_flops"])
  for branches in ((dot, dot), (dot, "%n = f32[8,8] negate(%a)"), ("%n = f32[8,8] negate(%a)", dot)):
    assert counted(*branches) == (0, 2 * 8**3)
  for branches in ((gather, gather), (dot, gather), (gather, dot)):
    assert counted(*branches) == (SIZE * 3 / 4, 0)


def test_gathers_of_weights_are_counted_by_array_and_small_or_integer_ones_are_not():
  groups = "replica_groups=[2,4]<=[8]"
  assert of(f"%g = (bf16[1024,1024], f32[1024,1024]) all-gather(%a, %b), {groups}")["weight_gathers"] == 2
  assert of(f"%g = bf16[1024] all-gather(%a), {groups}")["weight_gathers"] == 0
  assert of(f"%g = s32[1024,1024] all-gather(%a), {groups}")["weight_gathers"] == 0


def test_a_convolution_that_lies_mostly_on_padding_has_the_flops_of_the_dot_it_stands_for():
  # [4096, 8192] × [8192, 64, 128], the 64 heads as a window over an operand of width 1.
  text = """ENTRY %main (x: bf16[4096,8192,1], w: bf16[64,8192,128]) -> bf16[4096,64,128] {
  %x = bf16[4096,8192,1] parameter(0)
  %w = bf16[64,8192,128] parameter(1)
  ROOT %c = bf16[4096,64,128] convolution(%x, %w), window={size=64 pad=63_63 rhs_reversal=1}, dim_labels=bf0_0io->b0f
}
"""
  computation = hlo.parse(text).computations["main"]
  dot = 2 * 4096 * 8192 * 64 * 128
  assert products.dot_flops(computation, computation.by_name["c"], padding=False) == dot
  assert products.dot_flops(computation, computation.by_name["c"]) == 64 * dot


@pytest.fixture(name="mesh")
def _mesh():
  return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("stage", "fsdp"))


def test_flops_of_a_compiled_loop_of_matrix_products_are_counted_per_device(mesh):
  def program(x, w):
    return jax.lax.fori_loop(0, 6, lambda _, x: jnp.tanh(x @ w), x)

  sharded, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
  compiled = jax.jit(program, in_shardings=(sharded, whole), out_shardings=sharded).lower(
      jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 32), jnp.float32)
  )
  found = analyse(compiled.compile().as_text())
  assert found["dot_flops"] == 6 * 2 * (64 // 4) * 32 * 32


def test_traffic_of_a_compiled_program_is_that_of_the_collectives_it_asks_for(mesh):
  def program(x):
    gathered = jax.lax.all_gather(x, "fsdp", tiled=True)
    summed = jax.lax.psum_scatter(gathered, "fsdp", tiled=True)
    return jax.lax.ppermute(summed, "stage", [(0, 1), (1, 0)])

  mapped = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False))
  text = mapped.lower(jax.ShapeDtypeStruct((4096, 8), jnp.float32)).compile().as_text()
  found = analyse(text)
  whole = 4096 * 8 * 4
  assert by_kind(found) == {
      "all-gather": whole * 3 / 4,
      "reduce-scatter": whole * 3 / 4,
      "collective-permute": whole / 4,
  }
