# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a shell offers for `maxtext-pp` at Tab: subcommands, options, files, MaxText's keys and some of their values.

The package argcomplete asks for it, once a shell has been told: eval "$(register-python-argcomplete maxtext-pp)".
"""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.host import arguments

_OF_OPTIONS: dict[str, Callable[[], Iterable[str]]] = {"--chip": chips.CHIPS.keys, "--impl": registry.names}


def complete(parser: argparse.ArgumentParser) -> None:
  """Prints what may follow on the shell's command line, and ends the process. `parser` is that of all subcommands.

  Raises ModuleNotFoundError if argcomplete is not installed.
  """
  from argcomplete import CompletionFinder  # pylint: disable=import-outside-toplevel
  from argcomplete.completers import ChoicesCompleter, FilesCompleter  # pylint: disable=import-outside-toplevel

  files = FilesCompleter(".yml")
  of_maxtext = lambda prefix, **_: [*_keys(prefix), *files(prefix)]

  class Finder(CompletionFinder):
    """Offers MaxText's arguments after options, too, where argparse, and so argcomplete, no longer expects them."""

    def collect_completions(self, active_parsers: Any, parsed_args: Any, cword_prefix: str) -> list[str]:
      command = active_parsers[-1]
      if len(active_parsers) > 1 and not command.active_actions and not cword_prefix.startswith("-"):
        return of_maxtext(cword_prefix)
      return super().collect_completions(active_parsers, parsed_args, cword_prefix)

  for action in _actions(parser):
    names = next((_OF_OPTIONS[option] for option in action.option_strings if option in _OF_OPTIONS), None)
    if action.type in (int, float):
      names = list  # else argcomplete offers files
    if names or action.dest == "maxtext_args":
      completer = ChoicesCompleter({name: name for name in names()}) if names else of_maxtext
      action.completer = completer  # type: ignore[attr-defined]  # argcomplete's own way
  Finder()(parser, always_complete_options=False)


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
  for action in parser._actions:  # pylint: disable=protected-access
    if isinstance(action, argparse._SubParsersAction):  # pylint: disable=protected-access
      for each in action.choices.values():
        yield from _actions(each)
    else:
      yield action


def _keys(prefix: str) -> list[str]:
  """Returns keys with their equals sign; with one in the prefix, the key's values, if they are known."""
  key, equals, _ = prefix.partition("=")
  if equals:
    return [f"{key}={value}" for value in arguments.choices(key)]
  return [f"{key}=" for key in sorted(arguments.keys())]
