# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The HLO reader, on short texts in the forms that compilers print."""

import pytest

from maxtext_pp_ext.compiled.program import hlo, integers

LOOP = """HloModule step, is_scheduled=true, num_partitions=8

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x.1 = f32[4,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %one = s32[]{:T(128)} constant(1)
  %j = s32[]{:T(128)} add(%i, %one)
  ROOT %next = (s32[]{:T(128)}, /*index=1*/f32[4,8]{1,0:T(8,128)(2,1)}) tuple(%j, %x.1)
}

%condition (p.1: (s32[], f32[4,8])) -> pred[] {
  %p.1 = (s32[], f32[4,8]) parameter(0)
  %counter = s32[] get-tuple-element(%p.1), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,8]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[4,8]{1,0}) while(%start), condition=%condition, body=%body LOOP_NOTE
  ROOT %y = f32[4,8]{1,0} get-tuple-element(%loop), index=1, metadata={op_name="jit(f)/transpose(jvp())/while"}
}
"""


def instruction(line: str) -> hlo.Instruction:
  """One instruction, parsed as the only one of a module."""
  return hlo.parse(f"ENTRY %main (a: f32[]) -> f32[] {{\n  {line}\n}}\n").computations["main"].instructions[0]


def test_a_module_has_its_computations_entry_and_partitions():
  module = hlo.parse(LOOP)
  assert set(module.computations) == {"body", "condition", "main"}
  assert (module.entry, module.partitions) == ("main", 8)
  assert [step.opcode for step in module.computations["main"].instructions] == [
      "parameter",
      "constant",
      "tuple",
      "while",
      "get-tuple-element",
  ]


def test_a_tuple_type_with_layouts_and_comments_gives_its_arrays():
  step = hlo.parse(LOOP).computations["body"].by_name["next"]
  assert step.opcode == "tuple"
  assert step.arrays == (hlo.Array("s32", ()), hlo.Array("f32", (4, 8)))


def test_operands_are_found_with_and_without_percent_signs_and_types():
  assert instruction("%d = f32[2] add(%a.1, %b-2)").operand_names == ("a.1", "b-2")
  assert instruction("d = f32[2] add(a.1, b-2)").operand_names == ("a.1", "b-2")
  assert instruction("%d = f32[2] add(f32[2]{0} %a.1, f32[2]{0} %b)").operand_names == ("a.1", "b")


def test_text_without_an_entry_is_refused():
  with pytest.raises(ValueError, match="ENTRY"):
    hlo.parse("%f (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n")


@pytest.mark.parametrize(
    "note, trips",
    [
        (', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}', 7),
        (', frontend_attributes={"estimated_trip_count"="6"}', 6),
        ("", 5),  # as the counter says
    ],
)
def test_a_loops_trip_count_is_the_compilers_note_or_else_its_counters(note, trips):
  assert _trips(LOOP.replace(" LOOP_NOTE", note)) == trips


@pytest.mark.parametrize(
    "changes, trips",
    [
        ({"constant(1)": "constant(2)", "constant(5)": "constant(8)"}, 4),  # unrolled by the compiler
        ({"constant(1)": "constant(2)"}, 3),
        ({"constant(0)": "constant(3)"}, 2),
        ({"direction=LT": "direction=LE"}, 6),
        ({"direction=LT": "direction=NE"}, 5),
        ({"compare(%counter, %bound), direction=LT": "compare(%bound, %counter), direction=GT"}, 5),
        ({"add(%i, %one)": "subtract(%i, %one)", "constant(0)": "constant(7)", "direction=LT": "direction=GE"}, 3),
        ({"constant(0)": "constant(5)"}, 0),
        ({"add(%i, %one)": "multiply(%i, %one)"}, None),
        ({"add(%i, %one)": "add(%i, %i)"}, None),
        ({"constant(1)": "constant(0)"}, None),  # never ends
        ({"constant(5)": "parameter(1)"}, None),
        ({"constant(0)": "parameter(1)"}, None),
    ],
)
def test_a_trip_count_without_a_note_follows_from_the_counters_start_step_and_bound(changes, trips):
  text = LOOP.replace(" LOOP_NOTE", "")
  for old, new in changes.items():
    assert old in text
    text = text.replace(old, new)
  assert _trips(text) == trips


def _trips(text: str) -> int | None:
  module = hlo.parse(text)
  return integers.entry(module).trips(module.computations["main"].by_name["loop"])


def test_an_asynchronous_computation_ends_where_its_thread_is_named_and_a_kernel_does_not():
  text = """%called (p: f32[2]) -> f32[4] {
  ROOT %gather = f32[4] all-gather(%p), replica_groups={{0,1}}
}, execution_thread="sparsecore"

ENTRY %main (a: f32[2]) -> f32[2] {
  %kernel = f32[2] custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"body":
}}, metadata={op_name="kernel"}
  ROOT %b = f32[2] negate(%kernel)
}
"""
  module = hlo.parse(text)
  assert [step.name for step in module.computations["called"].instructions] == ["gather"]
  assert [step.name for step in module.computations["main"].instructions] == ["kernel", "b"]


def test_what_an_instruction_runs_is_named_and_what_a_reduction_combines_with_is_not():
  assert instruction("%f = f32[2] fusion(%a), kind=kLoop, calls=%fused.1").called == ("fused.1",)
  assert instruction("%f = f32[2] while(%a), condition=%c, body=%b.sunk").called == ("b.sunk",)
  assert instruction("%f = f32[2] conditional(%a), branch_computations={%one, %two}").called == ("one", "two")
  assert instruction("%f = f32[2] call(%a), to_apply=%g").called == ("g",)
  assert instruction("%f = f32[2] all-reduce(%a), to_apply=%add").called == ()


@pytest.mark.parametrize(
    "text, size", [("f32[3,5]", 60), ("bf16[4]", 8), ("pred[7]", 7), ("s4[3]", 2), ("f8e4m3fn[6]", 6), ("f32[]", 4)]
)
def test_bytes_of_an_array_follow_its_dtype(text, size):
  (array,) = hlo.arrays_in(text)
  assert array.bytes == size
  assert array.is_floating == text.startswith(("f", "bf"))


def test_the_program_position_of_an_instruction_is_read():
  assert hlo.parse(LOOP).computations["main"].by_name["y"].op_name == "jit(f)/transpose(jvp())/while"
