# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints the StableHLO of MaxText's train step for the keys on the command line; run as a script by tests.

Several sets of keys are separated by `--`; each program starts with a line `module @...`.
"""

import sys

from flax.linen import partitioning
import jax
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import maxtext_utils, sharding


def lower(argv):
  config = pyconfig.initialize(["", *argv])
  mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
  arguments, _, state_shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
  params_shardings, state_shardings = sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
  data_sharding = sharding.get_input_data_sharding(config, mesh)
  step, in_shardings, out_shardings, static, donated = maxtext_utils.get_functional_train_with_signature(
      train.train_step, data_sharding, state_shardings, model, config, params_shardings
  )
  with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
    jitted = jax.jit(
        step, in_shardings=in_shardings, out_shardings=out_shardings, static_argnums=static, donate_argnums=donated
    )
    return jitted.lower(*arguments).as_text()


if __name__ == "__main__":
  for keys in " ".join(sys.argv[1:]).split(" -- "):
    print(lower(keys.split()))
