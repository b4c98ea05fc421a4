# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys of MaxText in which runs with several pipelines, or with none, differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.config import derived
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.nearest import did_you_mean

NONE = "none"
# circular_bsw without a pipeline: the window slides over the layers.
WINDOW = "window"
# MaxText's own prefetch of weights without a pipeline: PR 4493, not in 0.2.5.
PREFETCH = "host-prefetch"
_PREFETCH_KEY = "prefetch_fsdp_weights"
_HOST_MODES = {"host": "", "host-bsw": "pipeline_fsdp_ag_per_repeat", "host-ag-once": "pipeline_fsdp_ag_once"}
# The sizes of a pipeline, which has others. The batch of a device stays whole.
_NO_SIZES = derived.WITHOUT_PIPELINE | {"num_pipeline_microbatches": -1}
# These have no effect with MaxText's own pipelines, and so are refused there.
_NO_REMAT_OF_OURS: dict[str, Any] = {"pipeline_remat_iterations": 0, "pipeline_remat_tensors": ""}
_NO_KEYS_OF_OURS = {"pipeline_grad_accum_dtype": "auto", "pipeline_gather_dtype": "auto"} | _NO_REMAT_OF_OURS
# attention=autoselected depends on the devices of the process, which may not be those that the step is compiled for.
_ATTENTION = {"tpu": "flash", "cpu": "dot_product"}


def names() -> tuple[str, ...]:
  """All variants: none, without a pipeline our window and MaxText's prefetch, MaxText's pipelines, the registry's."""
  return (NONE, WINDOW, PREFETCH, *_HOST_MODES, *(name for name in registry.names() if name != registry.HOST))


def arguments(name: str, argv: Sequence[str], *, platform: str | None) -> list[str]:
  """MaxText's arguments of a variant of a run, for a step that is compiled and has no data.

  `name` is one of `names()`; without a pipeline the devices of the stages are given to FSDP. `argv`: MaxText's arguments
  of the run. `platform` is what is compiled for, "cpu" or the "tpu" of `compile_topology`; None for devices that the
  process has. Raises ValueError if there is no such variant or yml file, or this MaxText lacks its key.
  """
  if name not in names():
    raise ValueError(f"There is no implementation {name!r}, only {', '.join(names())}{did_you_mean(name, names())}")
  try:
    given = run_config.given_keys(argv)
  except FileNotFoundError as error:
    raise ValueError(f"There is no file {error.filename}.") from error
  replaced = {"dataset_type": "synthetic", "enable_checkpointing": False, "skip_jax_distributed_system": True}
  if platform and given.get("attention") == "autoselected":
    replaced["attention"] = _ATTENTION[platform]
  if platform == "tpu" and given.get("compile_topology_num_slices", -1) == -1:
    replaced["compile_topology_num_slices"] = 1
  replaced |= keys(name, given)
  if name == PREFETCH:
    from maxtext.configs import types  # pylint: disable=import-outside-toplevel

    if _PREFETCH_KEY not in types.MaxTextConfig.model_fields:
      raise ValueError(f"{PREFETCH} needs a MaxText with the key {_PREFETCH_KEY}, which this one lacks. Leave it out.")
    replaced[_PREFETCH_KEY] = True
  elif _PREFETCH_KEY in given:
    replaced[_PREFETCH_KEY] = False
  return run_config.with_keys(argv, replaced)


def keys(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
  """The keys that choose the pipeline of a variant, for a run with the keys `given`."""
  found: dict[str, Any] = {key: key == _HOST_MODES.get(name) for key in _HOST_MODES.values() if key}
  if name in (NONE, PREFETCH, *_HOST_MODES):
    found |= {"pipeline_impl": registry.HOST} | _NO_KEYS_OF_OURS
  else:
    found |= {"pipeline_impl": "circular_bsw" if name == WINDOW else name}
  if name not in (NONE, PREFETCH, WINDOW):
    return found
  all_stages = 1
  for network in derived.NETWORKS:
    stages, fsdp = (run_config.integer(given, f"{network}_{axis}_parallelism") for axis in ("pipeline", "fsdp"))
    all_stages *= stages
    # -1 takes what other axes leave, so it includes the devices of the stages.
    found[f"{network}_fsdp_parallelism"] = fsdp if fsdp == -1 else fsdp * stages
  # A window's iterations are others than a pipeline's.
  sizes = _NO_SIZES | _NO_REMAT_OF_OURS if name == WINDOW and all_stages != 1 else {}
  return found | sizes | {f"{network}_pipeline_parallelism": 1 for network in derived.NETWORKS}
