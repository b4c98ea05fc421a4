# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tells the problems of a config with the values to set: the nearest that leave none."""

from collections.abc import Callable, Sequence
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.remedies import are_wanted, changed, Problem, Remedy, settings, Values
from maxtext_pp_ext.host.rules import candidates

_MOST_REMEDIES = 4  # that are printed


def _of_layers_outside(config: HostKeys, proposal: Values, accepts: Callable[[Values], bool], given: Values) -> str:
  """Says which layers a proposal leaves out of the pipeline, and how all of them would run without one; "" for none."""
  kept, available = proposal.get("pipeline_parallel_layers", -1), derived.layers_to_choose_from(config)
  if kept == -1 or available is None:
    return ""
  text = f" That leaves {available - kept} of {available} layers out of the pipeline, on every stage."
  none = {f"{network}_pipeline_parallelism": 1 for network in derived.NETWORKS}
  none |= derived.WITHOUT_PIPELINE | {"num_pipeline_microbatches": -1}
  changes = {key: value for key, value in none.items() if given.get(key, getattr(config, key)) != value}
  return f"{text} Without a pipeline: {settings(changes)}." if accepts(changes) else text


def _kind(config: HostKeys, remedy: Remedy) -> Any:
  """What makes a remedy like another one: the same keys, changed to either side, with the same remark."""

  def is_more(key: str, value: Any) -> bool:
    present = getattr(config, key, None)
    return isinstance(value, (int, float)) and value > (present if isinstance(present, (int, float)) else 0)

  return (*((key, is_more(key, value)) for key, value in remedy.values.items()), remedy.remark)


def with_remedies[C: HostKeys](
    config: C, found: Sequence[str], problems: Callable[[C], Sequence[str]], given: Values | None = None
) -> list[str]:
  """The texts of a config's problems, with each remedy that is enough alone, or with one for all problems together.

  `problems` finds those of another config, and `given` is as for `changed`.
  """
  sizes = [problem for problem in found if isinstance(problem, Problem)]
  if not sizes:
    return list(found)

  def accepts(values: Values) -> bool:
    left = problems(changed(config, values, given))
    return not any(isinstance(problem, Problem) for problem in left) and len(left) <= len(found) - len(sizes)

  texts = [problem.what if isinstance(problem, Problem) else problem for problem in found]
  if not are_wanted():
    return texts
  remedies: dict[Any, Remedy] = {}  # the first of each kind
  for remedy in sizes[0].remedies if len(sizes) == 1 else ():
    if len(remedies) < _MOST_REMEDIES and _kind(config, remedy) not in remedies and accepts(remedy.values):
      remedies[_kind(config, remedy)] = remedy
  if remedies:
    return [str(Problem(each.what, *remedies.values())) if each is sizes[0] else each for each in found]
  proposal = next(filter(accepts, candidates.pipelines(config, given or {})), None)
  if proposal is None:
    change = "Set pipeline_impl=host, or change" if derived.runs_ours(config) else "Change"
    instead = (
        f"No sizes fit these devices. {change} the batch or the number of devices."
        if derived.num_stages(config) == 1
        else "No pipeline of this model fits these devices: set pipeline_impl=host and train without one, or change "
        "base_num_decoder_layers or the number of devices."
    )
  else:
    instead = f"Set{', together:' if len(proposal) > 1 else ''} {settings(proposal)}."
    instead += _of_layers_outside(config, proposal, accepts, given or {})
  last = max(i for i, problem in enumerate(found) if isinstance(problem, Problem))
  texts[last] += f" {instead}"
  return texts
