# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a layer's experts cost a device: tokens that are dispatched and combined, and the buffers for them."""

from collections.abc import Mapping
import types
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from maxtext_pp_ext.config.derived import dispatches_beside_compute
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.hardware import tiles
from maxtext_pp_ext.host.rules import rows as rows_of_devices
from maxtext_pp_ext.plan.blocks import Again
from maxtext_pp_ext.plan.estimate import Experts
from maxtext_pp_ext.plan.layers import Layers
from maxtext_pp_ext.plan.weights import shards
from maxtext_pp_ext.sharding.resolve import read_rules

# Read off programs of the TPU compiler (libtpu 0.0.48.1, v5p, remat_policy=full): Mixtral 8x7B, DeepSeek-V3 and Qwen3
# 235B without a pipeline and with a window (`python -m benchmarks.compiler_figures --shape mixtral-8x7b-dropless …`).
# Buffers of tokens, and of the experts' hidden values, that backward of a layer holds at once.
_TOKENS_HELD, _HIDDEN_HELD = 3, 5
# And of those what a part of a microbatch holds while another part computes (batch-split schedule): the inputs and the
# outputs' gradients, and all hidden values, since the gradients of the weights come last (`--shape
# deepseek3-671b-batch-split`).
_TOKENS_WAITING, _HIDDEN_WAITING = 2, 3
# And a buffer that arrives while others are read, if XLA's flags let tokens travel overlapped with compute (`--flags
# ENABLE_ASYNC_RAGGED_ALL_TO_ALL`).
_TOKENS_ARRIVING = 1
# How often they are read or written outside of the products: sorted, copied to other layouts, summed.
# All of a buffer's room, and of that the rows that hold a token if routing is balanced: Mixtral with experts on 4 and on
# 2 devices (`maxtext-pp compare … ici_expert_parallelism=2`).
_TOKENS_ROUND_TRIPS, _HIDDEN_ROUND_TRIPS = 47, 30.5
_TOKENS_ROUND_TRIPS_OF_ROWS, _HIDDEN_ROUND_TRIPS_OF_ROWS = 19, 21
# How many times as often in MaxText's own loop over layers, where the compiler copies them in slower layouts.
_OWN_LOOP = 1.42
# An exchange has tokens in tiles of 2 × 128 values, so 2880 values of gpt-oss are padded to 3072.
_TOKEN_MULTIPLE = 2 * tiles.LANES
# How many times as much with biases (gpt-oss-120b): each row gets those of its expert before they are added. What is held
# is fitted to no pipeline, the window and circular_bsw alike (6 and 5 % too little, 8 % too much).
_WITH_BIASES, _HELD_WITH_BIASES = 2.8, 1.9
# Dispatch with a capacity: what is held of the gathered weights of all experts, one gradient of the three included.
_WEIGHTS_HELD = 4 / 3


def experts(
    config: DerivedKeys,
    mesh: AbstractMesh,
    tokens: float,
    again: Mapping[Any, float] = types.MappingProxyType({}),
    *,
    own_loop: bool = False,
) -> Experts:
  """Returns what experts cost: nothing without experts, or for a dispatch for which there are no formulas.

  `tokens` are those of a microbatch on a device, `again` has the shares of forward that backward computes again, and
  `own_loop` says whether MaxText's own loop runs the layers.
  """
  if config.num_experts <= 1 or not has_formulas(config):
    return Experts()
  expert_parallelism = shards(("exp",), config, mesh)
  itemsize = jnp.dtype(config.dtype).itemsize
  width = (config.moe_mlp_dim or config.mlp_dim) / shards(("mlp",), config, mesh)
  if not config.sparse_matmul:
    weights = 3 * config.num_experts * config.emb_dim * width * itemsize
    # Tokens stay, and the compiler gathers the weights of all experts, in forward and in backward, and adds up gradients.
    sent = 3 * weights * (1 - 1 / expert_parallelism)
    held = weights * _WEIGHTS_HELD if expert_parallelism > 1 else 0
    return Experts(sent=sent, gathered=sent, held=held)
  rows = tokens * config.num_experts_per_tok
  room = rows * _imbalance(config, expert_parallelism)
  token = -(-config.emb_dim // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE * itemsize
  hidden = width * itemsize
  dispatches, combines = (2 + again.get(what, 0.0) for what in (Again.DISPATCHES, Again.COMBINES))
  biases = _WITH_BIASES if config.mlp_bias else 1
  # Results are summed over the devices that share a matrix, and scattered, before they are sent back.
  back = combines / shards(("activation_embed",), config, mesh)
  parts = rows_of_devices.parts(config)
  computing = _TOKENS_HELD + (_TOKENS_ARRIVING if dispatches_beside_compute(config) else 0)
  tokens_held = (computing + _TOKENS_WAITING * (parts - 1)) / parts
  hidden_held = (_HIDDEN_HELD + _HIDDEN_WAITING * (parts - 1)) / parts
  layouts = _OWN_LOOP if own_loop and not config.mlp_bias else 1
  moved = room * (_TOKENS_ROUND_TRIPS * token + _HIDDEN_ROUND_TRIPS * hidden)
  moved += rows * (_TOKENS_ROUND_TRIPS_OF_ROWS * token + _HIDDEN_ROUND_TRIPS_OF_ROWS * hidden)
  return Experts(
      sent=(back * rows + dispatches * room) * token if expert_parallelism > 1 else 0,
      routed=(back + dispatches) * rows * token,
      held=room * (_HELD_WITH_BIASES if config.mlp_bias else 1) * (tokens_held * token + hidden_held * hidden),
      moved=biases * layouts * moved * (3 + again.get(Again.BETWEEN, 1.0)) / 4,  # with `full` all is computed again
      # Backward of each exchange (jax._src.lax.parallel, `_ragged_all_to_all_transpose`).
      filled=(room + rows) * token if expert_parallelism > 1 else 0,
      flops=2 * rows * config.emb_dim * width * 9,
  )


def has_formulas(config: DerivedKeys) -> bool:
  """Whether the dispatch is ragged, or dense with a capacity: not by a ring of experts, nor dense without a capacity."""
  return not config.use_ring_of_experts if config.sparse_matmul else config.capacity_factor > 0


def most_expert_parallelism(config: DerivedKeys) -> int:
  """Returns how many devices of a slice can share the experts, each with equally many; 1 where that is not known.

  It is known if the mesh axis `expert` shards the experts' weights and the batch, as with MaxText's own rules, and if
  there are formulas for the dispatch.
  """
  if config.num_experts <= 1 or not has_formulas(config):
    return 1
  of_experts = next((rule.axes for rule in read_rules(config.logical_axis_rules) if rule.name == "exp"), ())
  whole = config.shard_exp_on_fsdp or config.use_2d_fsdp_sharding  # each device then has a part of every expert
  over_sequence = config.context_sharding == "expert"
  if of_experts != ("expert",) or whole or over_sequence or config.num_experts % config.dcn_expert_parallelism:
    return 1
  return config.num_experts // config.dcn_expert_parallelism


def layers_with_experts(config: DerivedKeys, *, in_pipeline: bool) -> float:
  """Returns how many layers have experts: of the model, or of its pipeline, which does not have the first dense ones."""
  if config.num_experts <= 1:
    return 0.0
  layers = config.pipeline_parallel_layers if in_pipeline else config.num_decoder_layers - config.first_num_dense_layers
  return layers / config.interleave_moe_layer_step


def between(config: DerivedKeys, known: Mapping[int, Layers]) -> Layers | None:
  """Returns the layers of a config whose experts some devices share, from those of fewer and of more such devices.

  None if these are not known. With a ragged dispatch the buffers grow with `_imbalance`. Where the fewer is one device,
  which sends nothing, the share of reads and writes that backward repeats is off by up to 0.12 for two devices, and by
  0.04 for more, and that of all exchanges together is not known; what is kept, and all else, is exact.

  Args:
    config: the config.
    known: its layers, by the number of devices within a slice that share the experts.
  """
  devices = config.ici_expert_parallelism
  fewer, more = [each for each in known if each < devices], [each for each in known if each > devices]
  if not config.sparse_matmul or not fewer or not more:
    return None
  ends = max(fewer), min(more)
  one, other = known[ends[0]], known[ends[1]]
  if len(one.blocks) != len(other.blocks) or one.tokens != other.tokens:
    return None
  low, high, own = (_imbalance(config, each * config.dcn_expert_parallelism) for each in (*ends, devices))
  return one.mixed(other, (own - low) / (high - low) if high > low else 1.0)


def _imbalance(config: DerivedKeys, expert_parallelism: int) -> float:
  """Rows of a buffer for each row that arrives if routing is balanced (MaxText's `get_ragged_buffer_size`)."""
  if expert_parallelism == 1:
    return 1.0
  if config.ragged_buffer_factor > 0:
    return config.ragged_buffer_factor
  return min(expert_parallelism, config.num_experts / config.num_experts_per_tok)
