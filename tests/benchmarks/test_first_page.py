# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The picture that README.md opens with shows the fastest rows of the compiler's figures."""

import re

import pytest

from benchmarks import compile_step, first_page, tables


def row(seconds, compute=1.0, bubbles=0.25):
  return {"projection": {"step_s": seconds, "compute_s": compute, "bubbles_s": bubbles}}


def test_the_fastest_row_of_an_implementation_counts_and_its_parts_add_up():
  rows = {
      "none": row(3.0),
      "none, FLAG": row(2.0),
      "none, kept activations": {"failure": "no memory"},
      "window": row(1.5),
  }
  found = first_page.best({"a": rows}, "a", "none")
  assert found == rows["none, FLAG"]
  assert first_page.parts(found["projection"]) == pytest.approx([0.75, 0.25, 1.0])
  assert first_page.parts(row(2.0, bubbles=None)["projection"]) == pytest.approx([1.0, 0.0, 1.0])


def test_the_picture_in_the_docs_is_that_of_the_table(tmp_path):
  results = tables.read(compile_step.RESULTS / "compiler_figures.json")
  first_page.draw(results, tmp_path / "seconds.svg")
  drawn, kept = (
      re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text(encoding="utf-8"))
      for file in (tmp_path / "seconds.svg", first_page.PICTURE)
  )
  seconds = [first_page.best(results, shape, impl) for _, shape, impls in first_page.ROWS for impl in impls]
  assert {f" {each['projection']['step_s']:.2f} s" for each in seconds} <= set(drawn)
  assert drawn == kept
