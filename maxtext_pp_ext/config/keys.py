# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys that this package adds to MaxText's config, and the error that reports bad values."""

from typing import Protocol

from pydantic import BaseModel, Field

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.errors import Refusal
from maxtext_pp_ext.units import counted

CHOICES = {
    "pipeline_grad_accum_dtype": ("auto", "float32", "bfloat16"),
    "pipeline_gather_dtype": ("auto", "weight", "compute"),
    "sharding_conflicts": ("fallback", "warn", "error"),
}


class PipelineConfigError(Refusal, ValueError):
  """A configuration cannot be trained with the chosen implementation; the message lists the problems that were found."""

  def __init__(self, found: list[str]):
    self.problems = tuple(found)
    heading = f"{counted(len(found), 'problem')} with the pipeline configuration:"
    super().__init__("\n".join([heading, *(f"  - {text}" for text in found)]))

  def __reduce__(self):
    return (type(self), (list(self.problems),))


class PipelineConfigWarning(UserWarning):
  """A configuration can be built, but cannot be trained as it is."""


class PipelineKeys(BaseModel):
  """The keys, as a mixin for MaxText's config class.

  Their types are loose: `problems` refuses bad values together with all other problems, where pydantic would refuse them
  one by one. MaxText turns `none` in a yml file or on the command line into None.
  """

  pipeline_impl: None | str = Field(
      registry.HOST,
      description="Who runs the pipeline: 'host' (MaxText itself), 'circular', 'circular_bsw', 'circular_ag_once', or the"
      " name of an entry point in the group maxtext_pp_ext.pipelines.",
  )
  pipeline_grad_accum_dtype: None | str = Field(
      "auto",
      description="In which dtype weight gradients are summed over microbatches on each device: 'float32', 'bfloat16',"
      " or 'auto', the parameter's own dtype. Sums over devices are sent in the dtype of one microbatch's gradient,"
      " as in MaxText's plain pipeline. With one microbatch there is nothing to sum, and 'auto' is that dtype, too.",
  )
  pipeline_gather_dtype: None | str = Field(
      "auto",
      description="In which dtype weights are gathered: 'weight' (as they are stored), 'compute' (the dtype key), or"
      " 'auto', the compute dtype where the layer's first use of a weight is a cast to it, so values stay.",
  )
  pipeline_remat_iterations: int = Field(
      0,
      description="In how many iterations, from the first on, backward computes again what remat_policy keeps: all but"
      " the layers' inputs, or what pipeline_remat_tensors names. So a tensor too large to be kept in all iterations is"
      " kept in the last ones. Without a pipeline, an iteration is a layer, or block of a cycle, with a microbatch, and"
      " each stack of layers has its own first ones.",
  )
  pipeline_remat_tensors: None | str = Field(
      "",
      description="What pipeline_remat_iterations computes again: names of tensors that remat_policy keeps, such as"
      " 'mlpwi_0,mlpwi_1'. '' is all that it keeps.",
  )
  sharding_conflicts: None | str = Field(
      "fallback",
      description="What to do, at set-up, about parameters whose logical axes cannot all be sharded as the rules say:"
      " 'fallback' (as MaxText does, silently), 'warn', or 'error'. It acts with every pipeline_impl, and without a"
      " pipeline.",
  )


class Keys(HostKeys, Protocol):
  """A config of MaxText's that has these keys as well."""

  pipeline_impl: str
  pipeline_grad_accum_dtype: str
  pipeline_gather_dtype: str
  pipeline_remat_iterations: int
  pipeline_remat_tensors: str | None
  sharding_conflicts: str


def remat_tensors(config: Keys) -> tuple[str, ...]:
  """The names in pipeline_remat_tensors; () for all that the policy keeps."""
  return tuple(filter(None, map(str.strip, (config.pipeline_remat_tensors or "").split(","))))


class DerivedKeys(Keys, Protocol):
  """A config that MaxText has derived and accepted for training, so model, batches and devices are known."""

  num_decoder_layers: int
  emb_dim: int
  mlp_dim: int
  num_query_heads: int
  num_kv_heads: int
  moe_mlp_dim: int
  global_batch_size_to_train_on: int
  micro_batch_size_to_train_on: int
  micro_batch_size_to_eval_on: int
  num_target_devices: int
