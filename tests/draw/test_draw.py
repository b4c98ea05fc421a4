# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of schedules. The tests check that they show the schedule, not how they look."""

import re

import pytest

from maxtext_pp_ext.draw import picture, text
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy

SMALL = CircularSchedule(stages=4, microbatches=8, repeats=2)
LARGE = CircularSchedule(stages=16, microbatches=64, repeats=4)


def test_the_terminal_has_a_row_per_stage_and_a_column_per_iteration():
  lines = list(text.lines(SMALL, stage=0, width=120, color=False))
  rows = [line.split()[-1] for line in lines if re.match(r"stage \d", line)]
  assert rows == ["0000000011111111···", "·0000000011111111··", "··0000000011111111·", "···0000000011111111"]
  assert "current   0000000011111111111" in lines and "arriving  11111111···········" in lines
  assert "reducing  ···········11111111" in lines


@pytest.mark.parametrize("schedule", [SMALL, LARGE], ids=["4 × 8", "16 × 64"])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(schedule):
  lines = list(text.lines(schedule, stage=1, width=80, color=False))
  assert max(map(len, lines)) <= 80
  rows = ["".join(line.split()[2:]) for line in lines if line.startswith("stage 1 ")]
  assert len("".join(rows)) == schedule.iterations


def test_colours_are_added_and_nothing_else():
  plain, colored = (list(text.lines(SMALL, stage=0, width=120, color=color)) for color in (False, True))
  assert [re.sub("\033\\[\\d+m", "", line) for line in colored] == plain != colored


@pytest.mark.parametrize("schedule", [SMALL, LARGE], ids=["4 × 8", "16 × 64"])
def test_pictures_are_written(tmp_path, schedule):
  picture.draw(schedule, tmp_path / "a.png", stage=1)
  assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
  picture.draw(schedule, tmp_path / "a.svg", stage=1)
  svg = (tmp_path / "a.svg").read_text()
  assert svg.rstrip().endswith("</svg>") and len(svg) < 600_000


def test_alike_neighbours_are_one_rectangle():
  cells = [(0, 0, 1.0, "red"), (1, 0, 1.0, "red"), (2, 0, 0.5, "red"), (3, 0, 0.5, "blue"), (4, 1, 0.5, "blue")]
  shapes, colors = picture._rectangles(cells, merge=True)
  assert [shape.get_width() for shape in shapes] == [2, 1, 1, 1] and colors == ["red", "red", "blue", "blue"]
  assert len(picture._rectangles(cells, merge=False)[0]) == 5


@pytest.mark.parametrize(
    "gather_policy, word",
    [(GatherPolicy.ITERATION, "at every iteration"), (GatherPolicy.ONCE, "all repeats"), (None, "does not say")],
)
def test_no_double_buffer_is_drawn_of_a_pipeline_without_one(tmp_path, gather_policy, word):
  lines = list(text.lines(SMALL, stage=0, width=120, color=False, gather_policy=gather_policy))
  assert word in lines[-1] and not any(line.startswith(("current", "arriving")) for line in lines)
  picture.draw(SMALL, tmp_path / "a.svg", stage=0, gather_policy=gather_policy)
  assert (tmp_path / "a.svg").stat().st_size > 1000


def test_signs_of_repeats_are_explained_where_they_are_no_numbers():
  assert text.legend(10) == ""
  assert text.legend(32) == "a is repeat 10, v is 31"
  assert text.legend(80) == "a is repeat 10, Z is 61; repeat 62 is 0 again, and so on"
