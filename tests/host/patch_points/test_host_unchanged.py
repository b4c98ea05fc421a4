# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`pipeline_impl=host` leaves MaxText bit for bit as it is: the train step lowers to the same program."""

import pathlib

from tests.host.common import HOOK, TINY

SCRIPT = pathlib.Path(__file__).parents[1] / "lower_train_step.py"
RUN_HOOKED = f"import sys, runpy; {HOOK}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
PIPELINED = (*TINY, "ici_pipeline_parallelism=2", "num_pipeline_microbatches=4")


def _programs(text):
  return text.split("\nmodule @")[1:]


def test_the_train_step_of_the_hosts_pipelines_lowers_to_the_same_program_with_and_without_us(run_python):
  plain, per_repeat = PIPELINED, (*PIPELINED, "pipeline_fsdp_ag_per_repeat=True")
  without = _programs(run_python(SCRIPT, *plain, "--", *per_repeat).stdout)
  ours = "pipeline_impl=host"  # known only if the hook is there
  hooked = run_python("-c", RUN_HOOKED, SCRIPT, *plain, ours, "--", *per_repeat, ours, env={"MAXTEXT_PP_EXT": ""})
  assert len(without) == 2 and without[0] != without[1] and all("stablehlo.while" in program for program in without)
  assert _programs(hooked.stdout) == without
