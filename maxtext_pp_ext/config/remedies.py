# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Problems with their remedies, and a config with other values, as MaxText would derive it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import contextvars
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import with_values

# The keys whose given values MaxText replaces by derived ones.
DERIVED = ("pipeline_parallel_layers", "num_pipeline_repeats", "num_pipeline_microbatches")
# Key of a batch size -> the number of rows that MaxText derives from it.
BATCHES = {
    "per_device_batch_size": "micro_batch_size_to_train_on",
    "eval_per_device_batch_size": "micro_batch_size_to_eval_on",
}

Values = Mapping[str, Any]
LEAVE_OUT = "Leave out pipeline_impl, or set pipeline_impl=host, for MaxText's own pipeline."
_MOST_WAYS = 4  # that are printed
_wanted = contextvars.ContextVar("_wanted", default=True)


@contextlib.contextmanager
def not_wanted() -> Iterator[None]:
  """Problems are told without remedies, which can take seconds to find. For a caller that tries other values itself."""
  token = _wanted.set(False)
  try:
    yield
  finally:
    _wanted.reset(token)


class Problem(str):
  """A problem with the sizes of a pipeline. Its text lists its remedies, whether or not each alone is enough."""

  what: str  # the problem, with the keys and their values
  ways: tuple[tuple[Values, str], ...]  # remedies: each is values for keys, and a remark or ""

  def __new__(cls, what: str, *ways: Values | tuple[Values, str], otherwise: str = "") -> Problem:
    """`otherwise` is a general remedy for the text, used instead of `ways`."""
    pairs = tuple((way, "") if isinstance(way, Mapping) else way for way in ways)
    self = super().__new__(cls, _sentences(what, pairs, otherwise))
    self.what, self.ways = what, pairs
    return self


def _sentences(what: str, ways: Iterable[tuple[Values, str]], otherwise: str = "") -> str:
  text = otherwise or " or ".join(settings(values) + remark for values, remark in ways)
  return f"{what} Set {text}." if text else what


def settings(values: Values) -> str:
  """key=value, as on MaxText's command line."""
  return ", ".join(f"{key}={value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
  return f"{value:.17g}" if isinstance(value, float) else str(value)


def changed[C: HostKeys](config: C, values: Values, given: Values | None = None) -> C:
  """A config with these values, and everything that MaxText derives from them and a pipeline's sizes depend on.

  `given` has the user's values of `DERIVED` and of parallelism, if the config holds derived values instead.
  """
  view: dict[str, Any] = {key: value for key, value in (given or {}).items() if key in DERIVED} | dict(values)
  for network in derived.NETWORKS:
    if getattr(config, f"{network}_parallelism", None) is not None:
      sizes = derived.parallelism(config, network)
      own = [values.get(derived.parallelism_key(network, axis), size) for axis, size in sizes.items()]
      view[f"{network}_parallelism"] = own
  for key, rows in BATCHES.items():
    if key in values and config.num_target_devices:
      view[rows] = int(config.num_target_devices * values[key])
  found = with_values(config, view)
  if found.pipeline_parallel_layers == -1 and derived.layers_to_choose_from(found) is not None:
    view["pipeline_parallel_layers"] = derived.layers_to_choose_from(found)
  if found.num_pipeline_microbatches == -1 and derived.num_stages(found):
    view["num_pipeline_microbatches"] = derived.least_microbatches(found)
  return with_values(config, view)


def _of_layers_outside(config: HostKeys, proposal: Values, passes: Callable[[Values], bool], given: Values) -> str:
  """Says which layers a proposal leaves out of the pipeline, and how all of them would run without one; "" for none."""
  kept, available = proposal.get("pipeline_parallel_layers", -1), derived.layers_to_choose_from(config)
  if kept == -1 or available is None:
    return ""
  text = f" That leaves {available - kept} of {available} layers out of the pipeline, on every stage."
  none = {f"{network}_pipeline_parallelism": 1 for network in derived.NETWORKS}
  none |= derived.WITHOUT_PIPELINE | {"num_pipeline_microbatches": -1}
  changes = {key: value for key, value in none.items() if given.get(key, getattr(config, key)) != value}
  return f"{text} Without a pipeline: {settings(changes)}." if passes(changes) else text


def _kind(config: HostKeys, values: Values, remark: str) -> Any:
  """What makes a remedy like another one: the same keys, changed to either side, with the same remark."""

  def is_more(key: str, value: Any) -> bool:
    present = getattr(config, key, None)
    return isinstance(value, (int, float)) and value > (present if isinstance(present, (int, float)) else 0)

  return (*((key, is_more(key, value)) for key, value in values.items()), remark)


def with_remedies[C: HostKeys](
    config: C,
    found: Sequence[str],
    problems: Callable[[C], Sequence[str]],
    propose: Callable[..., Values | None],
    given: Values | None = None,
) -> list[str]:
  """The texts of a config's problems, with each remedy that is enough alone, or with one for all problems together.

  `problems` finds those of another config, `propose` is `propose.proposal`, and `given` as for `changed`.
  """
  sizes = [problem for problem in found if isinstance(problem, Problem)]
  if not sizes:
    return list(found)

  def passes(values: Values) -> bool:
    left = problems(changed(config, values, given))
    return not any(isinstance(problem, Problem) for problem in left) and len(left) <= len(found) - len(sizes)

  texts = [problem.what if isinstance(problem, Problem) else problem for problem in found]
  if not _wanted.get():
    return texts
  ways: dict[Any, tuple[Values, str]] = {}  # the first way of each kind
  for way in sizes[0].ways if len(sizes) == 1 else ():
    if len(ways) < _MOST_WAYS and _kind(config, *way) not in ways and passes(way[0]):
      ways[_kind(config, *way)] = way
  if ways:
    return [_sentences(p.what, ways.values()) if p is sizes[0] else p for p in found]
  proposal = propose(config, passes, given or {})
  if proposal is None:
    change = "Set pipeline_impl=host, or change" if derived.runs_ours(config) else "Change"
    remedy = (
        f"No sizes fit these devices. {change} the batch or the number of devices."
        if derived.num_stages(config) == 1
        else "No pipeline of this model fits these devices: set pipeline_impl=host and train without one, or change "
        "base_num_decoder_layers or the number of devices."
    )
  else:
    remedy = f"Set{', together:' if len(proposal) > 1 else ''} {settings(proposal)}."
    remedy += _of_layers_outside(config, proposal, passes, given or {})
  last = max(i for i, problem in enumerate(found) if isinstance(problem, Problem))
  texts[last] += f" {remedy}"
  return texts
