# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every example can be trained, as far as `maxtext-pp check` can tell, and examples/README.md says what it costs today."""

import pytest

from benchmarks import examples
from maxtext_pp_ext.plan import check

FILES = sorted(examples.FOLDER.glob("*.yml"))
README = (examples.FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_has_no_errors_and_its_line_in_the_list_is_right(file):
  found = check.check([str(file), *examples.topology(file)], None if examples.topology(file) else 8)
  assert not found.errors
  [line] = [line for line in README.splitlines() if f"]({file.name})" in line]
  assert [cell.strip() for cell in line.strip("|").split("|")] == list(examples.row(file))


def test_there_is_one_for_a_laptop_one_with_experts_and_one_over_several_slices():
  names = " ".join(file.stem for file in FILES)
  assert all(word in names for word in ("laptop", "experts", "mixtral", "deepseek", "4-slices"))
