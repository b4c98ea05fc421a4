# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training in several processes of this machine, as on several hosts: joined by `jax.distributed` over loopback.

  python -m maxtext_pp_ext.testing.launch --processes 4 --devices 2 -m maxtext_pp_ext.train CONFIG KEY=VALUE ...

Every process runs the module with the same arguments, in which `{process}` becomes its number; MaxText finds the
processes joined and leaves them so. SIGTERM goes to all, which JAX takes for a notice of preemption: they save if
`enable_autocheckpoint` says so, and those that do not end are killed. SIGINT and SIGHUP to it kill them at once.
Nothing outlives the launcher, whatever ends it. Imports neither JAX nor MaxText.
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
import subprocess
import sys
import threading
import time

from maxtext_pp_ext.processes import children, interruption
from maxtext_pp_ext.trainer_runs import trainer

HEARTBEAT_S = 20
# A process that has lost another one notices when a transfer fails, or after the heartbeats that are missing.
_HEARTBEATS = 3
GRACE_S = _HEARTBEATS * HEARTBEAT_S
_POLL_S = 0.05
_ENVIRONMENT = {
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    # On CPU only the first process finds its programs in the persistent cache (jax 0.11.2). It would wait for the others,
    # which compile theirs, in its first transfer, and there gloo waits for 30 s.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "no_grpc_proxy": "127.0.0.1",  # where there is a proxy, gRPC asks it for loopback, too
}
# The system gives outgoing connections ports of this range, and so may take one that was free before.
_OUTGOING = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _LOWEST_OUTGOING = 10000, 32768
# Output of what has left its process's group, and so cannot be killed with it, is not waited for.
_REST_OF_OUTPUT_S = 5


class Group:
  """Processes that are joined. As a context, they are gone at its end."""

  def __init__(
      self,
      arguments: Sequence[str],
      *,
      processes: int,
      devices: int,
      heartbeat_s: int = HEARTBEAT_S,
      on_line: Callable[[int, str], None] = lambda process, line: None,
      cwd: pathlib.Path | None = None,
  ):
    """Starts them.

    Args:
      arguments: `-m MODULE …`.
      processes: how many.
      devices: virtual CPU devices of each.
      heartbeat_s: a process that has not been heard of for so many seconds is taken for dead by the others.
      on_line: sees each line of output of each process, one at a time.
      cwd: where they run.
    """
    if processes < 1 or devices < 1:
      raise ValueError(f"{processes} processes of {devices} devices")
    address = f"127.0.0.1:{_free_port()}"
    self._lock, self._on_line = threading.Lock(), on_line
    self._error: Exception | None = None
    self._ending = False
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
        }
        self._start(i, joined, [argument.replace("{process}", str(i)) for argument in arguments], devices, cwd)
    except BaseException:
      self._finish()
      raise

  def _start(
      self, i: int, joined: dict[str, object], arguments: list[str], devices: int, cwd: pathlib.Path | None
  ) -> None:
    process = children.Child(
        [sys.executable, "-m", "maxtext_pp_ext.testing.joined", json.dumps(joined), *arguments],
        env=trainer.environment(devices) | _ENVIRONMENT,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    self.processes.append(process)
    self._readers.append(threading.Thread(target=self._read, args=(i,), daemon=True))
    self._readers[-1].start()

  def __enter__(self) -> "Group":
    return self

  def __exit__(self, *_) -> None:
    self._finish()

  def wait(self, *, grace_s: float = GRACE_S, timeout_s: float = float("inf")) -> list[int]:
    """Waits until all have ended; if one fails, or after `end`, they have `grace_s` seconds to end by themselves.

    Returns:
      The exit codes, as `subprocess` has them: minus the signal's number for a process that a signal ended.

    Raises:
      TimeoutError: some had not ended in time and were killed; says which.
      Exception: what `on_line` raised, after all were killed.
    """
    started, failed = time.monotonic(), None
    while self._error is None and None in (codes := [process.poll() for process in self.processes]):
      now = time.monotonic()
      if failed is None and (any(codes) or self._ending):
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

  @property
  def ending(self) -> bool:
    """Whether `end` was called."""
    return self._ending

  def end(self) -> None:
    """Asks all to end, as a scheduler does: by SIGTERM. The second time they are killed."""
    if self._ending:
      self.kill()
    self._ending = True
    for process in self.processes:
      process.terminate()

  def kill(self) -> None:
    """Kills all, and what they have started."""
    for process in self.processes:
      process.kill()

  def _finish(self) -> None:
    """Nothing of them is left after it, not even what those that have ended have started."""
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
        self._error = self._error or error  # a pipe that nobody reads any more would stop its process


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a group, its output with the process's number in front of each line; returns the exit code.

  Which is 1 if one failed or was killed, and 143 if that was after SIGTERM.
  """
  parser = argparse.ArgumentParser(
      prog="python -m maxtext_pp_ext.testing.launch",
      usage="%(prog)s [options] -m MODULE ...",
      description=(__doc__ or "").split("\n\n", maxsplit=1)[0],
  )
  parser.add_argument("--processes", type=int, default=2, help="how many (default: %(default)s)")
  parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices of each (default: %(default)s)")
  parser.add_argument(
      "--heartbeat", type=int, default=HEARTBEAT_S, help="seconds until a silent process is dead (default: %(default)s)"
  )
  parser.add_argument(
      "--grace", type=int, help="seconds that the others have to end by themselves (default: three times --heartbeat)"
  )
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
    sys.stdout.reconfigure(errors="replace")  # a character that it lacks is no reason to end

  def show(i: int, line: str) -> None:
    sys.stdout.write(f"[{i}] {line}")
    sys.stdout.flush()

  try:
    group = Group(
        ["-m", *options.module],
        processes=options.processes,
        devices=options.devices,
        heartbeat_s=options.heartbeat,
        on_line=show,
    )
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
    except BrokenPipeError:  # nobody reads our output any more
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
  """One that no outgoing connection can take until it is used, if there are such ports."""
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
