# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's own trainer with an implementation from a separately installed package, through hook and launcher."""

import pytest

from tests.host.common import HOOK, TINY

# What `python -m MODULE` does, in an interpreter that has started with the hook.
RUN_MODULE = f"""
import runpy, sys
{HOOK}
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
TRAINER = "maxtext.trainers.pre_train.train"
PIPELINED = ("ici_pipeline_parallelism=2", "num_pipeline_microbatches=2", "steps=2", "base_output_directory=out")


def _trained(done, steps=2):
  text = done.stdout + done.stderr
  return all(f"completed step: {step}" in text for step in range(steps))


def test_the_trainer_trains_through_an_installed_implementation_with_the_hook_and_one_key(run_python, fake_package):
  done = run_python(
      *("-c", RUN_MODULE, TRAINER),
      *(*TINY, *PIPELINED, "pipeline_impl=fake"),
      path=[fake_package],
      env={"MAXTEXT_PP_EXT": ""},
  )
  text = done.stdout + done.stderr
  assert "FakePipeline was built" in text and _trained(done)
  assert text.count("pipeline_impl=fake is active: 2 stages, 2 repeats, 2 microbatches") == 1


@pytest.mark.slow
def test_the_launcher_trains_without_the_hook(run_python, fake_package):
  done = run_python("-m", "maxtext_pp_ext.train", *TINY, *PIPELINED, "pipeline_impl=fake", path=[fake_package])
  assert "FakePipeline was built" in done.stdout and _trained(done)


def test_the_trainer_stops_before_the_first_step_with_our_message(run_python):
  keys = (*TINY, *PIPELINED, "pipeline_impl=circular_bws", "num_pipeline_repeats=3")
  done = run_python("-m", "maxtext_pp_ext.train", *keys, check=False)
  assert done.returncode != 0 and "completed step" not in done.stdout + done.stderr
  assert "did you mean 'circular_bsw'" in done.stderr and "Set num_pipeline_repeats=2" in done.stderr
