# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One of the processes that `launch` starts: `python -m maxtext_pp_ext.testing.joined JSON -m MODULE …`.

Joins the others with JSON's arguments of `jax.distributed.initialize`, then is MODULE. Its standard input says nothing
and ends with the launcher, and then this process ends, too.
"""

import json
import os
import runpy
import signal
import sys
import threading
import traceback


def main() -> None:
  threading.Thread(target=_end_with_launcher, daemon=True).start()
  import jax  # pylint: disable=import-outside-toplevel

  jax.distributed.initialize(**json.loads(sys.argv[1]))
  module = sys.argv[3]
  sys.argv = sys.argv[3:]
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except Exception:  # pylint: disable=broad-exception-caught
    # JAX's shutdown at exit would wait for the others, and they for what this process does not send any more.
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _end_with_launcher() -> None:
  while os.read(0, 1):  # not through sys.stdin, whose lock would stop the interpreter's end
    pass
  os.killpg(0, signal.SIGKILL)  # whatever this process does, and those that it has started: nobody would notice


if __name__ == "__main__":
  main()
