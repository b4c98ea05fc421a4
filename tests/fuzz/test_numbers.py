# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every number of MaxText's config without a meaning, through `maxtext-pp check`: refused by name, or sound figures."""

import itertools
import json
import math
import random

import pytest

from maxtext_pp_ext.config import ranges
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.host import arguments
from tests.fuzz.common import ACCEPTED, run
from tests.fuzz.test_config import SOUND
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import

MEANINGLESS = ("-3", "nan", "inf", str(10**18))
VALUES = (*MEANINGLESS, "0", str(10**9))


@pytest.fixture(name="numeric")
def _numeric(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  from maxtext.configs import types

  fields = types.MaxTextConfig.model_fields
  return [key for key, field in fields.items() if ranges.range_of(key, field) is not None]


@pytest.fixture(name="judge")
def _judge(numeric, capfd, tmp_path, monkeypatch, tried):
  monkeypatch.chdir(tmp_path)

  def judge(key, value):
    keys = (f"{k}={v}" for k, v in (SOUND | {key: value}).items())
    outcome, said = run(capfd, tmp_path, ["check", "--json", *keys])
    tried(outcome)
    # What goes to the error stream comes after the JSON.
    found = json.JSONDecoder().raw_decode(said)[0] if said.startswith("{") else {"errors": [said]}
    if outcome == ACCEPTED:
      sizes = [found[part].get("total", 0) for part in ("memory", "sent") if part in found]
      assert all(0 <= size < 10**18 and math.isfinite(size) for size in sizes), (key, value, sizes)
    elif value in MEANINGLESS:
      assert any(key in error for error in found["errors"]), (key, value, found["errors"])

  return judge


def test_a_number_without_a_meaning_is_refused_by_name_or_changes_no_figure(judge, numeric):
  ours = [key for key in numeric if key in HostKeys.__annotations__ and key in arguments.keys()]
  cases = list(itertools.product(ours, VALUES))
  assert len(ours) > 40
  for key, value in random.Random(0).sample(cases, 15):
    judge(key, value)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_every_number_without_a_meaning_is_refused_by_name_or_changes_no_figure(judge, numeric, part):
  for key, value in list(itertools.product(numeric, VALUES))[part::12]:
    judge(key, value)
