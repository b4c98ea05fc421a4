# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ways in which a pipeline could silently train another model, faults that cause them, and tests that have to notice."""

from __future__ import annotations

import dataclasses

LAYERS = "tests/parity/test_layers.py::test_"
SIMPLE = f"{LAYERS}bsw_of_simple_layers_equals_a_loop_over_them[3-2-1-1]"
DELAYED = f"{LAYERS}bsw_of_simple_layers_equals_a_loop_over_them[2-3-2-2]"
KEEPS_LESS = (
    "tests/parity/test_policies.py::test_a_pipeline_that_keeps_less_in_its_first_iterations_equals_a_loop_over_its_layers"
    "[2 stages, 5 of 13-custom, all on the device]"
)
LLAMA = f"{LAYERS}bsw_of_llama_layers_equals_a_loop_over_them[3-3-1]"
NAN = f"{LAYERS}a_nan_in_every_bubble_reaches_neither_outputs_nor_gradients[3-2-2-2]"
BUBBLES = (
    "tests/engine/test_bubbles.py::test_devices_get_as_many_tokens_in_a_bubble_as_of_a_microbatch[stage 4, expert 2-2-1]"
)
EXPERTS = "tests/parity/test_moe.py::test_dense_experts_train_as_the_layers_do_without_a_pipeline[stage 2, expert 4]"
DISPATCHED = (
    "tests/parity/test_experts.py"
    "::test_maxtexts_default_dispatch_and_its_kernels_compute_what_they_do_without_a_pipeline[mixtral-3-circular_bsw]"
)
BIASES = "tests/parity/test_expert_bias.py::test_biases_move_as_without_a_pipeline[2-1]"
STACKED = "tests/parity/test_blocks.py::test_stacked_biases_that_the_config_does_not_tell_of_are_refused_when_traced"
BATCHES = "tests/reliability/test_processes.py::test_models_checkpoints_and_batches_come_sharded_over_processes"
DROPOUT = (
    "tests/parity/test_dropout.py::"
    "test_masks_are_the_same_in_forward_and_backward_and_different_for_layers_and_microbatches"
    "[unsafe_rbg-circular_bsw-sizes0]"
)
MASKS = (
    "tests/parity/test_dropout.py::"
    "test_masks_are_the_same_in_forward_and_backward_and_different_for_layers_and_microbatches"
    "[unsafe_rbg-circular_bsw-on slices]"
)
NEXT_CALL = "tests/parity/test_dropout.py::test_another_call_drops_something_else[unsafe_rbg]"
FP8 = "tests/parity/test_quantization.py::test_fp8_layers_learn_scales_and_histories_as_without_a_pipeline[3-1-2-1]"
SUMS = (
    "tests/engine/transfers/test_transfer.py::"
    "test_chunks_of_a_sum_leave_for_its_repeats_place_where_chunks_of_a_weight_come_in[{}-over_slices{}-partial_axes{}-4-False]"
)
RINGS = "tests/engine/transfers/test_torus.py::test_along_a_line_and_a_ring_most_of_a_weight_is_sent_along_the_ring[0-1]"
FINISHED = "tests/engine/test_sums.py::test_the_last_gradient_of_a_repeat_is_added_where_the_sum_waits[window]"
TILES = "tests/engine/test_partial.py::test_a_sum_over_scaled_tiles_is_not_taken_for_the_sum_over_the_batch"
PRECISION = "tests/engine/test_precision.py"
DECODER_CALL = (
    "tests/host/replacements/test_factory.py::test_an_argument_that_the_pipelined_path_drops_is_refused_by_name"
)
BUILT = "tests/host/replacements/test_factory.py::test_our_implementation_is_built_with_all_that_the_decoder_gives"
INSTALLED = "tests/host/patch_points/test_install.py::test_installing_after_maxtext_was_imported_reaches_every_place"
VERSION = "tests/host/patch_points/test_version.py::test_"
LOAD = (
    "tests/host/replacements/test_checkpoint_load.py::"
    "test_a_checkpoint_of_another_layout_is_refused_with_both_layouts_and_the_command"
)
OF_LOAD = "tests/host/replacements/test_checkpoint_load.py::test_"
CONFLICTS = "tests/sharding/test_conflicts.py::test_"
PRETRAINED = (
    "tests/host/replacements/test_checkpoint_load.py::"
    "test_from_pretrained_refuses_another_layout_before_it_makes_the_model[layers would be repeated]"
)
STRIDES = "tests/host/models/test_layouts.py::test_layers_of_a_stage_run_one_after_the_other[1]"
CONVERT = "tests/checkpoint/test_convert.py::test_values_that_are_read_back_otherwise_are_found_and_nothing_is_left"
REFUSED = (
    "tests/host/replacements/test_config_class.py::"
    "test_a_bad_configuration_stops_with_our_error_and_not_with_an_assert_of_the_host"
)
PARTLY = (
    "tests/host/patch_points/test_patch.py::"
    "test_with_a_part_of_the_patches_and_the_hook_off_a_run_that_needs_us_is_refused[1 2]"
)
NUMBERS = "tests/host/replacements/test_config_class.py::test_a_number_without_a_meaning_stops_the_trainer_by_name"
UNEQUAL = "tests/host/rules/test_pipelined_path.py::test_blocks_whose_layers_differ_by_index_are_refused_with_the_reason"
OPTIMIZER = "tests/host/rules/test_problems.py::test_what_the_implementations_cannot_do_is_refused_with_what_to_set"
PATTERNS = (
    "tests/host/rules/test_parameter_patterns.py::" "test_arrays_of_the_same_name_that_hold_other_layers_are_not_the_same"
)
FEW_ROWS = "tests/host/rules/test_proposals.py::test_fewer_rows_than_devices_that_each_want_some_are_refused"
CLAIMED = "tests/test_registry.py::test_a_package_that_claims_a_built_in_name_is_refused_by_its_name"
OWN_VARIABLES = (
    "tests/testing/test_parity.py::test_what_a_layer_leaves_in_a_variable_of_its_own_type_is_refused_instead_of_lost"
)
CALLS = "tests/parity/test_calls.py::test_what_two_calls_leave_is_what_layers_without_a_pipeline_hold[sown and assigned]"
NUMBERED = (
    "tests/host/rules/test_pipelined_path.py::test_layers_whose_names_are_in_another_order_are_refused_with_metrics"
)
TWO_NAMES = "tests/testing/test_parity.py::test_a_parameter_with_two_names_in_a_layer_has_one_gradient[False]"
WINDOW = "tests/parity/test_windows.py::test_a_window_over_the_layers_equals_the_scan_over_them[llama2-2]"
WINDOW_OF_ONE = "tests/parity/test_windows.py::test_a_window_over_the_layers_equals_the_scan_over_them[llama2--1]"
OFFLOADED = (
    "tests/parity/test_windows.py::test_what_is_offloaded_to_the_host_comes_back_unchanged[custom--1-circular_bsw]"
)
LOGITS = "tests/parity/test_logits.py::test_loss_and_gradients_are_those_of_maxtexts_own_logits[data]"
ON_SLICES = f"{LAYERS}bsw_of_stages_on_slices_equals_a_loop_over_the_layers[2 layers]"
RING = (
    "tests/engine/test_ring.py::test_each_microbatch_passes_all_stages_and_comes_back_to_its_place"
    "[1-3-False-2-4 on devices]"
)
RING_ON_SLICES = RING.replace("False", "True")
OFFLOADED_OF_PIPELINE = (
    "tests/parity/test_policies.py::test_a_pipeline_equals_a_loop_over_its_layers[custom, all offloaded, 2 stages, D = 2]"
)
OFFLOADED_IN_PART = KEEPS_LESS.replace("all on the device", "all offloaded")
SLICES = "tests/parity/test_windows.py::test_a_window_on_a_mesh_equals_the_scan_on_one_device[2 slices of fsdp 4-auto]"
REPLICAS = "tests/parity/test_windows.py::test_a_window_with_replicas_in_several_slices_equals_the_scan[simple_mlp--1]"
NO_WINDOW = "tests/host/rules/test_problems.py::test_what_has_no_window_without_a_pipeline_is_refused_with_what_to_set"
GIVEN = "tests/host/replacements/test_scanned_layers.py::test_an_array_that_microbatches_do_not_carry_is_refused_by_name"
ONE_STAGE = "tests/host/rules/test_proposals.py::test_a_model_without_a_pipeline_gets_none"
OF_COMPILER = (
    "tests/plan/test_against_compiler.py::test_predicted_memory_and_traffic_are_near_the_compilers"
    "[mixtral-8x7b-dropless, window]"
)
TIMELINE = "tests/compiled/projection/test_timeline.py::test_"
COMPARISON = "tests/testing/test_parity.py::test_nan_is_the_worst_error"


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A fault.

  Attributes:
    name: the fault's name, for `--only`.
    what: what goes wrong in training.
    file: the file with the fault, below the package.
    old: text that is replaced; it must occur exactly once.
    new: the replacement.
    test: pytest's name of the smallest test that notices.
  """

  name: str
  what: str
  file: str
  old: str
  new: str
  test: str


# Way in which the wrong model is trained -> faults that do so.
WAYS: dict[str, tuple[Mutant, ...]] = {
    "wrong weights in a window": (
        Mutant(
            "window-same-repeat",
            "forward, the repeat that has just ended is gathered again in the place of the next",
            "engine/forward.py",
            "iterations.repeat(t, after=1)",
            "iterations.repeat(t, after=0)",
            SIMPLE,
        ),
        Mutant(
            "window-backward",
            "backward computes with the weights of another repeat than forward",
            "engine/backward.py",
            "iterations.item(t), iterations.repeat(t), iterations.repeat(t, after=-1)",
            "iterations.item(t), iterations.repeat(t), iterations.repeat(t, after=0)",
            SIMPLE,
        ),
        Mutant(
            "chunks-lost-behind-sums",
            "a chunk whose place is the buffer of a finished sum never arrives there",
            "engine/order.py",
            "added[i]._replace(buffers=_with_chunk(weights[i].added(added[i]), item, chunk))",
            "added[i]",
            WINDOW,
        ),
        Mutant(
            "beside-experts-same-repeat",
            "what is gathered while experts compute is the repeat that has just ended",
            "engine/weights/of_all.py",
            "joined(weights[0].mesh, [following, chunk],",
            "joined(weights[0].mesh, [following - 1, chunk],",
            DISPATCHED,
        ),
        Mutant(
            "beside-experts-lost",
            "what is gathered while experts compute never arrives",
            "engine/forward.py",
            "weights[k].with_(arriving=arriving)",
            "weights[k].with_(arriving=None)",
            DISPATCHED,
        ),
    ),
    "bubbles in metrics": (
        Mutant(
            "bubbles-in-metrics",
            "stages report what they computed some iterations too early, that is also in bubbles",
            "pipelines/intermediates.py",
            "[number], stage)",
            "[number], 0 * stage)",
            EXPERTS,
        ),
    ),
    "metrics of other layers, or of parts of the batch": (
        Mutant(
            "deviation-of-parts",
            "the deviation of activations is that of a typical microbatch, which those of others do not add to",
            "pipelines/intermediates.py",
            "axis=axis) + jnp.var(wide(means), axis=axis)",
            "axis=axis) + 0 * jnp.var(wide(means), axis=axis)",
            CALLS,
        ),
        Mutant(
            "metrics-of-other-layers",
            "what is reported of the first layer is of one outside the pipeline, which runs last",
            "host/rules/pipelined_path.py",
            "  if config.record_internal_nn_metrics and config.num_decoder_layers is not None:\n",
            "  if not config.num_decoder_layers:\n",
            NUMBERED,
        ),
    ),
    "bubbles in activations or gradients": (
        Mutant(
            "bubbles-in-gradients",
            "what a stage computes in a bubble is added to its gradients",
            "engine/traced.py",
            "return ~self.schedule.is_bubble(t, self.stage_numbers)",
            "return self.stage_numbers >= 0",
            NAN,
        ),
        Mutant(
            "bubbles-in-activations",
            "stages in a bubble send on what they compute, in place of what they pass on",
            "engine/ring.py",
            "return jnp.where(self.is_bubble(t, y.ndim), arrived, y)",
            "return y",
            RING_ON_SLICES,
        ),
        Mutant(
            "bubbles-in-cotangents",
            "stages in a bubble send back the cotangents of what they compute, in place of those of what they pass on",
            "engine/ring.py",
            "return jnp.where(self.is_bubble(t, dx.ndim), dleaving, dx) if self._passes_on else dx",
            "return dx",
            RING_ON_SLICES,
        ),
        Mutant(
            "cotangents-of-another-iteration",
            "over slices, the cotangents that leave after an iteration are those of another one",
            "engine/backward.py",
            "ring.rotate_back(ring.write_back(t - 1, dstore))",
            "ring.rotate_back(ring.write_back(t, dstore))",
            ON_SLICES,
        ),
        Mutant(
            "inputs-lost-on-their-way",
            "over slices, an input that comes to stage 0 takes the place of the one that stage 0 has just read",
            "engine/ring.py",
            "before = t + 1 if self.schedule.over_slices else t",
            "before = t",
            RING_ON_SLICES,
        ),
        Mutant(
            "inputs-overwritten",
            "within a slice, what arrives at stage 0 before its first item takes the place of the next input",
            "engine/ring.py",
            "before = t + 1 if self.schedule.over_slices else t",
            "before = t + 1",
            SIMPLE,
        ),
        Mutant(
            "outputs-not-passed-on",
            "after its last item stage 0 passes on an input",
            "engine/ring.py",
            "jnp.where(jnp.asarray(t) > self._last_read, after, t)",
            "jnp.asarray(t)",
            RING_ON_SLICES,
        ),
        Mutant(
            "outputs-cotangents-overwritten",
            "within a slice, backward's bubbles of stage 0 overwrite cotangents of outputs",
            "engine/ring.py",
            "self.schedule.arrival(t - 1 if self.schedule.over_slices else t)",
            "self.schedule.arrival(t - 1)",
            RING,
        ),
        Mutant(
            "inputs-of-other-stages",
            "with D = 2, inputs that are in transfer before the first iteration begin a stage too late",
            "schedule/moves.py",
            "return (-before - late) % schedule.stages, late > 0",
            "return -before % schedule.stages, late > 0",
            RING_ON_SLICES.replace("1-3", "2-1.5"),
        ),
        Mutant(
            "cotangents-a-stage-late",
            "over slices, cotangents of the last outputs begin backward where they lie, not a stage before",
            "schedule/moves.py",
            "((move.target[0] - 1) % schedule.stages, 0)",
            "(move.target[0], 0)",
            RING_ON_SLICES.replace("1-3", "1-1"),
        ),
        Mutant(
            "ids-in-the-order-of-work",
            "a microbatch is masked as the one that the batch has in the place in which stages work on it",
            "pipelines/stages.py",
            "jnp.asarray(numbers(self.schedule), jnp.int32)[microbatch]",
            "microbatch",
            ON_SLICES,
        ),
        Mutant(
            "values-in-the-order-of-work",
            "what layers sow is that of another microbatch, if there are more of them than stages",
            "pipelines/intermediates.py",
            "np.argsort(numbers(schedule))[number]",
            "np.asarray(numbers(schedule))[number]",
            MASKS,
        ),
    ),
    "layers recomputed more often than the remat policy says (the same model, trained more slowly)": (
        Mutant(
            "layers-recomputed-twice",
            "layers that are rematerialised already are recomputed twice",
            "pipelines/base.py",
            "jax.checkpoint(once(fn), ",
            "jax.checkpoint(fn, ",
            "tests/engine/test_remat.py::"
            "test_what_is_rematerialised_already_is_recomputed_once_under_the_runs_policy"
            "[no inputs-each layer of a scan]",
        ),
        Mutant(
            "checkpoints-within-layers-lost",
            "a checkpoint within a layer, which bounds the memory of its recomputation, is dropped",
            "engine/programs/checkpoints.py",
            '    if not is_call(eqn) and name != "scan":\n      raise _PartOutsideError\n',
            '    if not is_call(eqn) and name != "scan":\n      continue\n',
            "tests/engine/test_checkpoints.py::test_checkpoints_around_whole_layers_are_dropped_and_others_stay",
        ),
    ),
    "bubbles that take longer than a microbatch (the same model, trained more slowly)": (
        Mutant(
            "bubbles-of-zeros",
            "in bubbles stages compute on zeros, of which all tokens choose the same experts",
            "pipelines/base.py",
            "bubble_fill: ClassVar[float | None] = None",
            "bubble_fill: ClassVar[float | None] = 0.0",
            BUBBLES,
        ),
    ),
    "lost aux losses": (
        Mutant(
            "first-calls-loss-lost",
            "of two calls of a model before its loss, only the second one's load-balance losses count",
            "pipelines/execution.py",
            "put_before(layers, earlier, appends)",
            "pass",
            CALLS,
        ),
        Mutant(
            "unknown-variables-lost",
            "what a layer leaves in a variable of a type of its own never leaves the stages",
            "pipelines/stages.py",
            "path not in known and not isinstance(variable, nnx.RngState)",
            "False",
            OWN_VARIABLES,
        ),
        Mutant(
            "aux-loss-without-gradient",
            "load-balance losses are reported and have no gradient",
            "engine/backward.py",
            "else get(all_, t, range(all_.ndim - 1))",
            "else jnp.zeros_like(all_[0])",
            EXPERTS,
        ),
        Mutant(
            "aux-loss-multiplied",
            "load-balance losses of microbatches are added up instead of averaged",
            "host/models/sown.py",
            '"moe_lb_loss": jnp.mean',
            '"moe_lb_loss": jnp.sum',
            EXPERTS,
        ),
    ),
    "dropped arguments": (
        Mutant(
            "segment-ids-dropped",
            "tokens attend to other examples packed into their row",
            "pipelines/stages.py",
            '"segment_ids": of_microbatch(aux["segment_ids"])',
            '"segment_ids": None',
            LLAMA,
        ),
        Mutant(
            "deterministic-dropped",
            "nothing is dropped out",
            "pipelines/base.py",
            "module(x, segment_ids, positions, deterministic, model_mode)",
            "module(x, segment_ids, positions, True, model_mode)",
            DROPOUT,
        ),
        Mutant(
            "falsy-arguments-dropped",
            "the decoder's pipelined path loses an argument such as slot=0",
            "host/replacements/decoder_call.py",
            "if arguments.get(key) is not None",
            "if arguments.get(key)",
            DECODER_CALL,
        ),
    ),
    "wrong layer order": (
        Mutant(
            "ring-backwards",
            "activations go to the stage before: with two stages nobody could tell",
            "engine/ring.py",
            "(s, (s + step) % stages)",
            "(s, (s - step) % stages)",
            SIMPLE,
        ),
        Mutant(
            "repeats-swapped",
            "the stages of the last repeat hold the layers of the first",
            "engine/traced.py",
            "repeats = self.schedule.repeat(t, self.stage_numbers) + after",
            "repeats = self.schedule.repeats - 1 - self.schedule.repeat(t, self.stage_numbers) - after",
            SIMPLE,
        ),
    ),
    "activations of another microbatch or iteration": (
        Mutant(
            "ids-of-stage-0",
            "a stage masks its microbatch as the first stage masks the one that it works on",
            "pipelines/stages.py",
            "microbatch = self.schedule.microbatch(t, stages)",
            "microbatch = self.schedule.microbatch(t, 0 * stages)",
            LLAMA,
        ),
        Mutant(
            "delay-ignored",
            "with delayed forwarding, activations arrive an iteration early",
            "engine/forward.py",
            "(y, None) if state.held is None else (state.held, y)",
            "(y, None) if state.held is None else (y, y)",
            DELAYED,
        ),
        Mutant(
            "kept-of-another-iteration",
            "layers go on with a product that the iteration before has kept",
            "engine/forward.py",
            "return get(self.buffers[k], self._index, order)",
            "return get(self.buffers[k], self._index - 1, order)",
            "tests/parity/test_policies.py::test_a_pipeline_equals_a_loop_over_its_layers[minimal, 2 stages]",
        ),
        Mutant(
            "places-of-the-first-part",
            "where the first iterations keep less, the others read what is kept further behind",
            "engine/traced.py",
            "return (t - self.first) // turns if self.first else t // turns",
            "return t // turns",
            KEEPS_LESS,
        ),
        Mutant(
            "parts-forward-in-backward",
            "where the first iterations keep less, backward runs them before the others of their loop",
            "engine/traced.py",
            "[:: -1 if reverse else 1]",
            "[::1]",
            KEEPS_LESS,
        ),
        Mutant(
            "residuals-of-another-iteration",
            "what forward saved of a layer is read as that of another iteration, where it is read after other gradients",
            "engine/order.py",
            "old._replace(iteration=crossed[k]) if",
            "old._replace(iteration=crossed[k] - 1) if",
            "tests/engine/test_segments.py::test_gradients_of_segments_are_those_of_the_whole",
        ),
        Mutant(
            "offloaded-in-another-order",
            "what comes back from the host's memory has its dimensions in the order in which it left",
            "engine/programs/offloaded.py",
            "sorted(range(x.ndim), key=order.__getitem__)",
            "order",
            "tests/engine/test_offloaded.py::test_what_is_kept_has_another_order_and_the_same_values[backward]",
        ),
    ),
    "weights of other devices' shards": (
        Mutant(
            "steps-in-another-order",
            "shards that are gathered step by step come in another order",
            "engine/transfers/collectives.py",
            "for each in reversed(groups(sizes)):",
            "for each in groups(sizes):",
            "tests/engine/transfers/test_torus.py::test_a_repeat_gathered_in_steps_is_the_repeat",
        ),
        Mutant(
            "ring-before-line",
            "shards that are gathered over a line, then along a ring, come as if the ring were the major one",
            "engine/transfers/collectives.py",
            "x = jax.lax.all_gather(x, axis, axis=1, tiled=True, axis_index_groups=along_ring)",
            "x = jax.lax.all_gather(x, axis, axis=0, tiled=True, axis_index_groups=along_ring)",
            RINGS,
        ),
    ),
    "gradients of other devices' shards, or of another weight": (
        Mutant(
            "scatter-steps-swapped",
            "gradients that are scattered in two steps arrive on other devices",
            "engine/transfers/collectives.py",
            "for each in steps:",
            "for each in steps[::-1]:",
            WINDOW,
        ),
        Mutant(
            "scatter-across-slices-first",
            "gradients that are scattered within slices and then between them arrive on other devices",
            "engine/transfers/collectives.py",
            "across, *within = _steps(",
            "*within, across = _steps(",
            "tests/engine/transfers/test_collectives.py::test_each_device_gets_its_part_of_the_sum"
            "[rows in tiles-an axis over two slices-True-True]",
        ),
        Mutant(
            "sums-of-another-weight",
            "sums that are reduced while backward computes are stored as those of another weight",
            "engine/weights/of_all.py",
            "tied[name][k] for name in of[k]}",
            "tied[name][-1 - k] for name in of[k]}",
            "tests/engine/test_segments.py::test_what_is_computed_before_a_gradient_is_returned_in_the_gradients_place",
        ),
    ),
    "gradients reduced twice or not at all": (
        Mutant(
            "sums-not-reduced",
            "gradients of all repeats but the first stay on their devices",
            "schedule/circular.py",
            "reduces=high <= reducing",
            "reduces=False",
            SIMPLE,
        ),
        Mutant(
            "logits-of-own-rows",
            "over slices, the gradient of the logits' weight is that of each stage's own rows",
            "engine/outside.py",
            "jax.lax.psum(jax.lax.dynamic_slice_in_dim(own[0], first, size, dim), STAGE_AXIS)",
            "jax.lax.dynamic_slice_in_dim(own[0], first, size, dim)",
            LOGITS,
        ),
        Mutant(
            "logits-in-part",
            "over slices, a part of the gradient of the logits' weight is never added up",
            "engine/outside.py",
            "ring.schedule.iterations - 1 - jnp.asarray(t)",
            "ring.schedule.iterations - jnp.asarray(t)",
            LOGITS,
        ),
        Mutant(
            "sums-not-emptied",
            "the gradients of a repeat are counted in the repeat before, too",
            "engine/weights/accumulators.py",
            "acc = jnp.where(first, jnp.zeros_like(total), total)",
            "acc = total",
            SIMPLE,
        ),
        Mutant(
            "last-gradient-left-out",
            "the sum of a repeat lacks the gradient of its first microbatch",
            "engine/weights/accumulators.py",
            "finished = total + part.on_device(*operands).astype(total.dtype)",
            "finished = total",
            FINISHED,
        ),
        Mutant(
            "exchange-of-the-own-part",
            "of two devices each sends the part of a gradient that it is to keep",
            "engine/transfers/collectives.py",
            "for half in (index, 1 - index))",
            "for half in (1 - index, index))",
            SUMS.format("chunks divide", 0, 0),
        ),
        Mutant(
            "sums-in-the-other-buffer",
            "the sums of a repeat take the place of the weights of the repeat before, which a stage computes with next",
            "engine/weights/accumulators.py",
            "total, repeat % 2, 0)",
            "total, (repeat + 1) % 2, 0)",
            SUMS.format("chunks divide", 0, 0),
        ),
        Mutant(
            "replicated-not-reduced",
            "each device steps a replicated weight along its own part of the batch",
            "engine/transfers/transfer.py",
            "return jax.lax.psum(part, rest) if rest else part",
            "return part",
            SUMS.format("nothing is sharded", 0, 0),
        ),
        Mutant(
            "complete-reduced-again",
            "a gradient that is the same on all devices of an axis is added up over them",
            "engine/transfers/transfer.py",
            "summed = tuple(a for a in axes if a in sum_over)",
            "summed = axes",
            SUMS.format("a vector over both axes", 0, 1),
        ),
        Mutant(
            "tiles-for-batch",
            "parts that are scaled each by itself are added up as if they were not",
            "engine/programs/roots.py",
            "root = None if deeper is not None and deeper.factors else root",
            "root = root if deeper is not None else root",
            TILES,
        ),
    ),
    "random numbers reused": (
        Mutant(
            "same-masks-for-microbatches",
            "all microbatches of a layer are dropped out alike",
            "pipelines/stages.py",
            '_keys_of_microbatch(r, aux["microbatch"])',
            '_keys_of_microbatch(r, 0 * aux["microbatch"])',
            DROPOUT,
        ),
        Mutant(
            "keys-of-the-first-stage",
            "with MaxText's own random numbers, layers are dropped out as others were whose key is the first of a vmap",
            "pipelines/stages.py",
            'jax.random.wrap_key_data(data[..., :2], impl="threefry2x32")',
            "jax.random.wrap_key_data(data)",
            DROPOUT,
        ),
        Mutant(
            "other-masks-backward",
            "gradients are those of other masks than the outputs",
            "engine/backward.py",
            "self.pipeline.aux_at(self.kept.aux, t),",
            "self.pipeline.aux_at(self.kept.aux, t + 1),",
            DROPOUT,
        ),
        Mutant(
            "same-masks-in-every-step",
            "random counters stand still, so that every step drops the same",
            "pipelines/stages.py",
            "    if counts:\n",
            "    if not counts:\n",
            NEXT_CALL,
        ),
    ),
    "stale fp8 scales": (
        Mutant(
            "scales-added-up",
            "the next scales and histories of microbatches are added up",
            "pipelines/execution.py",
            "combine=MAX if overwritten else SUM",
            "combine=SUM",
            FP8,
        ),
    ),
    "updates of the whole batch made of its microbatches": (
        Mutant(
            "counts-of-one-microbatch",
            "biases of experts balance the fullest microbatch instead of the batch",
            "host/models/sown.py",
            '"moe_bias_updates": jnp.sum',
            '"moe_bias_updates": jnp.max',
            BIASES,
        ),
        Mutant(
            "updates-of-other-layers",
            "with as many experts as layers in a stage, biases get the updates of other layers' experts",
            "host/models/sown.py",
            "isinstance(bias, nnx.Param) and axis != 0",
            "False",
            STACKED,
        ),
        Mutant(
            "mean-over-other-tokens",
            "the indexer's loss is the mean of means over different numbers of tokens",
            "host/rules/per_microbatch.py",
            "if factor > 0 and compressed and",
            "if factor < 0 and compressed and",
            "tests/host/rules/test_per_microbatch.py::"
            "test_what_would_be_a_microbatchs_is_refused_by_name_with_what_to_set",
        ),
    ),
    "a batch that differs from process to process": (
        Mutant(
            "parts-for-replicas",
            "rows that devices cannot share equally are taken for the same in all processes",
            "sharding/create.py",
            'on_conflict = "error" if several else on_conflict',
            "pass",
            BATCHES,
        ),
    ),
    "rounding where the layers do not round": (
        Mutant(
            "gathered-narrower",
            "a weight that is also used uncast is gathered in the dtype of its cast",
            "engine/programs/precision.py",
            '    if eqn is None or eqn.primitive.name != "convert_element_type":\n      return None\n',
            '    if eqn is None or eqn.primitive.name != "convert_element_type":\n      continue\n',
            PRECISION,
        ),
        Mutant(
            "summed-narrower",
            "gradients are summed in bfloat16 without being asked to",
            "pipelines/execution.py",
            'in_auto if overwritten or accumulate_in == "auto" else jnp.dtype(accumulate_in)',
            "in_auto if overwritten else jnp.dtype(jnp.bfloat16)",
            SIMPLE,
        ),
    ),
    "a checkpoint loaded into the wrong layout": (
        Mutant(
            "other-layout-not-refused",
            "a checkpoint of another layout is loaded as it is",
            "host/replacements/checkpoint_load.py",
            "if found.shapes and found.shapes != wanted and size(found.shapes) == size(wanted):",
            "if not found.shapes and not wanted:",
            LOAD,
        ),
        Mutant(
            "other-layout-not-refused-in-post-training",
            "from_pretrained repeats layers of a checkpoint of another layout, or leaves them out",
            "host/replacements/checkpoint_load.py",
            "token = in_from_pretrained.set(True)",
            "token = in_from_pretrained.set(False)",
            PRETRAINED,
        ),
        Mutant(
            "layers-mixed-in-conversion",
            "a conversion takes the order of stages for that of repeats",
            "host/models/layouts.py",
            "zip(axes, place.stacks, strict=True)",
            "zip(axes, reversed(place.stacks), strict=True)",
            STRIDES,
        ),
        Mutant(
            "conversion-not-verified",
            "a conversion whose values are not on the disk is called verified",
            "checkpoint/convert.py",
            "if found[key] != sum_",
            "if found[key] is None",
            CONVERT,
        ),
    ),
    "a checkpoint that lacks something": (
        Mutant(
            "part-of-a-checkpoint-converted",
            "a conversion leaves out a weight or a moment that the checkpoint lacks, and says that all is read back",
            "cli/convert.py",
            "complete.check(opened.shapes, ",
            "complete.has_optimizer(opened.shapes) or (",
            "tests/fuzz/test_checkpoints.py::test_arrays_of_wrong_shapes_and_dtypes_are_refused_by_name[a moment less]",
        ),
        Mutant(
            "weight-not-missed-by-the-engine",
            "the training engine trains on without a weight that the checkpoint lacks",
            "host/replacements/checkpoint_load.py",
            "if weights and (problems",
            "if not weights and (problems",
            f"{OF_LOAD}the_training_engine_refuses_a_checkpoint_that_lacks_a_weight",
        ),
        Mutant(
            "moment-begun-anew",
            "a run goes on with one moment of its optimizer, and begins the other anew",
            "host/replacements/checkpoint_load.py",
            "if problems := list(complete.lacking_of_optimizer(",
            "if problems := () and list(complete.lacking_of_optimizer(",
            f"{OF_LOAD}a_part_of_the_optimizers_state_that_lacks_is_named_where_maxtext_would_begin_it_anew",
        ),
    ),
    "a weight sharded along another dimension than its names mean (the same model, in more memory)": (
        Mutant(
            "names-made-up",
            "dimensions without a name in front of the stacked layers count as named",
            "sharding/variables.py",
            "added=added)",
            "added=0)",
            f"{CONFLICTS}names_that_a_scan_leaves_short_are_a_conflict_although_it_names_its_own_dimension",
        ),
        Mutant(
            "stages-along-a-layers-dimension",
            "the stages of a pipeline shard a dimension of the layers, where these have no names of their own",
            "sharding/variables.py",
            "    names = _of_stacks(names, stacked, place, rank)",
            "    rest = [name for name in names if name != stacked]\n    names = (*rest[:place], stacked, *rest[place:])",
            "tests/sharding/test_variables.py::test_names_of_several_stacks_alone_come_where_the_stacks_are",
        ),
    ),
    "a host version whose patch point changed": (
        Mutant(
            "newer-host-accepted",
            "a MaxText that nobody has read is pipelined all the same",
            "host/patch_points/version.py",
            "if not _LEAST <= number < _BELOW:",
            "if not _LEAST <= number:",
            f"{VERSION}other_versions_stop_with_both_versions",
        ),
        Mutant(
            "other-signature-accepted",
            "a function of MaxText takes its arguments in another order",
            "host/patch_points/version.py",
            "if found not in expected:",
            "if not found:",
            f"{VERSION}a_signature_that_differs_stops_with_the_expected_and_the_found_one",
        ),
        Mutant(
            "new-parameter-accepted",
            "the decoder takes one more argument, which its pipelined path drops",
            "host/patch_points/version.py",
            "if parameter not in known]",
            "if parameter in ()]",
            f"{VERSION}a_decoder_with_a_parameter_that_we_do_not_know_is_refused",
        ),
    ),
    "another pipeline than was asked for": (
        Mutant(
            "hosts-pipeline-instead",
            "MaxText's own pipeline trains, whatever pipeline_impl says",
            "host/replacements/factory.py",
            "  if name == registry.HOST:\n    return None",
            "  if name:\n    return None",
            BUILT,
        ),
        Mutant(
            "patch-point-where-nobody-looks",
            "our factory is put where it is defined, and not where it was imported by name",
            "host/patch_points/rebind.py",
            "_bind_everywhere(old, new)\n\n  def changed_since",
            "setattr(home, name, new)\n\n  def changed_since",
            INSTALLED,
        ),
        Mutant(
            "name-taken-over",
            "an installed package takes the name of a built-in pipeline",
            "registry.py",
            "if entry_point.name in found:",
            "if not entry_point.name:",
            CLAIMED,
        ),
    ),
    "layers without a pipeline": (
        Mutant(
            "scanned-over-another-axis",
            "layers without a pipeline are taken along another axis than they are stacked along",
            "pipelines/stacking.py",
            "axis = self.axis if isinstance(variable, nnx.Param) and x.ndim > self.axis else 0",
            "axis = 0",
            WINDOW,
        ),
        Mutant(
            "rows-change-places",
            "without a pipeline, the rows of microbatches return in another order than they came",
            "pipelines/execution.py",
            "return jnp.moveaxis(by_part, 0, 1).reshape(-1, *x.shape[2:])",
            "return by_part.reshape(-1, *x.shape[2:])",
            WINDOW,
        ),
        Mutant(
            "layers-left-out",
            "one microbatch at a time, an odd number of layers loses one",
            "engine/traced.py",
            "return _loop(count % 2, lambda _, carry: in_turn(count - 1, count - 1, carry), carry, compiled=False)",
            "return carry",
            "tests/engine/test_iterations.py::test_each_iteration_of_a_phase_runs_once_and_in_order",
        ),
        Mutant(
            "layers-share-gradients",
            "one microbatch at a time, a layer's gradients are added to those of the layer behind",
            "engine/weights/whole.py",
            "in_memory(gradient, ",
            "in_memory(there(self.total) + gradient, ",
            WINDOW_OF_ONE,
        ),
        Mutant(
            "residuals-of-the-next-layer",
            "one microbatch at a time, backward reads the residuals of the layer beside",
            "engine/backward.py",
            "get, all_[turn]",
            "get, all_[1 - turn]",
            WINDOW_OF_ONE,
        ),
        Mutant(
            "offloaded-not-sent",
            "what the last iteration offloads is never sent to the host",
            "engine/forward.py",
            "saved[number] = host_memory.sent(",
            "host_memory.sent(",
            OFFLOADED,
        ),
        Mutant(
            "offloaded-at-another-turn",
            "what an iteration offloads is sent to the buffer of the other turn",
            "engine/host_memory.py",
            "jnp.maximum(part.place(t - 1, turns), 0), (turn - 1) % turns",
            "jnp.maximum(part.place(t - 1, turns), 0), turn % turns",
            OFFLOADED,
        ),
        Mutant(
            "offloaded-at-once",
            "what a policy offloads is sent by the iteration that computes it",
            "engine/programs/offloaded.py",
            "return [jnp.transpose(in_memory(values[0], order), order)]",
            "return eqn.primitive.bind(jnp.transpose(in_memory(values[0], order), order), **eqn.params)",
            "tests/engine/test_offloaded.py::test_what_is_kept_has_another_order_and_the_same_values[backward]",
        ),
        Mutant(
            "offloaded-of-the-next-iteration",
            "what an iteration offloads is sent to the place of the next one",
            "engine/host_memory.py",
            "jnp.maximum(part.place(t - 1, turns), 0), (turn - 1) % turns",
            "jnp.maximum(part.place(t, turns), 0), turn % turns",
            OFFLOADED,
        ),
        Mutant(
            "fetched-of-another-iteration",
            "backward reads what the iteration behind has offloaded",
            "engine/backward.py",
            "_replace(fetched=host_memory.fetched(self.pipeline, self.number, self.kept.saved[self.number], t))",
            "_replace(fetched=host_memory.fetched(self.pipeline, self.number, self.kept.saved[self.number], t + 1))",
            OFFLOADED_OF_PIPELINE,
        ),
        Mutant(
            "fetched-for-another-part",
            "where iterations begin to keep less, backward reads what was fetched for others",
            "engine/backward.py",
            "if number != fetches_for:",
            "if fetches_for is None:",
            OFFLOADED_IN_PART,
        ),
        Mutant(
            "offloaded-of-one-layer",
            "what a remat policy offloads to the host is that of one layer for all layers",
            "engine/buffers.py",
            "return jax.lax.dynamic_update_index_in_dim(all_, _in_order(one, order), t, axis=0)",
            "on_host = jax.typeof(one).memory_space != jax.memory.Space.Device\n"
            "  return jax.lax.dynamic_update_index_in_dim(all_, _in_order(one, order), 0 * t if on_host else t, axis=0)",
            OFFLOADED,
        ),
        Mutant(
            "replicas-not-added-up",
            "a slice steps its weights by the gradients of its own part of the batch",
            "engine/transfers/transfer.py",
            "part = jax.lax.psum(part, self.summed_after) if self.summed_after else part",
            "part = part",
            SUMS.format("chunks divide", 1, 0),
        ),
        Mutant(
            "replicas-a-layer-off",
            "gradients that replicas in other slices add up become those of the layer before",
            "engine/backward.py",
            "iterations.repeat(t, after=2)",
            "iterations.repeat(t, after=1)",
            REPLICAS,
        ),
        Mutant(
            "replicas-of-no-first-layer",
            "gradients of the second layer, which replicas in other slices add up last, become those of the first",
            "engine/backward.py",
            "finished = jnp.ones((schedule.stages,)",
            "finished = jnp.zeros((schedule.stages,)",
            REPLICAS,
        ),
        Mutant(
            "slices-not-added-up",
            "layers' gradients are those of a slice's own part of the batch",
            "engine/transfers/transfer.py",
            "rest = tuple(a for a in sum_over if a not in scattered and",
            'rest = tuple(a for a in sum_over if a not in scattered and a != "data" and',
            SLICES,
        ),
        Mutant(
            "pipeline-without-stages",
            "keys of a pipeline are read by nobody, where there is only one stage",
            "host/rules/sizes.py",
            "for key, only in derived.without_effect(config).items():",
            "for key, only in ():",
            NO_WINDOW,
        ),
        Mutant(
            "layers-taken-past-the-window",
            "a schedule of gradient accumulation in which MaxText runs the layers itself trains without the window",
            "host/rules/windowed_path.py",
            '    "gradient_accumulation_schedule": (',
            '    "gradient_accumulation_schedules": (',
            "tests/host/rules/test_windowed_path.py::test_what_a_window_cannot_do_is_refused_with_the_key_and_what_to_set",
        ),
        Mutant(
            "layers-get-less",
            "layers are called without an array that MaxText gives them",
            "host/replacements/scanned_layers.py",
            "for key, value in given.items() if value is not None]",
            "for key, value in given.items() if value is NotImplemented]",
            GIVEN,
        ),
        Mutant(
            "one-stage-becomes-several",
            "what is proposed for a model without a pipeline has one",
            "host/rules/candidates.py",
            "least, most = (1, 1) if derived.num_stages(config) == 1 else (2, _MOST_STAGES)",
            "least, most = 2, _MOST_STAGES",
            ONE_STAGE,
        ),
    ),
    "another model than without a pipeline": (
        Mutant(
            "numbers-not-judged",
            "a batch of -3 rows, or another number without a meaning, is computed with",
            "host/replacements/config_class.py",
            "  if config.pipeline_impl != registry.HOST and (found := ",
            "  if config.pipeline_impl == registry.HOST and (found := ",
            NUMBERS,
        ),
        Mutant(
            "partly-patched-not-refused",
            "a MaxText with a part of patches/, and without the hook, drops what the config asks for",
            "host/replacements/config_class.py",
            "  if asks_for_us and (problem := ",
            "  if not asks_for_us and (problem := ",
            PARTLY,
        ),
        Mutant(
            "problems-not-raised",
            "what is known not to work is trained",
            "host/replacements/config_class.py",
            "  found = problems(derived, given)\n  if found:",
            "  found = problems(derived, given)\n  if found is None:",
            REFUSED,
        ),
        Mutant(
            "unequal-layers-built-alike",
            "layers that differ by index are built alike",
            "host/rules/pipelined_path.py",
            "if block in UNIFORM_BLOCKS or config.num_decoder_layers is None:",
            "if block:",
            UNEQUAL,
        ),
        Mutant(
            "rows-not-counted",
            "microbatches with fewer rows than the devices of a `shard_map` fail from within MaxText, or one day do not",
            "host/rules/rows.py",
            "return rows % self.devices == 0 and rows >= self.least",
            "return rows >= self.least",
            FEW_ROWS,
        ),
        Mutant(
            "optimizer-mixes-layers",
            "Muon orthogonalizes matrices across layers",
            "host/rules/optimizer.py",
            'plain(config.opt_type) == "muon"',
            "plain(config.opt_type) is None",
            OPTIMIZER,
        ),
        Mutant(
            "optimizer-chooses-other-layers",
            "patterns over parameter paths select other layers than without a pipeline, or none",
            "host/rules/parameter_patterns.py",
            "if _selections(patterns, with_pipeline) == _selections(patterns, without):",
            "if _selections(patterns, with_pipeline):",
            PATTERNS,
        ),
    ),
    "projected seconds of another program": (
        Mutant(
            "unrolled-loops-counted-twice",
            "a loop that the compiler unrolled counts as often as its counter's bound says",
            "compiled/program/integers.py",
            "return count\n",
            "return 2 * count\n",
            "tests/compiled/program/test_hlo.py::"
            "test_a_trip_count_without_a_note_follows_from_the_counters_start_step_and_bound",
        ),
        Mutant(
            "transfers-at-the-same-time",
            "transfers over the same links do not wait for each other",
            "compiled/projection/timeline.py",
            "start = max([run.seconds, *(self._free[lane] for lane in transfer.lanes)])",
            "start = run.seconds",
            f"{TIMELINE}transfers_over_the_same_links_wait_for_each_other_and_over_others_do_not",
        ),
        Mutant(
            "waiting-counts-as-compute",
            "what one stage computes while the others wait counts as the compute of all",
            "compiled/projection/timeline.py",
            "_add(run.parts, each.parts, share)",
            "_add(run.parts, each.parts, each is longest)",
            f"{TIMELINE}a_branch_runs_in_the_iterations_in_which_some_device_takes_it",
        ),
        Mutant(
            "buffers-count-as-tokens",
            "a dispatch of tokens counts as all that its buffers hold, also where a share of it is sent",
            "compiled/program/collectives.py",
            "wire, balanced = buffer.bytes, buffer.bytes / max(buffer.dims[0], 1) * balanced_count * share",
            "wire, balanced = buffer.bytes, buffer.bytes",
            "tests/compiled/test_reading.py::test_a_ragged_all_to_all_dispatches_tokens",
        ),
        Mutant(
            "branches-added-up",
            "all branches of a conditional count, of which one runs",
            "compiled/program/execution.py",
            "return tuple((index, count / len(numbers)) for",
            "return tuple((index, 1.0) for",
            "tests/compiled/program/test_execution.py::" "test_a_branch_counts_by_the_share_of_the_devices_that_take_it",
        ),
        Mutant(
            "plan-without-room",
            "plan counts the tokens that are sent to experts, without the room that the buffers of their results have",
            "plan/experts.py",
            "sent=(back * rows + dispatches * room) * token if",
            "sent=dispatches * rows * token if",
            OF_COMPILER,
        ),
        Mutant(
            "plan-gathers-once-more",
            "plan gathers an operand of products for each of them",
            "plan/operations.py",
            "if (array, over) not in self._whole:",
            "if True:",
            "tests/plan/test_operations.py::test_an_mlp_gathers_its_input_once_for_both_products_and_scatters_its_result_"
            "where_that_is_asked_for",
        ),
        Mutant(
            "plan-whole-stream",
            "plan takes what goes from layer to layer to be whole on each device of the tensor axis",
            "plan/operations.py",
            "  if contracted:\n    return [None, None]",
            "  return [None, None]",
            "tests/plan/test_operations.py::test_tensor_parallelism_divides_what_goes_from_layer_to_layer[qwen3-8b]",
        ),
        Mutant(
            "plan-looks-away",
            "plan passes over candidates that could be the first of their kind",
            "plan/search.py",
            "choices.at_least(of) / tokens > first",
            "choices.at_least(of) / tokens > first * 0.5",
            "tests/cli/test_plan.py::test_what_is_not_looked_at_closely_since_it_is_slower_is_never_the_first_of_its_kind",
        ),
        Mutant(
            "plan-takes-too-few-rows",
            "plan has models without a pipeline whose rows do not divide among the devices",
            "host/rules/rows.py",
            "if rows % (unit := need.devices * parts(config)):",
            "if (unit := need.devices * parts(config)) > 1 > rows:",
            "tests/cli/test_plan.py::test_a_model_without_a_pipeline_needs_rows_on_each_device",
        ),
        Mutant(
            "plan-copies-nothing",
            "plan has a loop of MaxText's keep no copies where it offloads",
            "plan/costs.py",
            "if sizes.offloaded:\n    kept |=",
            "if False:\n    kept |=",
            "tests/plan/test_costs.py::test_a_loop_of_maxtexts_that_offloads_may_copy_what_else_it_keeps",
        ),
        Mutant(
            "plan-mixes-models",
            "plan counts the parameters of a model with a pipeline as those of one without",
            "host/models/abstract_model.py",
            "self._built.setdefault((*keys, config.using_pipeline_parallelism), [])",
            "self._built.setdefault((len(keys),), [])",
            "tests/cli/test_plan.py::test_models_that_candidates_share_change_no_figure",
        ),
        Mutant(
            "plan-layers-too-few",
            "plan counts one layer less in each stage where it takes the parameters of a model with more layers",
            "host/models/abstract_model.py",
            "for index in range(kept, len(modules))}",
            "for index in range(kept - 1, len(modules))}",
            "tests/parity/test_restacked.py::test_parameters_of_a_stage_with_fewer_layers_are_those_of_the_first_layers",
        ),
        Mutant(
            "plan-experts-of-other-axes",
            "plan gives devices to experts that the rules have on another mesh axis, and dispatch seems free",
            "plan/experts.py",
            'if of_experts != ("expert",) or whole',
            "if whole",
            "tests/plan/test_experts.py::test_where_another_axis_shards_experts_or_formulas_are_missing_none_are_shared",
        ),
        Mutant(
            "plan-meshes-off-the-torus",
            "plan leaves out meshes that divide axes of the torus, as if there were no key for it",
            "plan/search.py",
            "{_SPLITS: True}), changed | {_SPLITS: True}",
            "{}), changed",
            "tests/cli/test_plan.py::test_where_a_mesh_divides_axes_of_the_torus_its_row_has_the_key_for_it",
        ),
        Mutant(
            "plan-computes-what-is-kept",
            "plan has backward compute again what the remat policy keeps",
            "plan/blocks.py",
            "counts, runs = runs & keeps[each.name], runs & ~keeps[each.name]",
            "counts = runs & keeps[each.name]",
            "tests/plan/test_layers.py::test_what_is_kept_and_computed_again_is_what_jax_keeps_and_computes_again[llama3-8b]",
        ),
        Mutant(
            "plan-keeps-too-much",
            "plan chooses to keep what does not fit",
            "plan/choice.py",
            "if (found := predict(self._kept(case)))[0].peak <= limit",
            "if (found := predict(self._kept(int(np.lexsort((linear.seconds(self._shares, self._host),))[0]))))",
            "tests/plan/test_choice.py::test_no_policy_that_fits_is_faster",
        ),
        Mutant(
            "plan-fills-the-host",
            "plan chooses to offload what does not fit into the host's memory",
            "plan/choice.py",
            "(peak <= limit) & (on_host <= of_host))",
            "peak <= limit)",
            "tests/plan/test_choice.py::test_what_is_offloaded_fits_into_the_hosts_memory",
        ),
        Mutant(
            "plan-keeps-too-much-in-parts",
            "plan lets too few of the first iterations keep less",
            "plan/choice.py",
            "first = np.ceil(over * iterations)",
            "first = np.floor(over * iterations)",
            "tests/plan/test_choice.py::test_no_number_of_first_iterations_that_keep_less_is_faster",
        ),
        Mutant(
            "plan-pins-nothing",
            "plan chooses other stages than the run has",
            "plan/search.py",
            "if all(self.found.pinned.get(key, size)",
            "if all(size",
            "tests/cli/test_plan.py::test_what_the_run_says_of_its_pipeline_is_not_chosen_otherwise",
        ),
        Mutant(
            "plan-copies-experts",
            "plan takes it that XLA copies experts' weights, too, ahead of a loop over layers",
            "plan/quantities.py",
            "total(inside.narrow / inside.shards, ~inside.of_experts)",
            "total(inside.narrow / inside.shards)",
            "tests/plan/test_quantities.py::"
            "test_xla_copies_weights_but_those_of_experts_ahead_of_a_loop_over_layers[experts]",
        ),
        Mutant(
            "plan-long-axes-open",
            "the long axis of a slice of v6e-128 counts as open, with half of its links",
            "hardware/torus.py",
            "tuple(length == _RING_2D for length in lengths)",
            "(min(lengths) == _RING_2D,) * 2",
            "tests/hardware/test_torus.py::"
            "test_each_slice_of_maxtexts_table_has_the_chips_and_the_closed_axes_of_the_table",
        ),
        Mutant(
            "plan-logits-in-the-window",
            "the table of plan counts the weights of the logits as part of the window",
            "cli/tables/plan.py",
            "*(Part.SUMS, Part.UNREDUCED,",
            "*(Part.HEAD, Part.SUMS, Part.UNREDUCED,",
            "tests/cli/test_plan_table.py::test_the_columns_of_memory_add_up_to_it",
        ),
    ),
    "a comparison that cannot fail, or fails for nothing": (
        Mutant(
            "second-name-is-new",
            "a layer's parameter counts as sown by its call if it has a second name",
            "testing/loop.py",
            "path not in before and id(variable) not in known and",
            "path not in before and id(variable) and",
            TWO_NAMES,
        ),
        Mutant(
            "nan-agrees",
            "results that are NaN count as equal",
            "testing/parity.py",
            "if not error <= bound]",
            "if error > bound]",
            COMPARISON,
        ),
        Mutant(
            "nothing-agrees",
            "of a parameter that has no gradient, nothing is compared",
            "testing/parity.py",
            "    if names:\n",
            "    if names is None:\n",
            "tests/testing/test_parity.py::test_a_parameter_without_a_gradient_is_named_unless_the_caller_knows",
        ),
    ),
}
MUTANTS = {mutant.name: mutant for mutants in WAYS.values() for mutant in mutants}


def markdown() -> str:
  """The table of docs/faults.md, which `make docs` writes."""
  lines = ["| the wrong model is trained by | for example | noticed by |", "|---|---|---|"]
  for way, mutants in WAYS.items():
    for number, each in enumerate(mutants):
      file, _, test = each.test.partition("::")
      test = test.partition("[")[0].removeprefix("test_").replace("_", " ")
      name = file.removeprefix("tests/") + (f": {test}" if test else "")
      lines.append(f"| {'' if number else f'**{way}**'} | {each.what} (`{each.name}`) | {name} |")
  return "\n".join(lines)
