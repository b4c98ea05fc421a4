# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The helpers of `maxtext_pp_ext.sharding` in one of several processes: `python -m tests.reliability.sharded FOLDER`.

FOLDER has a checkpoint of `make()`, `model`, which one process has written. Prints "sharded" after all checks.
"""

import sys

from flax import nnx
import jax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
import numpy as np
import psutil

from maxtext_pp_ext.sharding import create_sharded, restore_sharded, shard_batch, ShardingConflictError

RULES = [("batch", ("stage", "fsdp")), ("microbatch", "fsdp"), ("length", None), ("embed", "fsdp"), ("mlp", "stage")]
EMBED, MLP, ROWS, LENGTH = 8, 12, 16, 3


def make():
  names = {"out_sharding": ("embed", "mlp")}
  return nnx.Linear(EMBED, MLP, rngs=nnx.Rngs(0), kernel_metadata=names, bias_metadata={"out_sharding": ("mlp",)})


def check(folder):
  mesh = jax.make_mesh((2, jax.device_count() // 2), ("stage", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  whole = lambda x: multihost_utils.process_allgather(x, tiled=True)
  expected = np.load(f"{folder}/kernel.npy")
  model = create_sharded(make, mesh, RULES, on_conflict="error")
  kernel = model.kernel.get_value()
  assert kernel.sharding.spec == P("fsdp", "stage") and not kernel.is_fully_addressable
  np.testing.assert_array_equal(whole(kernel), expected)

  restored = restore_sharded(f"{folder}/model", make, mesh, RULES, on_conflict="error").kernel.get_value()
  assert restored.sharding == kernel.sharding
  np.testing.assert_array_equal(whole(restored), expected)

  # Each process gives its rows, of which it has as many as the others. Processes are along the batch.
  rows = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)
  own = np.split(rows, jax.process_count())[jax.process_index()]
  batch = shard_batch({"tokens": own}, mesh, ("batch", "length"), RULES)["tokens"]
  assert batch.shape == rows.shape and batch.sharding.spec[0] == ("stage", "fsdp")
  np.testing.assert_array_equal(whole(batch), rows)

  # Rows that devices cannot share equally, or without a rule: replicated they would be taken for the same.
  for rows_of_own, axis in ((own[:-1], "batch"), (own, "batsh")):
    for on_conflict in ("error", "warn", "fallback"):
      try:
        shard_batch({"tokens": rows_of_own}, mesh, (axis, "length"), RULES, on_conflict=on_conflict)
      except ShardingConflictError as error:
        assert "batch/tokens" in str(error), error
      else:
        raise AssertionError("rows that are not sharded were taken for replicas")
  elsewhere = [device for device in jax.devices() if device.process_index != jax.process_index()]
  try:
    shard_batch({"tokens": own}, jax.sharding.Mesh(np.array(elsewhere), ("fsdp",)), ("microbatch", "length"), RULES)
  except ValueError as error:
    assert "has no device of the mesh" in str(error), error
  else:
    raise AssertionError("a batch was put on devices of other processes only")

  # Two of three devices are the first process's.
  uneven = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("fsdp",))
  try:
    shard_batch({"tokens": own}, uneven, ("microbatch", "length"), RULES)
  except ValueError as error:
    assert "process 0 [0, 1], process 1 [2]" in str(error), error
  else:
    raise AssertionError("rows were put where processes have unequal parts")

  # Over stages the rows are replicated, and both processes have all of the other axis.
  same = shard_batch({"tokens": rows}, mesh, ("microbatch", "length"), RULES)["tokens"]
  assert same.shape == rows.shape
  np.testing.assert_array_equal(whole(same), rows)

  # Nobody else's machine can have been part of it.
  sockets = psutil.Process().net_connections()
  listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
  assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1"}, listening
  print("sharded", flush=True)


if __name__ == "__main__":
  check(sys.argv[1])
