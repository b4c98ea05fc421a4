# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.docs.pages` writes the pages of docs/ that git ignores, from templates and the tables of the tests.

`make docs` calls it: half a minute. docs/templates has the text around the tables.
"""

import logging
import pathlib
import string
import warnings

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
TEMPLATES = DOCS / "templates"
# Pages by name; what each is made of, for a reader of the repository.
GENERATED = {
    "blocks.md": "tests/parity/blocks.json",
    "faults.md": "tests/mutants/table.py",
    "keys.md": "tests/key_coverage/keys.yml",
    "trainer-table.md": "tests/trainer/results.json",
}


def by_hand() -> list[pathlib.Path]:
  """README.md and the pages of docs/ that are in the repository."""
  return [CHECKOUT / "README.md", *sorted(page for page in DOCS.glob("*.md") if page.name not in GENERATED)]


def fields(page: str) -> dict[str, str]:
  """What a page's template asks for, the table included; imports MaxText."""
  # pylint: disable=import-outside-toplevel
  if page == "faults.md":
    from tests.mutants import table as faults

    return {"table": faults.markdown(), "faults": str(len(faults.MUTANTS)), "kinds": str(len(faults.WAYS))}
  from tests.parity import blocks  # before anything imports JAX

  if page == "keys.md":
    from tests.key_coverage import __main__ as key_coverage
    from tests.key_coverage import table as keys

    trained = key_coverage.trained()
    return {"table": "\n".join(keys.markdown(keys.groups(), trained))}
  from tests import tables

  if page == "trainer-table.md":
    from tests.trainer import table as trainer

    return {"table": "\n".join(trainer.markdown(tables.read(trainer.RESULTS)))}
  case = blocks.PIPELINED[0]
  return {
      "table": "\n".join(blocks.markdown()),
      "maxtext": ", ".join(sorted({each["maxtext"] for each in tables.read(blocks.MEASURED).values()})),
      "implementations": ", ".join(f"`{name}`" for name in blocks.IMPLEMENTATIONS),
      "tolerance": f"{blocks.bound(case, case.config(stages=3, repeats=2, microbatches=3)):.0e}",
  }


def text(page: str) -> str:
  """The whole of a page."""
  return string.Template((TEMPLATES / page).read_text(encoding="utf-8")).substitute(fields(page))


def main() -> None:
  """Writes the pages, without what MaxText logs about configs that are refused."""
  logging.disable()
  warnings.simplefilter("ignore")
  for page in GENERATED:
    (DOCS / page).write_text(text(page), encoding="utf-8")
    print(f"docs/{page}", flush=True)


if __name__ == "__main__":
  main()
