# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses layouts over devices and slices that break an assumption of other MaxText code. Read in MaxText 0.2.5."""

from collections.abc import Iterable, Iterator

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.derived import num_stages, pipelined_layers, stages_text
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.host.rules import rows
from maxtext_pp_ext.host.rules.sizes import layers_outside
from maxtext_pp_ext.host.topology import topologies
from maxtext_pp_ext.nearest import nearest


def problems(config: HostKeys) -> Iterator[str]:
  yield from unknown_topology(getattr(config, "compile_topology", ""))
  is_explicit, stages = plain(config.shard_mode) == "explicit", num_stages(config)
  if stages is not None and stages > 1 and "stage" not in config.mesh_axes:
    yield (
        f"{stages_text(config)}, but mesh_axes={list(config.mesh_axes)} has no axis 'stage' (custom_mesh_and_rule="
        f"{plain(config.custom_mesh_and_rule)!r}), so nothing would be pipelined over devices. Use mesh_axes with "
        "'stage', as in base.yml, or pipeline_impl=host."
    )
  if stages != 1:
    yield from _explicit_beside_a_pipeline(config) if is_explicit else ()
    from maxtext_pp_ext.host.models.axes import DATA_AXES  # pylint: disable=import-outside-toplevel  # imports JAX

    for name, axes in config.logical_axis_rules or ():
      if name in DATA_AXES and "stage" in ([axes] if isinstance(axes, str) else axes or ()):
        yield (
            f"logical_axis_rules shard {name} over the mesh axis 'stage', which a pipeline reserves for its stages. "
            "Remove 'stage' from that rule."
        )
  yield from _explicit_rows(config) if is_explicit else ()
  yield from _lookup_of_embeddings(config)
  yield from _stage_axis(config)
  if config.enable_multi_tier_checkpointing and config.dcn_pipeline_parallelism > 1 and config.mtc_data_parallelism < 1:
    yield (
        f"enable_multi_tier_checkpointing=True with dcn_pipeline_parallelism={config.dcn_pipeline_parallelism}: MaxText "
        "assumes that every slice holds a copy of the whole model (mtc_data_parallelism=num_slices), but slices hold "
        "different stages. Set mtc_data_parallelism to the number of slices divided by "
        f"{config.dcn_pipeline_parallelism}."
    )
  if "float8" in (weight_dtype := str(plain(config.weight_dtype))):
    yield (
        f"weight_dtype={weight_dtype} is for serving: gradients of microbatches would be summed in it. Set "
        "weight_dtype=bfloat16 or float32."
    )


def unknown_topology(topology: str) -> Iterator[str]:
  """MaxText's own error, which comes later, lists all topologies."""
  known = topologies() if topology else {}
  if known and topology not in known:
    alike = _alike(topology, known) or list({name.partition("-")[0]: name for name in known}.values())
    yield f"compile_topology={topology} is no topology that MaxText knows. Set another one, such as {', '.join(alike)}."


def _alike(topology: str, known: Iterable[str]) -> list[str]:
  """The topologies of the same kind with about as many chips; else those with a similar name."""
  kind, _, size = str(topology).partition("-")
  of_kind = [name for name in known if name.partition("-")[0] == kind]
  if not of_kind or not size.isdigit():
    return nearest(topology, known, 5)
  return sorted(of_kind, key=lambda name: abs(int(name.partition("-")[2] or 0) - int(size)))[:5]


def _explicit_beside_a_pipeline(config: HostKeys) -> Iterator[str]:
  """MaxText's code around a pipeline mixes arrays sharded over stages with others; explicit sharding refuses it."""
  rope_type, layers, total = plain(config.rope_type), pipelined_layers(config), config.num_decoder_layers
  outside = 0 if layers is None or total is None else total - layers
  if rope_type.startswith("yarn") and outside > 0:  # the embedding fixes its layout at construction
    yield (
        f"shard_mode=explicit with rope_type={rope_type} and {outside} layers outside the pipeline: MaxText's own"
        " layers fail there, since they shard the batch over stages and their rotary embeddings do not. Set"
        " shard_mode=auto."
    )
  if config.mtp_num_layers > 0:
    yield (
        f"shard_mode=explicit with mtp_num_layers={config.mtp_num_layers}: MaxText runs the layers of multi-token "
        "prediction behind the pipeline, and fails there, since it shards their tokens over stages and their inputs "
        "not. Set shard_mode=auto, or mtp_num_layers=0."
    )
  with_experts = layers_outside(config)
  # Sparse experts give their results the layout of their inputs; shared experts, which are added, do not.
  if with_experts > 0 and config.num_experts > 1 and (not config.sparse_matmul or config.shared_experts):
    yield (
        f"shard_mode=explicit with {with_experts} layers of experts outside the pipeline (pipeline_parallel_layers="
        f"{layers}): MaxText's own code for dense or shared experts names no layout that explicit sharding takes. Set "
        "shard_mode=auto, or pipeline_parallel_layers=-1."
    )


def _explicit_rows(config: HostKeys) -> Iterator[str]:
  """MaxText cuts a loaded batch to the rows of a step, which JAX refuses if the devices cannot share these equally."""
  kinds = {"per_device_batch_size": (config.micro_batch_size_to_train_on, False)}
  if config.eval_interval > 0:
    kinds["eval_per_device_batch_size"] = (config.micro_batch_size_to_eval_on, True)
  for key, (count, evaluation) in kinds.items():
    devices = rows.shards(list(config.input_data_sharding_logical_axes), config, evaluation)
    if count and count > 0 and count % devices:
      of = "an evaluation" if evaluation else "a step"
      yield (
          f"shard_mode=explicit with {key}={getattr(config, key)}: {devices} devices cannot share the {count} rows of "
          f"{of} equally. Set {key} so that the rows are a multiple of {devices}, or shard_mode=auto."
      )


def _lookup_of_embeddings(config: HostKeys) -> Iterator[str]:
  """XLA (jax 0.11.2) cannot always compile a lookup whose results are divided over more devices than its indices.

  It dies in its verifier, "Slice dim size … greater than dynamic slice dimension". A pipeline of ours that comes right
  after the lookup keeps the two layouts alike (`Execution`). MaxText's own code does not.
  """
  if (mesh := derived.mesh_shape(config)) is None or not (causes := dict(_layouts_of_embeddings(config))):
    return
  names = list(config.input_data_sharding_logical_axes)
  for evaluation in (False, True) if config.eval_interval > 0 else (False,):
    of_tokens = rows.axes_of(names, config, evaluation)
    for cause, (axes, remedy) in causes.items():
      if not (missing := [axis for axis in axes if axis not in of_tokens and mesh.get(axis, 1) > 1]):
        continue
      if evaluation and plain(config.custom_mesh_and_rule_for_eval) != plain(config.custom_mesh_and_rule):
        rules = f"custom_mesh_and_rule_for_eval={plain(config.custom_mesh_and_rule_for_eval)}: in evaluations tokens"
        remedies = [f"custom_mesh_and_rule_for_eval={plain(config.custom_mesh_and_rule) or repr('')}", "eval_interval=-1"]
      else:
        rules = f"input_data_sharding_logical_axes={names}: tokens"
        remedies = [f"a first axis whose rule in logical_axis_rules has {' and '.join(missing)}, too"]
      yield (
          f"{rules} are not sharded over {' and '.join(missing)}, but their embeddings are ({cause}). XLA cannot compile "
          f"such a lookup. Set {' or '.join([*remedies, *remedy])}."
      )
      break


def _layouts_of_embeddings(config: HostKeys) -> Iterator[tuple[str, tuple[Iterable[str], list[str]]]]:
  """Yields (why, (the mesh axes over which MaxText's code shards the rows of embeddings, other ways out))."""
  if plain(config.shard_mode) == "explicit":
    of_rows = rows.axes_of(("activation_embed_and_logits_batch",), config, evaluation=False)
    yield "shard_mode=explicit, by the rules of training", (of_rows, ["shard_mode=auto"])
  layers, total = pipelined_layers(config), config.num_decoder_layers
  if num_stages(config) == 1 or derived.decoder_block(config) != "deepseek" or layers is None or total is None:
    return
  if layers < total:  # MaxText adds the stages to the devices of the batch there
    axes = ("stage", *rows.axes_of(("activation_batch",), config, evaluation=False))
    yield f"the {total - layers} layers before the pipeline", (axes, [])


def _stage_axis(config: HostKeys) -> Iterator[str]:
  """MaxText uses ici_parallelism and dcn_parallelism as given if it does not know the name of a mesh axis."""
  axes, sizes = list(config.mesh_axes), (list(config.ici_parallelism or ()), list(config.dcn_parallelism or ()))
  stages = config.ici_pipeline_parallelism * config.dcn_pipeline_parallelism
  if "stage" not in axes or any(len(each) != len(axes) for each in sizes):
    return
  ici, dcn = (each[axes.index("stage")] for each in sizes)
  if ici * dcn != stages:
    yield (
        f"ici_parallelism={sizes[0]} and dcn_parallelism={sizes[1]} give the mesh axis 'stage' of mesh_axes={axes} {ici} "
        f"× {dcn} devices, not the {stages} stages of ici_pipeline_parallelism={config.ici_pipeline_parallelism} × "
        f"dcn_pipeline_parallelism={config.dcn_pipeline_parallelism}. Set both to the same number."
    )
  if config.inference_benchmark_test and config.dcn_pipeline_parallelism > 1:
    yield (
        f"inference_benchmark_test=True with dcn_pipeline_parallelism={config.dcn_pipeline_parallelism}: MaxText makes a "
        "mesh in which the axis 'stage' has fewer devices than there are stages. Set inference_benchmark_test=False."
    )
