# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which pipeline module a config asks for, and the line in the log that says so."""

import functools

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.derived import pipeline_impl
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.host.models import run_config


def pipeline_class(config: HostKeys) -> type | None:
  """The NNX module class that the config asks for, announced in the log; None where MaxText is to choose its own.

  Raises:
    registry.UnknownImplementationError, registry.PluginError: there is no such class.
  """
  name = pipeline_impl(config)
  if name == registry.HOST:
    return None
  cls = registry.get(name).load()
  announce(config)
  return cls


@functools.cache
def linen_class(cls: type) -> type:
  """The Linen module class around an NNX pipeline class, made as MaxText makes its own; the same for the same class."""
  from maxtext.layers import (
      initializers,  # pylint: disable=import-outside-toplevel
      nnx_wrappers,  # pylint: disable=import-outside-toplevel
  )

  return nnx_wrappers.to_linen_class(cls, base_metadata_fn=initializers.variable_to_logically_partitioned)


def announce(config: HostKeys) -> None:
  """Logs one line about the pipeline that is about to be built; MaxText builds a model several times, so once each."""
  _log_once(describe(config))


def describe(config: HostKeys) -> str:
  """Implementation, stages, repeats, microbatches, delay and the bubble fraction of the schedule."""
  schedule = run_config.schedule_of(config)
  return (
      f"maxtext_pp_ext: pipeline_impl={pipeline_impl(config)} is active: {schedule.stages} stages, {schedule.repeats} "
      f"repeats, {schedule.microbatches} microbatches, forwarding delay {schedule.delay}, bubble fraction "
      f"{schedule.bubble_fraction:.3f}"
  )


@functools.cache
def _log_once(line: str) -> None:
  from maxtext.utils import max_logging  # pylint: disable=import-outside-toplevel

  max_logging.log(line)
