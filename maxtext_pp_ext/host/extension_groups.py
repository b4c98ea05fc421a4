# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The entry-point groups of a MaxText to which `patches/` is applied, in whole or in part."""

import functools
import pathlib
import re

from maxtext_pp_ext.host import startup

# Module -> its groups. Each module is changed by one patch of the series.
GROUPS = {
    "maxtext.configs.types": {"maxtext.config_class"},
    "maxtext.layers.pipeline": {"maxtext.pipeline_class"},
    "maxtext.layers.nnx_decoders": {"maxtext.decoder_call", "maxtext.decoder_layers", "maxtext.pipeline_stage"},
    "maxtext.utils.model_creation_utils": {"maxtext.abstract_model", "maxtext.pretrained_load"},
    "maxtext.common.checkpointing": {"maxtext.checkpoint_load"},
}
_NAMED = re.compile(r'^\w*EXTENSION_GROUP = "(.*)"$', re.MULTILINE)


def problem() -> str:
  """Says which groups MaxText lacks if it has others and nothing else connects us; "" if all is well."""
  import maxtext  # pylint: disable=import-outside-toplevel

  if startup.hooked() or not (lacking := _lacking(*maxtext.__path__)):
    return ""
  return (
      f"This MaxText calls this package's entry points, but not those of {', '.join(lacking)}: a part of the patches of "
      "patches/ is not applied, and the start-up hook is off. Apply all of them. Or switch the hook on, without "
      "MAXTEXT_PP_EXT=off or with maxtext_pp_ext.install(). Or set pipeline_impl=host and sharding_conflicts=fallback."
  )


@functools.cache
def _lacking(*folders: str) -> tuple[str, ...]:
  """The groups that MaxText lacks if it has others, as its files say: its modules may not be loaded."""
  found = set()
  for module in GROUPS:
    for folder in folders:
      file = pathlib.Path(folder).joinpath(*module.split(".")[1:]).with_suffix(".py")
      found |= set(_NAMED.findall(file.read_text("utf-8"))) if file.is_file() else set()
  wanted = set().union(*GROUPS.values())
  return tuple(sorted(wanted - found)) if wanted & found else ()
