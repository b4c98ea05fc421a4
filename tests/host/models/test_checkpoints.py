# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrays that MaxText's trainer saves, by optimizer."""

import pytest

from maxtext_pp_ext.host.models import checkpoints, layouts, run_config
from tests.host.common import TINY

KERNEL = "decoder/layers/mlp/wo/kernel"
# The optimizer's keys -> its arrays of the kernel of 4 layers, and some of its others.
ADAM = {f"opt_state/0/{moment}/params/{KERNEL}": (32, 4, 16) for moment in ("mu", "nu")}
OPTIMIZERS = {
    "adamw": ((), ADAM | {"opt_state/0/count": (), "opt_state/2/count": ()}),
    "adam_pax": (("opt_type=adam_pax",), {key.replace("/0", "", 1): shape for key, shape in ADAM.items()}),
    "sgd": (("opt_type=sgd",), {"opt_state/1/count": ()}),
    "steps that are skipped": (
        ("skip_step_on_spikes=True", "skip_step_interval=7"),
        {f"opt_state/inner_state/0/{moment}/{KERNEL}": (32, 4, 16) for moment in ("mu", "nu")}
        | {"opt_state/losses": (7,)},
    ),
    "only some parameters": (("trainable_parameters_mask=['norm']",), {}),
}


@pytest.mark.parametrize("keys, expected", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_run_saves_its_weights_and_the_state_of_its_optimizer(installed, keys, expected):
  argv = [*TINY, *keys]
  found = checkpoints.by_state(checkpoints.train_state(layouts.config_of_layout(argv), run_config.given_keys(argv)))
  shapes = {"/".join(path): wanted.shape for path, wanted in found.items() if not wanted.is_random_state}
  of_kernel = {key: shape for key, shape in shapes.items() if key.endswith(KERNEL)}
  assert of_kernel == {f"params/params/{KERNEL}": (32, 4, 16)} | {k: s for k, s in expected.items() if KERNEL in k}
  assert shapes.items() >= expected.items() and shapes["step"] == ()
  assert {path[0] for path, wanted in found.items() if wanted.is_random_state} == {"nnx_aux"}
