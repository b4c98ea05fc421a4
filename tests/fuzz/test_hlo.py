# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Damaged HLO: a text that is cut off, has lost lines or is something else is refused, and never counted partially."""

import random

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.compiled import compare, reading
from maxtext_pp_ext.compiled.program import hlo
from tests.compiled.test_reading import STEP
from tests.fuzz.common import within

KEYS = {"batch": "data[", "optimizer": "state['optimizer']"}


@pytest.fixture(name="compiled", scope="module")
def _compiled():
  """A program with a loop, a branch, matrix products and collectives, as this machine's compiler prints it."""
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("stage", "fsdp"))

  def program(x, w):
    def body(_, x):
      whole = jax.lax.all_gather(w, "fsdp", tiled=True)
      y = jnp.tanh(x @ whole)
      y = jax.lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y)
      return jax.lax.ppermute(y, "stage", [(0, 1), (1, 0)])

    return jax.lax.psum(jax.lax.fori_loop(0, 6, body, x), "fsdp")

  mapped = jax.shard_map(program, mesh=mesh, in_specs=(P("stage"), P("fsdp")), out_specs=P("stage"), check_vma=False)
  f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.jit(mapped).lower(f32(8, 16), f32(16, 16)).compile().as_text()


@pytest.fixture(name="texts", scope="module")
def _texts(compiled):
  return {"compiled": compiled, "written": STEP}


def figures(text):
  """The figures of a text, or None if it is refused."""
  try:
    with within(60):
      return compare.of_step(reading.step(text, **KEYS))
  except hlo.HloError as error:
    assert str(error)
    return None


def test_whole_programs_are_read(texts):
  for text in texts.values():
    found = figures(text)
    assert found["dot_flops"] > 0 and {"all-gather", "all-reduce", "collective-permute"} <= set(found["count"])
    assert sum(row["count"] for row in found["transfers"]) == sum(found["count"].values())


@pytest.mark.parametrize("name", ["compiled", "written"])
def test_a_text_that_is_cut_off_anywhere_is_refused(texts, tried, name):
  text = texts[name].rstrip()
  whole, positions = figures(text), random.Random(0).sample(range(len(text)), min(len(text), 400))
  for position in positions:
    found = figures(text[:position])
    # What stands after the last brace is of no account.
    assert found is None or found == whole, text[:position][-80:]
    tried("refused" if found is None else "read")
  tried("read")


def uncounted(line):
  """Whether a line of a program can be removed without changing any figure."""
  return not line.strip() or not line.startswith((" ", "%", "ENTRY", "}"))


@pytest.mark.parametrize("name", ["compiled", "written"])
def test_a_text_that_has_lost_a_line_is_refused_or_has_lost_nothing_that_counts(texts, tried, name):
  lines = texts[name].splitlines()
  whole = figures(texts[name])
  for number, line in enumerate(lines):
    found = figures("\n".join(lines[:number] + lines[number + 1 :]))
    same = found == whole
    # Of what is not used by anything, nobody could tell that it was there.
    name_of = line.strip().removeprefix("ROOT ").partition(" = ")[0]
    unused = bool(name_of) and texts[name].count(name_of) == 1
    assert found is None or same or uncounted(line) or unused, line
    tried("refused" if found is None else "read")


GARBAGE = {
    "nothing": "",
    "a line": "HloModule m",
    "zeros": "\0" * 100,
    "unicode": "ENTRY %e (a: f32[]) -> f32[] {\n  ROOT %ä→ = f32[] parameter(0)\n}\n",
    "stablehlo": "module @jit_f {\n  func.func public @main(%arg0: tensor<f32>) -> tensor<f32> {\n  }\n}",
    "no entry": STEP.replace("ENTRY ", ""),
    "two entries": STEP.replace("%condition (", "ENTRY %condition ("),
    "a computation twice": STEP.replace("%condition (", "%body ("),
    "one within another": STEP.replace("}\n\n%condition", "\n%condition"),
    "an end without a beginning": STEP.replace("HloModule", "}\nHloModule", 1),
    "an empty computation": STEP + "\n%empty () -> f32[] {\n}\n",
    "without ROOT": STEP.replace("ROOT ", ""),
    "two roots": STEP.replace("  %y = f32[4,8] dot", "  ROOT %y = f32[4,8] dot"),
    "an unknown operand": STEP.replace("dot(%x, %w)", "dot(%x, %v)"),
    "an unknown computation": STEP.replace("body=%body", "body=%soul"),
    "an unknown condition": STEP.replace("condition=%condition", "condition=%none"),
    "a computation that runs itself": STEP.replace("collective-permute(%y)", "call(%y), to_apply=%body"),
    "two that run each other": STEP.replace("collective-permute(%y)", "call(%y), to_apply=%condition").replace(
        "compare(%counter, %bound), direction=LT", "call(%bound), to_apply=%body"
    ),
    "no type": STEP.replace("%y = f32[4,8] dot", "%y = dot"),
    "no opcode": STEP.replace("%y = f32[4,8] dot(%x, %w)", "%y = f32[4,8]"),
    "an axis that is not there": STEP.replace("lhs_contracting_dims={1}", "lhs_contracting_dims={7}"),
    "an axis that is no number": STEP.replace("lhs_contracting_dims={1}", "lhs_contracting_dims={one}"),
    "a window that is none": STEP.replace(
        "  %gathered =",
        "  %c = f32[2,8] convolution(%kernel, %kernel), window={size}, dim_labels=bf_io->bf\n  %gathered =",
    ),
    "labels that do not fit": STEP.replace("dot(%x, %w)", "convolution(%x, %w), dim_labels=b0f_0io->b0f"),
    "a group that names no axis": STEP.replace("replica_groups={{0,1,2,3}}", "replica_groups=mesh['x'=4] {'y'}"),
    "a gather of nothing": STEP.replace("(f32[2,8], f32[8,8]) all-gather-start", "() all-gather-start"),
}


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE.keys())
def test_what_is_no_program_or_has_what_is_not_understood_is_refused(tried, text):
  found = figures(text)
  assert found is None, found
  tried("refused")


def test_deeply_nested_calls_are_read(tried):
  """Calls nest deeper than Python's recursion limit."""
  deep = "".join(
      f"%c{i} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n  ROOT %r = f32[] call(%p), to_apply=%c{i + 1}\n}}\n"
      for i in range(5000)
  )
  last = "%c5000 (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"
  entry = "ENTRY %main (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n  ROOT %r = f32[] call(%p), to_apply=%c0\n}\n"
  assert figures(deep + last + entry) is None  # refused, without a traceback
  tried("refused")


@pytest.mark.parametrize("name, count", [("written", 300), pytest.param("compiled", 1500, marks=pytest.mark.slow)])
def test_any_damage_gives_our_error_or_figures(texts, tried, name, count):
  """Characters changed, lines swapped, doubled and joined: nothing but HloError is raised, and nothing hangs."""
  source = random.Random(1)
  alphabet = '{}()[]%=," \n\\09azé\0'
  for _ in range(count):
    lines = texts[name].splitlines()
    for _ in range(source.randint(1, 4)):
      at, other = source.randrange(len(lines)), source.randrange(len(lines))
      match source.randrange(4):
        case 0:
          lines[at], lines[other] = lines[other], lines[at]
        case 1:
          lines.insert(other, lines[at])
        case 2:
          column = source.randint(0, len(lines[at]))
          lines[at] = lines[at][:column] + source.choice(alphabet) + lines[at][column + source.randint(0, 3) :]
        case 3:
          lines[at] += lines[other]
    tried("refused" if figures("\n".join(lines)) is None else "read")
