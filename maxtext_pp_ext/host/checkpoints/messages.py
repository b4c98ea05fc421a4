# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages about checkpoints that do not fit a run: what differs, and how to go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import os
import re
import shlex
import sys

from maxtext_pp_ext.checkpoint import complete, guess
from maxtext_pp_ext.checkpoint.layout import Path, Shape
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.host.checkpoints.stored import Stored
from maxtext_pp_ext.host.models import layouts


def about_layouts(stored: Stored, folder: str, own_step: int | None, config: DerivedKeys) -> str:
  """The message about a checkpoint of another layout than the model; `own_step`: its step if it is the run's own."""
  layouts_of_both = (
      f"The checkpoint {folder} has another layout than this run's model:\n"
      f"  checkpoint: {_describe(stored.shapes, config)}\n"
      f"  this run:   {layouts.describe(config)}\n"
  )
  if stored.why_not_converted:
    return layouts_of_both + stored.why_not_converted
  return (
      f"{layouts_of_both}Convert it, which changes no value and keeps the optimizer's state:\n"
      f"  {_command(folder, own_step, config)}"
  )


def about_arrays(stored: Mapping[Path, Shape], wanted: Mapping[Path, Shape], folder: str) -> str:
  """The message about a checkpoint of another size than the model: it names the arrays that differ."""
  differ = [path for path in sorted({*stored, *wanted}) if stored.get(path) != wanted.get(path)]
  lines = []
  for path in differ[:5]:
    of_both = [list(shapes[path]) if path in shapes else "none" for shapes in (stored, wanted)]
    lines.append(f"  {'/'.join(path)}: checkpoint {of_both[0]}, model {of_both[1]}")
  more = [f"  and {len(differ) - 5} more"] if len(differ) > 5 else []
  heading = f"The checkpoint {folder} is not of this run's model: arrays of the decoder differ."
  danger = "MaxText would repeat their values or leave them out. Set the keys of the checkpoint's model."
  return "\n".join([heading, *lines, *more, danger])


def about_weights(problems: Iterable[str], folder: str) -> str:
  """The message about a checkpoint that lacks weights."""
  heading = f"The checkpoint {folder} lacks weights of this run's model:"
  way_out = "Load a checkpoint that has them, or set the keys of the model that this checkpoint is of."
  return "\n".join([heading, *complete.listed(problems), way_out])


def about_optimizer(problems: Iterable[str], folder: str) -> str:
  """The message about a checkpoint that lacks a part of the optimizer's state."""
  heading = f"The checkpoint {folder} lacks a part of the optimizer's state, which would begin anew:"
  way_out = (
      "Load another checkpoint. Or load only the weights of this one, in a run of another name, with "
      f"load_parameters_path={folder}/items; then all of the optimizer's state begins anew."
  )
  return "\n".join([heading, *complete.listed(problems), way_out])


def _describe(shapes: Mapping[Path, Shape], config: DerivedKeys) -> str:
  """A checkpoint's layout in words."""
  try:
    of_layer = layouts.of_config(config).of_layer
  except ValueError:  # models whose layers are not known
    of_layer = {}
  layers = layouts.layers_of_pipelined_kind(config)
  for values in guess.candidates(shapes, layers=layers, scan_layers=None, of_layer=of_layer):
    has_pipeline = values[layouts.STAGES] > 1
    values = {"num_pipeline_repeats": 1, layouts.DCN_STAGES: 1, "param_scan_axis": "unknown"} | values
    values["using_pipeline_parallelism"] = has_pipeline
    return layouts.describe(with_values(config, values))
  return f"{len(shapes)} arrays in decoder"


def _command(folder: str, own_step: int | None, config: DerivedKeys) -> str:
  arguments = _arguments_of_this_run(sys.argv[1:])
  if own_step is None:
    destination, then = f"{folder}-converted", f"give {folder}-converted instead of it"
  else:
    run = f"{config.run_name}-converted"
    destination = os.path.join(config.base_output_directory, run, "checkpoints", str(own_step))
    then = f"go on with run_name={run}"
  return f"maxtext-pp convert {shlex.quote(folder)} {shlex.quote(destination)} {arguments}\nThen {then}."


def _arguments_of_this_run(argv: Sequence[str]) -> str:
  are_maxtexts = bool(argv) and all(re.match(r"\w+=", text) or text.endswith((".yml", ".yaml")) for text in argv)
  return shlex.join(argv) if are_maxtexts else "CONFIG key=value ... (the arguments of this run)"
