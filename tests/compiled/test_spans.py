# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The instructions between start and done of a collective, and the report of them."""

import pytest

from benchmarks import overlap, tables
from maxtext_pp_ext.compiled import spans
from maxtext_pp_ext.compiled.program import execution, hlo

# A gather of 32 MiB on another thread, whose wait stands where each test wants it.
TEXT = """HloModule step, is_scheduled=true, num_partitions=16

%thread (p: bf16[1024,1024]) -> bf16[16384,1024] {
  %p = bf16[1024,1024] parameter(0)
  ROOT %gather = bf16[16384,1024] all-gather(%p), replica_groups=[1,16]<=[16], metadata={op_name="jit(f)/ORIGIN/gather"}
}, execution_thread="sparsecore"

%stage (q: bf16[64,64]) -> bf16[64,64] {
  %q = bf16[64,64] parameter(0)
  ROOT %dot = bf16[64,64] dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: bf16[1024,1024], x: bf16[64,64], p: pred[]) -> bf16[16384,1024] {
  %a = bf16[1024,1024] parameter(0)
  %x = bf16[64,64] parameter(1)
  %p = pred[] parameter(2)
  %start = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%thread
  BEFORE
  %update = ((bf16[1024,1024]), bf16[16384,1024]) call-update(%start, %a)
  MEANWHILE
  %done = bf16[16384,1024] call-done(%update)
  ROOT %n = bf16[16384,1024] negate(%done)
}
"""
LOOP = '%w = bf16[64,64] while(%x), condition=%c, body=%stage, backend_config={"known_trip_count":{"n":"5"}}'
COPY = "%copy = bf16[64,64] copy(%x)"
KERNEL = '%k = bf16[64,64] custom-call(%x), custom_call_target="tpu_custom_call"'
DOT = 2 * 64**3


def the_span(*, before: str = "", meanwhile: str = "", origin: str = "jvp()") -> spans.Span:
  text = TEXT.replace("BEFORE", before).replace("MEANWHILE", meanwhile).replace("ORIGIN", origin)
  (span,) = spans.spans(execution.of_module(hlo.parse(text)))
  return span


@pytest.mark.parametrize(
    "step, flops, kernels",
    [
        (LOOP, 5 * DOT, False),
        ("%f = bf16[64,64] fusion(%x), kind=kOutput, calls=%stage", DOT, False),
        ("%c = bf16[64,64] conditional(%p, %x, %x), true_computation=%stage, false_computation=%stage", DOT, False),
        (KERNEL, 0, True),
        (COPY, 0, False),
    ],
)
def test_compute_between_update_and_done_is_meanwhile(step, flops, kernels):
  span = the_span(meanwhile=step)
  assert span.asynchronous
  assert span.meanwhile == spans.Compute(dot_flops=flops, kernels=kernels)
  assert bool(span.meanwhile) == (step is not COPY)


def test_compute_before_the_operands_arrive_hides_nothing():
  span = the_span(before=LOOP)
  assert span.asynchronous
  assert not span.meanwhile


def test_a_span_knows_its_bytes_group_and_direction():
  span = the_span()
  assert (span.wire_bytes, span.group, span.backward) == (2 * 16384 * 1024 * 15 / 16, 16, False)
  assert the_span(origin="transpose(jvp())").backward


def test_a_collective_in_a_loop_runs_as_often_as_the_loop():
  text = """%body (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024] parameter(0)
  ROOT %sum = bf16[1024,1024] all-reduce(%p), replica_groups=[1,4]<=[4], to_apply=%add
}

ENTRY %main (a: bf16[1024,1024]) -> bf16[1024,1024] {
  %a = bf16[1024,1024] parameter(0)
  ROOT %w = bf16[1024,1024] while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"9"}}
}
"""
  (span,) = spans.spans(execution.of_module(hlo.parse(text)))
  assert (span.executions, span.asynchronous, span.instructions) == (9, False, 0)


def test_a_pair_of_start_and_done_is_asynchronous_too():
  text = """ENTRY %main (a: bf16[1024,1024], x: bf16[64,64]) -> bf16[4096,1024] {
  %a = bf16[1024,1024] parameter(0)
  %x = bf16[64,64] parameter(1)
  %s = (bf16[1024,1024], bf16[4096,1024]) all-gather-start(%a), replica_groups=[1,4]<=[4], dimensions={0}
  %dot = bf16[64,64] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %d = bf16[4096,1024] all-gather-done(%s)
}
"""
  (span,) = spans.spans(execution.of_module(hlo.parse(text)))
  assert (span.asynchronous, span.meanwhile.dot_flops, span.array.dims) == (True, DOT, (4096, 1024))


def test_transfers_are_sorted_by_direction_and_activations_and_the_vocabulary_are_left_out():
  def found(text, **selection):
    kinds = overlap.transfers(hlo.parse(text), **{"groups": [16], "exclude_dim": 128256, **selection})
    return {kind: len(each) for kind, each in kinds.items() if each}

  forward = TEXT.replace("BEFORE", "").replace("MEANWHILE", "")
  assert found(forward) == {"forward gathers": 1}
  assert found(forward.replace("ORIGIN", "transpose(jvp())")) == {"backward gathers": 1}
  reduction = forward.replace("all-gather(", "reduce-scatter(")
  assert found(reduction) == {"gradient reductions": 1}
  assert not found(forward, groups=[4])
  assert not found(forward, exclude_dim=1024)


def test_shares_are_of_bytes():
  small, large = the_span(meanwhile=LOOP), the_span()
  row = overlap.summary([small, large, large, large])
  assert (row["collectives"], row["asynchronous"], row["compute_meanwhile"]) == (4, 1.0, 0.25)
  assert row["enough_compute"] == 0.0  # 5 small dots do not last as long as 30 MB on the wire
  assert overlap.summary([])["asynchronous"] is None


def test_hidden_are_the_seconds_and_bytes_of_weights_and_gradients_for_which_nothing_waits():
  name = "exposed transfers: {} over fsdp".format
  projection = {
      "step_s": 10.0,
      "transfers_s": {name("weights"): 4.0, name("gradients"): 2.0, name("activations"): 1.0},
      "transfers_GB": {name("weights"): 40.0, name("gradients"): 10.0, name("activations"): 5.0},
      "parts": {"products": 8.0, name("weights"): 1.0, name("activations"): 1.0},
  }
  assert overlap.hidden(projection) == (6.0, 1.0, 50.0, 40.0)
  line = overlap.report({"window": {"transfers": {}, "projection": projection}}).splitlines()[-1]
  assert "83%" in line and "80%" in line
  none = overlap.report({"none": {"transfers": {}, "projection": projection | {"transfers_s": {}}}}).splitlines()[-1]
  assert none.count(tables.MISSING) == 2, "nothing is sent: there are no shares"
