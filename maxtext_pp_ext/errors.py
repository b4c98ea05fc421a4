# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors whose message is all that a person needs. Standard library only."""

import os
import sys


class Refusal(Exception):
  """An error that is no mistake in a program: its message says what cannot work, and what to do.

  If nobody catches it, the message stands last and by itself, instead of below a traceback through MaxText.
  JAX_TRACEBACK_FILTERING=off, which shows all frames of JAX's tracebacks, shows the traceback, too.
  """

  def __init__(self, *args: object):
    super().__init__(*args)
    _show_messages()


class SetupError(Refusal, RuntimeError):
  """What is installed beside this package keeps it from working; the message says what it is, and what to do."""


class UnsupportedError(Refusal, NotImplementedError):
  """A combination that this package does not do; the message says which, and what to set instead."""


def _show_messages() -> None:
  """Lets Python show uncaught refusals without their tracebacks. All other errors are shown as before."""
  before = sys.excepthook
  if getattr(before, "shows_refusals", False):
    return

  def show(kind, error, trace):
    if not isinstance(error, Refusal) or os.environ.get("JAX_TRACEBACK_FILTERING") == "off":
      before(kind, error, trace)
      return
    import traceback  # pylint: disable=import-outside-toplevel

    lines = traceback.format_exception_only(error)
    print(f"\nJAX_TRACEBACK_FILTERING=off shows where this was raised.\n\n{''.join(lines)}", end="", file=sys.stderr)

  show.shows_refusals = True  # type: ignore[attr-defined]  # a function has attributes
  sys.excepthook = show
