# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Targets of our wheel's entry points, for a MaxText that has the patch points itself (`patches/`)."""

from maxtext_pp_ext.host.replacements import (
    checkpoint_load,
    config_class,
    decoder_call,
    factory,
    sharding_conflicts,
    stage_modules,
)

extend_config_class = config_class.extend_config_class
pipeline_class = factory.pipeline_class
check_decoder_call = decoder_call.check
decoder_layers = stage_modules.layer_classes
build_pipeline_stage = stage_modules.build
check_abstract_model = sharding_conflicts.judge
check_checkpoint_load = checkpoint_load.refuse_other_layouts
check_pretrained_load = checkpoint_load.refuse_other_layouts_of_pretrained
