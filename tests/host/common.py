# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Constants of the tests of the patch points, and small installed packages."""

import pathlib
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOOK = "import maxtext_pp_ext; maxtext_pp_ext.at_startup()"  # what maxtext_pp_ext.pth says

# MaxText's own plain pipeline under another name: it says that it was built, and trains.
FAKE_PIPELINE = """
from maxtext.layers import pipeline


class FakePipeline(pipeline.NNXPipeline):

  def __init__(self, config, stage_factory, mesh, remat_policy=None, *, rngs):
    print("FakePipeline was built", flush=True)
    super().__init__(config, stage_factory, mesh, remat_policy, rngs=rngs)
"""

# A model that trains a step within seconds.
TINY = (
    "run_name=tiny",
    "base_emb_dim=16",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "base_mlp_dim=32",
    "head_dim=8",
    "base_num_decoder_layers=4",
    "max_target_length=16",
    "vocab_size=64",
    "per_device_batch_size=2",
    "dataset_type=synthetic",
    "enable_checkpointing=False",
    "enable_goodput_recording=False",
    "attention=dot_product",
    "dtype=float32",
    "sparse_matmul=False",
    "skip_jax_distributed_system=True",
    "enable_tensorboard=False",
    "log_config=False",
)


def write_package(folder, name, source="", entry_points=None, version="1.2"):
  """Installs a one-module package with entry points ({group: {name: value}}), as `pip install --target` would."""
  if source:
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
  info = folder / f"{name}-{version}.dist-info"
  info.mkdir()
  (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
  lines = []
  for group, points in (entry_points or {}).items():
    lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
  (info / "entry_points.txt").write_text("\n".join(lines))
