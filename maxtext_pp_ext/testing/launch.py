# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains in several processes of this machine, as on several hosts, joined by `jax.distributed` over loopback.

  python -m maxtext_pp_ext.testing.launch --processes 4 --devices 2 -m maxtext_pp_ext.train CONFIG KEY=VALUE ...

Every process runs the module with the same arguments, in which `{process}` becomes its number. MaxText finds the
processes joined and does not join them again. The launcher passes SIGTERM on to all processes. JAX treats SIGTERM as a
notice of preemption: processes save if `enable_autocheckpoint` is set, and those that do not end are killed. On SIGINT or
SIGHUP, the launcher kills all processes immediately. No process outlives the launcher, whatever ends it. With `--slices`,
JAX and MaxText find the devices in that many slices; `jax.make_mesh` refuses several, as on TPUs. Imports neither JAX nor
MaxText.
"""

import argparse
from collections.abc import Callable, Sequence
import contextlib
import io
import json
import pathlib
import random
import signal
import socket
import sys
import threading
import time

from maxtext_pp_ext.processes import children, interruption
from maxtext_pp_ext.trainer_runs import trainer

HEARTBEAT_S = 20
# A process notices the loss of another one when a transfer fails, or after this many missing heartbeats.
_HEARTBEATS = 3
GRACE_S = _HEARTBEATS * HEARTBEAT_S
_POLL_S = 0.05
_ENVIRONMENT = {
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    # On CPU only the first process finds its programs in the persistent cache (jax 0.11.2). In its first transfer it
    # would wait for the others, which still compile, and gloo waits for 30 s only.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "no_grpc_proxy": "127.0.0.1",  # if there is a proxy, gRPC uses it even for loopback
}
# The system gives outgoing connections ports of this range, so it may take one that was free before.
_OUTGOING = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _LOWEST_OUTGOING = 10000, 32768
# How long to wait for the rest of the output. A child that has left its process's group is not killed with it, and may
# keep the pipe open.
_REST_OF_OUTPUT_S = 5


class Group(contextlib.AbstractContextManager["Group"]):
  """Joined processes. As a context manager, it ends all of them on exit."""

  def __init__(
      self,
      arguments: Sequence[str],
      *,
      processes: int,
      devices: int,
      slices: int = 1,
      heartbeat_s: int = HEARTBEAT_S,
      on_line: Callable[[int, str], None] = lambda process, line: None,
      cwd: pathlib.Path | None = None,
  ):
    """Starts the processes, with the arguments `-m MODULE …`.

    Args:
      processes, devices: number of processes, and of virtual CPU devices of each.
      slices: number of slices, of which each has the devices of successive processes.
      heartbeat_s: seconds without a heartbeat after which the others consider a process dead.
      on_line: called with (process, line) for each line of output of each process, one at a time.
      cwd: working directory of the processes.

    Raises ValueError if `processes` or `devices` is less than 1, or slices cannot share the processes equally.
    """
    if processes < 1 or devices < 1:
      raise ValueError(f"{processes} processes with {devices} devices each: give at least 1 of both")
    if slices < 1 or processes % slices:
      raise ValueError(f"{slices} slices of {processes} processes: give a divisor of the number of processes")
    address = f"127.0.0.1:{_free_port()}"
    self._lock, self._on_line = threading.Lock(), on_line
    self._error: Exception | None = None
    self.ending = False  # whether `end` was called
    self.processes: list[children.Child] = []
    self._readers: list[threading.Thread] = []
    try:
      for i in range(processes):
        joined = {
            "coordinator_address": address,
            "coordinator_bind_address": address,  # the default is every interface
            "num_processes": processes,
            "process_id": i,
            "heartbeat_timeout_seconds": heartbeat_s,
            "slices": slices,
        }
        own = [argument.replace("{process}", str(i)) for argument in arguments]
        command = [sys.executable, "-m", "maxtext_pp_ext.testing.joined", json.dumps(joined), *own]
        environment = trainer.environment(devices) | _ENVIRONMENT
        self.processes.append(children.Child(command, env=environment, cwd=cwd, **children.LINES))
        self._readers.append(threading.Thread(target=self._read, args=(i,), daemon=True))
        self._readers[-1].start()
    except BaseException:
      self._finish()
      raise

  def __exit__(self, *_) -> None:
    self._finish()

  def wait(self, *, grace_s: float = GRACE_S, timeout_s: float = float("inf")) -> list[int]:
    """Waits until all processes have ended. After a failure or `end`, those that still run have `grace_s` seconds.

    Returns the exit codes as in `subprocess`: minus the signal's number for a process that a signal ended. Raises
    TimeoutError if some processes had not ended in time and were killed; the message lists them. Raises the exception
    that `on_line` raised, after all processes were killed.
    """
    started, failed = time.monotonic(), None
    while self._error is None and None in (codes := [process.poll() for process in self.processes]):
      now = time.monotonic()
      if failed is None and (any(codes) or self.ending):
        failed = now
      if now - started > timeout_s or (failed is not None and now - failed > grace_s):
        self._finish()
        running = ", ".join(f"process {i}" for i, code in enumerate(codes) if code is None)
        after = f"after {timeout_s:.0f} s" if failed is None else f"{grace_s:.0f} s after they should have ended"
        raise TimeoutError(f"still running {after}, and killed: {running}")
      time.sleep(_POLL_S)
    self._finish()
    if self._error:
      raise self._error
    return [process.returncode for process in self.processes]

  def end(self) -> None:
    """Asks all processes to end, as a scheduler does, by SIGTERM. The second call kills them."""
    if self.ending:
      self.kill()
    self.ending = True
    for process in self.processes:
      process.terminate()

  def kill(self) -> None:
    """Kills all processes and their children."""
    for process in self.processes:
      process.kill()

  def _finish(self) -> None:
    """Kills all processes and all their children, including children of processes that have ended."""
    self.kill()
    for process in self.processes:
      process.cut()
    readers, self._readers = self._readers, []  # the second time they are not waited for
    for process, reader in zip(self.processes, readers, strict=False):
      reader.join(timeout=_REST_OF_OUTPUT_S)
      if process.stdout and not reader.is_alive():
        process.stdout.close()

  def _read(self, i: int) -> None:
    for line in self.processes[i].stdout or ():
      try:
        with self._lock:
          self._on_line(i, line)
      except Exception as error:  # pylint: disable=broad-exception-caught
        self._error = self._error or error  # goes on reading: a full pipe would block its process


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a group and prints its output, each line after its process's number; returns the exit code.

  The exit code is 0 if all processes succeeded. If one failed or was killed, it is 143 after SIGTERM, and otherwise 1.
  """
  parser = argparse.ArgumentParser(
      prog="python -m maxtext_pp_ext.testing.launch",
      usage="%(prog)s [options] -m MODULE ...",
      description=(__doc__ or "").split("\n\n", maxsplit=1)[0],
  )
  silent = "seconds until a silent process counts as dead (default: %(default)s)"
  late = "seconds to end after a failure or SIGTERM (default: three times --heartbeat)"
  parser.add_argument("--processes", type=int, default=2, help="number of processes (default: %(default)s)")
  parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices per process (default: %(default)s)")
  parser.add_argument("--slices", type=int, default=1, help="number of virtual slices (default: %(default)s)")
  parser.add_argument("--heartbeat", type=int, default=HEARTBEAT_S, help=silent)
  parser.add_argument("--grace", type=int, help=late)
  parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, required=True, help="module and its arguments")
  options = parser.parse_args(argv)
  if not options.module:
    parser.error("-m: give a module")
  if options.heartbeat < 1:
    parser.error(f"--heartbeat {options.heartbeat}: give at least 1")
  if options.grace is not None and options.grace < 0:
    parser.error(f"--grace {options.grace}: give at least 0")
  grace_s = _HEARTBEATS * options.heartbeat if options.grace is None else options.grace
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a character that the encoding lacks must not end the launcher
  sizes = {name: getattr(options, name) for name in ("processes", "devices", "slices")}
  try:
    show = lambda process, line: print(f"[{process}] {line}", end="", flush=True)
    group = Group(["-m", *options.module], **sizes, heartbeat_s=options.heartbeat, on_line=show)
  except ValueError as error:
    parser.error(str(error))
  with group:
    before = signal.getsignal(signal.SIGTERM)
    if before != signal.SIG_IGN:
      signal.signal(signal.SIGTERM, lambda *_: group.end())
    try:
      codes = group.wait(grace_s=grace_s)
    except TimeoutError as error:
      print(error, file=sys.stderr)
      return _failure(group)
    except BrokenPipeError:  # the reader of our output has gone
      return 1
    finally:
      signal.signal(signal.SIGTERM, before)
  if failed := [i for i, code in enumerate(codes) if code]:
    print(f"failed: {', '.join(f'process {i} ({_how(codes[i])})' for i in failed)}", file=sys.stderr)
  return _failure(group) if failed else 0


def _failure(group: Group) -> int:
  return 128 + signal.SIGTERM if group.ending else 1


def _how(code: int) -> str:
  return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _free_port() -> int:
  """A free port. If possible, one outside the range that the system gives to outgoing connections."""
  try:
    outgoing = int(_OUTGOING.read_text(encoding="ascii").split()[0])
  except OSError:
    outgoing = _LOWEST_OUTGOING
  ports = range(_LOWEST_PORT, outgoing)
  for port in [*random.SystemRandom().sample(ports, min(len(ports), 100)), 0]:
    with socket.socket() as free, contextlib.suppress(OSError):
      free.bind(("127.0.0.1", port))
      return free.getsockname()[1]
  raise OSError("no port of 127.0.0.1 is free")


if __name__ == "__main__":
  sys.exit(interruption.run(main, "launch"))
