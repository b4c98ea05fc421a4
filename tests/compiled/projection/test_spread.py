# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A collective that the compiler spreads over fusions is one asynchronous collective."""

import pytest

from maxtext_pp_ext.compiled import spans
from maxtext_pp_ext.compiled.program import execution, hlo
from maxtext_pp_ext.compiled.projection import timeline
from tests.compiled.projection.programs import cycles, GATHER, gather_seconds, HEAD, simulated

MICRO = 1e-6
WHOLE = 8192  # bytes of f32[2048]
# As the TPU compiler writes it for v5e: each fusion has the whole collective.
_GATHER = (
    f'%g.N = f32[2048]{{0}} all-gather(%p.N), channel_id=7, {GATHER}, backend_config={{"async_collective_fusion_config":'
    '{"flag_start":"-1","flag_end":"-1"}}'
)
TEXT = f"""{HEAD}
%starting (p.1: f32[1024]) -> (f32[1024], f32[2048]) {{
  %p.1 = f32[1024]{{0}} parameter(0)
  {_GATHER.replace(".N", ".1")}
  ROOT %c.1 = (f32[1024]{{0}}, f32[2048]{{0}}) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}}

%beside (p.2: f32[1024], b.2: f32[2048], x.2: f32[8]) -> (f32[8], f32[1024], f32[2048]) {{
  %p.2 = f32[1024]{{0}} parameter(0)
  %b.2 = f32[2048]{{0}} parameter(1)
  %x.2 = f32[8]{{0}} parameter(2)
  %n.2 = f32[8]{{0}} negate(%x.2)
  {_GATHER.replace(".N", ".2")}
  ROOT %t.2 = (f32[8]{{0}}, f32[1024]{{0}}, f32[2048]{{0}}) tuple(%n.2, %p.2, %b.2)
}}

%waiting (p.3: f32[1024], b.3: f32[2048]) -> f32[2048] {{
  %p.3 = f32[1024]{{0}} parameter(0)
  %b.3 = f32[2048]{{0}} parameter(1)
  {_GATHER.replace(".N", ".3")}
  ROOT %c.3 = f32[2048]{{0}} custom-call(%p.3, %b.3, %g.3), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (a: f32[8], w: f32[1024]) -> f32[2048] {{
  %a = f32[8]{{0}} parameter(0)
  %w = f32[1024]{{0}} parameter(1)
  %start = (f32[1024]{{0}}, f32[2048]{{0}}) fusion(%w), kind=kCustom, calls=%starting
  %p = f32[1024]{{0}} get-tuple-element(%start), index=0
  %b = f32[2048]{{0}} get-tuple-element(%start), index=1
  %f = (f32[8]{{0}}, f32[1024]{{0}}, f32[2048]{{0}}) fusion(%p, %b, %a), kind=kOutput, calls=%beside, CYCLES
  %p.4 = f32[1024]{{0}} get-tuple-element(%f), index=1
  %b.4 = f32[2048]{{0}} get-tuple-element(%f), index=2
  ROOT %done = f32[2048]{{0}} fusion(%p.4, %b.4), kind=kCustom, calls=%waiting
}}
"""


@pytest.mark.parametrize("meanwhile", [1000, 20_000])
def test_it_overlaps_with_the_fusions_that_it_is_spread_over(meanwhile):
  simulation = simulated(TEXT.replace("CYCLES", cycles(meanwhile)))
  assert simulation.step.seconds == pytest.approx(max(meanwhile * 1e-3 * MICRO, gather_seconds(WHOLE)))
  assert simulation.step.busy[timeline.COMPUTE] == pytest.approx(meanwhile * 1e-3 * MICRO)
  assert not simulation.unknown


def test_it_travels_once():
  (span,) = spans.spans(execution.of_module(hlo.program(TEXT.replace("CYCLES", cycles(1)))))
  assert (span.name, span.wire_bytes, span.asynchronous) == ("start", WHOLE / 2, True)
  assert span.collective.kind == "all-gather"


def test_a_wait_without_a_start_is_an_error():
  text = TEXT.replace("CYCLES", cycles(1)).replace("channel_id=7", "channel_id=8", 1)
  with pytest.raises(hlo.HloError, match="done waits for a collective that nothing in main starts"):
    hlo.program(text)
