# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A `pipeline_impl` for every config of this process, or every one with a pipeline, that does not name one itself.

It is for code whose configs one cannot edit, such as MaxText's own tests (`maxtext_pp_ext.testing.plugin`). The config
class applies it to its raw keys. A config that has the key at all has set it: none of MaxText's yml files does.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
from typing import Any

# Modes of MaxText's own pipelines. A config may not have one beside an implementation of ours (`host.rules.problems`).
_HOST_GATHER_POLICY_KEYS = ("pipeline_fsdp_ag_once", "pipeline_fsdp_ag_per_repeat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigReport:
  """The decision about one config while a default was set."""

  pipeline_impl: str  # the implementation that the config ends up with
  explicit: bool  # the config named it itself, so nothing was changed
  switched_off: tuple[str, ...] = ()  # host keys that were on and contradict the implementation


Observer = Callable[[ConfigReport], None]
_default: tuple[str, Observer | None, bool] | None = None  # the arguments of `override_pipeline_impl`


@contextlib.contextmanager
def override_pipeline_impl(name: str, observer: Observer | None = None, *, all_configs: bool = False) -> Iterator[None]:
  """Gives `pipeline_impl=name` to each config with a pipeline that is built in the `with` block and names none.

  With an implementation other than `host`, MaxText's own modes of pipelines are turned off in those configs. The config
  class checks the name. `observer` is called once for each such config with the decision. With `all_configs` configs
  without a pipeline get it, too, as a window (docs/window.md), if they scan over layers.
  """
  global _default
  before, _default = _default, (name, observer, all_configs)
  try:
    yield
  finally:
    _default = before


def apply_default_pipeline_impl(values: Any) -> Any:
  """The raw keys of a config with the process's default in them; `values` itself if there is nothing to do."""
  if _default is None or not isinstance(values, Mapping):
    return values
  name, observer, all_configs = _default
  # A window needs layers that are scanned over; from a command line the key's value is text.
  scans_layers = str(values.get("scan_layers", True)).casefold() not in ("false", "0")
  # MaxText's own rule, on keys that pydantic has not converted yet.
  stages = (_as_int(values.get(key, 1)) for key in ("ici_pipeline_parallelism", "dcn_pipeline_parallelism"))
  if not any(each > 1 for each in stages) and not (all_configs and scans_layers):
    return values
  if "pipeline_impl" in values:
    report = ConfigReport(pipeline_impl=values["pipeline_impl"], explicit=True)
  else:
    switched_off = tuple(key for key in _HOST_GATHER_POLICY_KEYS if name != "host" and values.get(key))
    values = {**values, "pipeline_impl": name, **dict.fromkeys(switched_off, False)}
    report = ConfigReport(pipeline_impl=name, explicit=False, switched_off=switched_off)
  if observer is not None:
    observer(report)
  return values


def _as_int(value: Any) -> int:
  try:
    return int(value)
  except (TypeError, ValueError):
    return 1  # not a number: the config class will say so, better than we could here
