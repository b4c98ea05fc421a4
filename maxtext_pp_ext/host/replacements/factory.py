# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the pipeline module that a config asks for, and logs the choice."""

from collections.abc import Callable
import functools
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.derived import pipeline_impl
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.units import counted


def pipeline_class(config: HostKeys) -> type | None:
  """The class that the config asks for, which is logged; None: MaxText chooses its own. Raises as `registry.get` does."""
  name = pipeline_impl(config)
  if name == registry.HOST:
    return None
  cls = registry.get(name).contract.module_class
  announce(config)
  return cls


def create_nnx_pipeline(own: Callable, config: Any, stage_factory: Any, mesh: Any, remat_policy=None, *, rngs: Any):
  """MaxText's function, with the class that the config asks for."""
  if (cls := pipeline_class(config)) is None:
    return own(config, stage_factory, mesh, remat_policy, rngs=rngs)
  return cls(config=config, stage_factory=stage_factory, mesh=mesh, remat_policy=remat_policy, rngs=rngs)


def create_pipeline(own: Callable, config: Any, layers: Any = None, mesh: Any = None, remat_policy: Any = None) -> Any:
  """MaxText's function, which makes a Linen module."""
  if (cls := pipeline_class(config)) is None:
    return own(config, layers, mesh, remat_policy)
  return _linen_class(cls)(config=config, stage_factory=layers, mesh=mesh, remat_policy=remat_policy)


@functools.cache
def _linen_class(cls: type) -> Callable:
  """The Linen class around an NNX class, made as MaxText makes its own; one for each, so that models are equal."""
  from maxtext.layers import initializers, nnx_wrappers  # pylint: disable=import-outside-toplevel

  return nnx_wrappers.to_linen_class(cls, base_metadata_fn=initializers.variable_to_logically_partitioned)


def announce(config: HostKeys) -> None:
  """Logs one line about the pipeline."""
  schedule = run_config.schedule_of(config)
  log_once(
      f"maxtext_pp_ext: pipeline_impl={pipeline_impl(config)} is active: {counted(schedule.stages, 'stage')}, "
      f"{counted(schedule.repeats, 'repeat')}, {counted(schedule.microbatches, 'microbatch')}, forwarding delay "
      f"{schedule.delay}, bubble fraction {schedule.bubble_fraction:.3f}"
  )


@functools.cache
def log_once(line: str) -> None:
  """Logs a line, once although MaxText builds a model several times."""
  from maxtext.utils import max_logging  # pylint: disable=import-outside-toplevel

  max_logging.log(line)
