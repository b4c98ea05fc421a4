# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Classification of collectives, on a program with a loop, an asynchronous gather and tuples, as compilers print them."""

import pytest

from maxtext_pp_ext.compiled import compare, reading, spans
from maxtext_pp_ext.compiled.program import dataflow

STEP = r"""HloModule step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,8], f32[4,8])) -> (s32[], f32[8,8], f32[4,8]) {
  %p = (s32[], /*index=1*/f32[8,8]{1,0:T(8,128)}, f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = f32[8,8] get-tuple-element(%p), index=1
  %x = f32[4,8] get-tuple-element(%p), index=2
  %y = f32[4,8] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %passed = f32[4,8] collective-permute(%y), source_target_pairs={{0,1},{1,0}}
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %next = (s32[], f32[8,8], f32[4,8]) tuple(%j, %w, %passed)
}

%condition (p.1: (s32[], f32[8,8], f32[4,8])) -> pred[] {
  %p.1 = (s32[], f32[8,8], f32[4,8]) parameter(0)
  %counter = s32[] get-tuple-element(%p.1), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}

ENTRY %main (kernel: f32[2,8], nu: f32[2,8], rows: f32[4,8]) -> (f32[2,8], f32[8,8], s32[4], f32[]) {
  %kernel = f32[2,8] parameter(0), metadata={op_name="state[\'model\'][\'kernel\'].value"}
  %nu = f32[2,8] parameter(1), metadata={op_name="state[\'optimizer\'][\'nu\'].value"}
  %rows = f32[4,8] parameter(2), metadata={op_name="data[\'inputs\']"}
  %gather = (f32[2,8], f32[8,8]) all-gather-start(%kernel), replica_groups={{0,1,2,3}}, dimensions={0}
  %gathered = f32[8,8] all-gather-done(%gather)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8,8], f32[4,8]) tuple(%zero, %gathered, %rows)
  %loop = (s32[], f32[8,8], f32[4,8]) while(%init), condition=%condition, body=%body
  %out = f32[4,8] get-tuple-element(%loop), index=2
  %used = f32[8,8] get-tuple-element(%loop), index=1
  %gradient = f32[8,8] dot(%out, %rows), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %reduced = f32[8,8] all-reduce(%gradient), replica_groups={{0,1,2,3}}, to_apply=%add
  %part = f32[2,8] slice(%reduced), slice={[0:2], [0:8]}
  %new = f32[2,8] add(%part, %nu)
  %updated = f32[8,8] all-gather(%new), replica_groups={{0,1,2,3}}, dimensions={0}
  %ids = s32[4] convert(%rows)
  %mask = s32[4] all-reduce(%ids), replica_groups={{0,1,2,3}}, to_apply=%add
  %loss = f32[] reduce(%out, %zero), dimensions={0,1}, to_apply=%add
  %mean = f32[] all-reduce(%loss), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %state = (f32[2,8], f32[8,8], s32[4], f32[]) tuple(%new, %updated, %mask, %mean)
}
"""
EXPECTED = {
    "gather": "weights",
    "passed": "activations",
    "reduced": "gradients",
    "updated": "weights",
    "mask": "elsewhere",
    "mean": "elsewhere",
}


def judged(text: str) -> tuple[list[spans.Span], list[str | None]]:
  read = reading.step(text, batch="data[", optimizer="state['optimizer']")
  return list(read.collectives), list(read.payloads)


def test_each_collective_is_told_from_where_its_data_come_from_and_go_to():
  found, what = judged(STEP)
  assert {span.name: each for span, each in zip(found, what, strict=True)} == EXPECTED
  assert {span.name: span.depth for span in found} == dict.fromkeys(EXPECTED, 0) | {"passed": 1}


def test_a_reduction_that_is_multiplied_with_afterwards_is_of_activations():
  text = STEP.replace("%new = f32[2,8] add(%part, %nu)", "%new = f32[2,8] dot(%part, %nu), lhs_contracting_dims={0}")
  found, what = judged(text)
  assert dict(zip([span.name for span in found], what, strict=True))["reduced"] == "activations"


def test_a_ragged_all_to_all_dispatches_tokens():
  groups = "replica_groups={{0,1,2,3}}"
  text = STEP.replace("collective-permute(%y), source_target_pairs={{0,1},{1,0}}", f"ragged-all-to-all(%y, %x), {groups}")
  rows = compare.transfers(*judged(text))
  expected = {"payload": "dispatch", "kind": "ragged-all-to-all", "loop_depth": 1, "wire_bytes": 640, "count": 5}
  assert expected | {"balanced_bytes": 480} in rows


SLICES = 'frontend_attributes={_xla_host_transfer_rendezvous="NAME",_xla_megascale_target="{1,2}x{0:1}"TYPE}'


def between_slices(text: str, name: str, operand: str, result: str, transfer: str) -> str:
  """The collective `name` as the TPU compiler writes it between slices: a send and a receive."""
  (line,) = [line for line in text.splitlines() if line.startswith(f"  %{name} = ")]
  attributes = SLICES.replace("NAME", name).replace("TYPE", transfer)
  new = [
      f"  %{name}.token = token[] after-all()",
      f"  %{name}.send = ({result}, u32[], token[]) send(%{operand}, %{operand}), channel_id=1, {attributes}",
      f"  %{name}.sent = token[] send-done(%{name}.send), channel_id=1",
      f"  %{name}.recv = ({result}, u32[], token[]) recv(%{name}.token), channel_id=2, {attributes}",
      f"  %{name}.done = ({result}, token[]) recv-done(%{name}.recv), channel_id=2",
      f"  %{name} = {result} get-tuple-element(%{name}.done), index=0",
  ]
  return text.replace(line, "\n".join(new))


def test_what_is_sent_to_another_slice_is_told_from_what_becomes_of_it_there():
  text = between_slices(STEP, "passed", "y", "f32[4,8]", "")
  transfer = ',_xla_megascale_transfer_type="ALL_REDUCE"'
  text = between_slices(text, "reduced", "gradient", "f32[8,8]", transfer)
  found, what = judged(text)
  told = dict(zip([span.name for span in found], what, strict=True))
  assert (told["passed.send"], told["reduced.send"]) == ("activations", "gradients")
  sent = {span.name: span.wire_bytes for span in found}
  assert sent["passed.send"] == 5 * 4 * 8 * 4 and sent["reduced.send"] == 2 * 8 * 8 * 4 / 2


def test_without_names_of_arguments_nothing_is_told():
  found, what = judged(STEP.replace("data[", "x["))
  assert what == [None] * len(found)
  assert {row["payload"] for row in compare.transfers(found, what)} == {compare.UNTOLD}


def test_transfers_are_summed_by_what_they_carry_kind_and_loops():
  rows = compare.transfers(*judged(STEP))
  assert {"payload": "activations", "kind": "collective-permute", "loop_depth": 1, "wire_bytes": 640, "count": 5} in rows
  # (4 − 1) / 4 of 8 × 8 × 4 bytes, twice that for the all-reduce
  assert {"payload": "gradients", "kind": "all-reduce", "loop_depth": 0, "wire_bytes": 384, "count": 1} in rows
  assert compare.wire_bytes({"transfers": rows}, payload="weights", kind="all-gather") == 2 * 192
  assert [row["wire_bytes"] for row in rows] == sorted((row["wire_bytes"] for row in rows), reverse=True)


def test_overlap_is_of_the_bytes_that_have_compute_meanwhile():
  text = STEP.replace(
      "  %gathered = f32[8,8] all-gather-done(%gather)",
      "  %meanwhile = f32[4,4] dot(%rows, %rows), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n"
      "  %gathered = f32[8,8] all-gather-done(%gather)",
  )
  total = 192 + 640 + 384 + 192 + 24 + 6
  for program, share in ((STEP, 0.0), (text, 192 / total)):
    found = compare.overlap(judged(program)[0])
    assert found["compute_meanwhile"] == pytest.approx(share, abs=1e-3)
    assert found["asynchronous"] == pytest.approx(192 / total, abs=1e-3)


@pytest.mark.parametrize(
    "text, paths",
    [
        ("f32[2]{0}", [()]),
        ("()", []),
        ("((), (), s32[]{:S(2)})", [(2,)]),
        ("((bf16[1,1]{4,3:T(8,128)(2,1)}), /*index=1*/f8e4m3fn[16]{0}, (f32[], s32[2]))", [(0, 0), (1,), (2, 0), (2, 1)]),
    ],
)
def test_the_arrays_of_a_type_have_places(text, paths):
  assert dataflow._paths(text) == paths  # pylint: disable=protected-access
