# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One of the processes that `launch` starts: `python -m maxtext_pp_ext.testing.joined JSON -m MODULE …`.

Joins the others with JSON's arguments of `jax.distributed.initialize`, then is MODULE.
"""

import functools
import json
import os
import runpy
import sys
import traceback
from typing import Any, NoReturn

# How long the others may take until they join.
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
  import jax  # pylint: disable=import-outside-toplevel

  from maxtext_pp_ext.jax_private import extension as _jax  # pylint: disable=import-outside-toplevel

  # For tensors gloo listens on the address that this machine's name has, if it has one; jax 0.11.2 cannot be told
  # otherwise, and calls this function of its extension when it makes the CPU devices.
  if not hasattr(_jax, "make_gloo_tcp_collectives"):
    raise RuntimeError(f"jax {jax.__version__} makes gloo's connections otherwise than 0.11.2: not over loopback")
  _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")
  jax.config.update("jax_check_proxy_envs", False)  # it would warn of `no_grpc_proxy`
  jax.distributed.initialize(**arguments, initialization_timeout=_JOINING_S)


def _end(code: int) -> NoReturn:
  """JAX's shutdown at exit would wait for the others, and they for what this process does not send any more."""
  try:
    sys.stdout.flush()
    sys.stderr.flush()
  finally:
    os._exit(code & 0xFF)


if __name__ == "__main__":
  main()
