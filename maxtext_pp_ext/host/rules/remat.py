# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with rematerialisation in a part of the iterations (`pipeline_remat_iterations`)."""

from collections.abc import Iterator

from maxtext_pp_ext import registry
from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.keys import Keys, remat_tensors
from maxtext_pp_ext.host.models import cycles, flops


def problems(config: Keys) -> Iterator[str]:
  """Yields all problems with one of our implementations."""
  count, names = config.pipeline_remat_iterations, remat_tensors(config)
  chosen, tensors = f"pipeline_remat_iterations={count}", f"pipeline_remat_tensors={config.pipeline_remat_tensors}"
  if count < 0:
    yield f"{chosen} must be at least 0. Set pipeline_remat_iterations=0."
  if count < 1:
    if names:
      yield (
          f"{tensors} has no effect with {chosen}. Set pipeline_remat_iterations to a number of iterations, or leave "
          "pipeline_remat_tensors out."
      )
    return
  policy = config.remat_policy or "none"
  if policy == "none" or flops.recomputes_layers(config):
    keeps = "does not choose tensors" if policy == "none" else "keeps only layers' inputs"
    yield (
        f"{chosen}: remat_policy={policy} {keeps}. Leave pipeline_remat_iterations out, or set a remat_policy that keeps "
        "tensors, such as minimal."
    )
  if config.pipeline_impl in registry.names() and not registry.get(config.pipeline_impl).contract.gather_policy:
    yield f"{chosen} has no effect with pipeline_impl={config.pipeline_impl}. Leave pipeline_remat_iterations out."
  if not derived.windowed(config) and not config.set_remat_policy_on_pipeline_iterations:
    yield (
        f"{chosen}: set_remat_policy_on_pipeline_iterations=False keeps everything in all iterations. Set it to True, or "
        "leave pipeline_remat_iterations out."
    )
  iterations = _iterations(config)
  if iterations is not None and count > iterations:
    yield (
        f"{chosen} is more than the {iterations} iterations of forward. Set pipeline_remat_iterations to at most "
        f"{iterations}."
    )
  if policy == "custom":
    kept = [*(config.tensors_on_device or ()), *(config.tensors_to_offload or ())]
    if others := [name for name in names if name not in kept]:
      yield (
          f"{tensors}: remat_policy=custom does not keep {', '.join(others)}, only {', '.join(kept) or 'nothing'}. Set "
          "pipeline_remat_tensors to some of these."
      )


def _iterations(config: Keys) -> int | None:
  """T; None if sizes are missing or unsound, which other rules report."""
  if config.num_decoder_layers is None:
    return None
  if derived.windowed(config):
    blocks, _ = cycles.scanned(config)
    return blocks * derived.microbatches_of_window(config)
  stages, layers = derived.num_stages(config), derived.pipelined_layers(config)
  group = (stages or 0) * config.num_layers_per_pipeline_stage
  if not stages or group < 1 or layers is None or layers % group:
    return None
  delay, microbatches = derived.forwarding_delay(config), config.num_pipeline_microbatches
  microbatches = derived.least_microbatches(config) if microbatches == -1 else microbatches
  return microbatches * (layers // group) + delay * (stages - 1)
