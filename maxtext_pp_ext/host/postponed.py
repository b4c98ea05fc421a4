# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports MaxText to ask it about a config, without what no such question needs: half of the seconds of all imports.

Seconds are of one core (`python -X importtime`). What a module takes out of another one while it is imported cannot wait.
"""

# Of MaxText 0.2.5.
MODULES: dict[str, tuple[str, ...]] = {
    # isprime, for the embeddings of n-grams: 2.0 s
    "sympy": (),
    # its kernels, of which some are imported from its submodules: 1.0 s
    "tokamax": (),
    # profiles of kernels, which tokamax's autotuning takes: 0.9 s
    "jax.experimental.mosaic.gpu": (),
    "jax.experimental.mosaic.gpu.profiler": (),
    "xprof.cli.tools.get_kernel_stats_tool": (),
    # configs of Hugging Face's models, for loading and converting their checkpoints: 0.7 s
    "maxtext.checkpoint_conversion.utils.hf_model_configs": ("HF_MODEL_CONFIGS",),
    # tokenizers: 0.9 s
    "transformers": (),
    # elastic training, and with it fastapi: 0.7 s
    "pathwaysutils": (),
    "pathwaysutils.elastic.elastic": (),
}
# What MaxText takes out of a module that waits to trace a layer, and where that module has it from.
HOMES = {"tokamax.RaggedDotGroupSizes": "tokamax._src.ops.ragged_dot.base.GroupSizes"}


def import_maxtext() -> None:
  """Imports what reading a config and building a model need."""
  # pylint: disable=import-outside-toplevel,unused-import
  import maxtext.configs.pyconfig
  import maxtext.utils.model_creation_utils  # noqa: F401
