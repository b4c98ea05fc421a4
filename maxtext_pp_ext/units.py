# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers for people. Imports nothing, so that every room may use it."""


def bytes_text(count: float) -> str:
  """Three digits and a decimal unit: 1 GB is 10⁹ bytes, as in the tables of benchmarks/."""
  for unit in ("B", "kB", "MB", "GB"):
    if count < 999.5:  # from there on three digits are 1000 of this unit
      return f"{count:.3g} {unit}"
    count /= 1000
  return f"{count:.3g} TB" if count < 999.5 else f"{count:.0f} TB"


def counted(count: int, noun: str) -> str:
  """`1 stage`, `2 stages`, `2 microbatches`: for nouns whose plural ends in s."""
  if count == 1:
    return f"{count} {noun}"
  return f"{count} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"
