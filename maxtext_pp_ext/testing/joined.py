# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The program of each process that `launch` starts: `python -m maxtext_pp_ext.testing.joined JSON -m MODULE …`.

JSON has arguments of `jax.distributed.initialize`, and `slices`. The process joins the others with them, then runs
MODULE.
"""

import functools
import json
import os
import runpy
import sys
import traceback
from typing import Any, NoReturn

# How long to wait for the other processes to join.
_JOINING_S = 120


def main() -> None:
  try:
    _join(json.loads(sys.argv[1]))
    module = sys.argv[3]
    sys.argv = sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as ended:
    if ended.code in (None, 0):
      raise
    if not isinstance(ended.code, int):
      print(ended.code, file=sys.stderr)
    _end(ended.code if isinstance(ended.code, int) else 1)
  except BaseException:  # pylint: disable=broad-exception-caught
    traceback.print_exc()
    _end(1)


def _join(arguments: dict[str, Any]) -> None:
  slices, processes = arguments.pop("slices"), arguments["num_processes"]
  import jax  # pylint: disable=import-outside-toplevel

  from maxtext_pp_ext.jax_private import extension as _jax  # pylint: disable=import-outside-toplevel

  # For tensors, gloo listens on the address of this machine's name, if it has one. jax 0.11.2 has no option for that. It
  # calls this function of its extension when it makes the CPU devices.
  if not hasattr(_jax, "make_gloo_tcp_collectives"):
    raise RuntimeError(
        f"jax {jax.__version__} makes gloo's connections in another way than 0.11.2, so they would not use loopback"
    )
  _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")
  jax.config.update("jax_check_proxy_envs", False)  # JAX would warn of `no_grpc_proxy`
  jax.distributed.initialize(**arguments, initialization_timeout=_JOINING_S)
  if slices > 1:
    # jax 0.11.2 puts all CPU devices in slice 0, whatever `partition_index` is.
    _jax.Device.slice_index = property(lambda device: device.process_index * slices // processes)


def _end(code: int) -> NoReturn:
  """Exits at once: JAX's shutdown would wait for the other processes, which wait for transfers from this one."""
  try:
    sys.stdout.flush()
    sys.stderr.flush()
  finally:
    os._exit(code & 0xFF)


if __name__ == "__main__":
  main()
