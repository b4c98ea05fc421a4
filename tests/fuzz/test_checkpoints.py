# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints, through `maxtext-pp convert`: refused, with nothing written, or converted with right values."""

import json
import os
import random
import shutil

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.fuzz.common import ACCEPTED, contents, REFUSED, run
from tests.host.common import TINY
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import
from tests.host.replacements.test_checkpoint_load import train_state
from tests.marks import slow_but

WANTED = ("pipeline_impl=circular_bsw", "ici_pipeline_parallelism=2")
UNNOTICED, ONE_BIT = "not noticed", "one bit"
FORMATS = {"ocdbt": {}, "zarr 2 in files": {"use_ocdbt": False, "use_zarr3": False}}


def save(folder, tree, **options):
  (folder / "items").mkdir(parents=True)
  handler = ocp.PyTreeCheckpointHandler(**options)
  handler.save(epath.Path(folder / "items"), args=ocp.args.PyTreeSave(item=tree))
  handler.finalize(epath.Path(folder / "items"))
  (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": {"scan_layers": True}}))


def weights(change=lambda path, array: array):
  """The train state of a small model with random values; `change` may replace an array, or leave it out with None."""
  source = np.random.default_rng(0)

  def arrays(tree, path=()):
    if isinstance(tree, list):
      return [arrays(each, (*path, str(i))) for i, each in enumerate(tree)]
    if isinstance(tree, dict):
      found = {key: arrays(each, (*path, key)) for key, each in tree.items()}
      return {key: each for key, each in found.items() if each is not None}
    if tree is None:
      return None
    return change(path, source.standard_normal(tree.shape).astype(np.float32) if tree.shape else np.int32(3))

  # Random state is left out, as MaxText draws it anew.
  return arrays({key: tree for key, tree in train_state().items() if key != "nnx_aux"})


@pytest.fixture(name="sound", scope="module", params=FORMATS.values(), ids=FORMATS.keys())
def _sound(request, tmp_path_factory):
  """A sound checkpoint and the result of its conversion."""
  import maxtext_pp_ext
  from maxtext_pp_ext import cli

  maxtext_pp_ext.install()
  folder = tmp_path_factory.mktemp("sound")
  save(folder / "old", weights(), **request.param)
  assert cli.main(["convert", str(folder / "old"), str(folder / "new"), *TINY, *WANTED]) == 0
  return folder / "old", loaded(folder / "new")


def loaded(root):
  return ocp.PyTreeCheckpointHandler().restore(epath.Path(root / "items"))


def same(a, b):
  if jax.tree.structure(a) != jax.tree.structure(b):
    return False
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(name="convert")
def _convert(installed, capfd, tmp_path, tried):  # noqa: F811  pylint: disable=redefined-outer-name
  def convert(expected=None, *, checked=True):
    """Converts tmp_path/old: refused or failed with nothing written, or, if that is expected, to these values.

    `checked`: whether wrong values without an error are a failure.
    """
    before = contents(tmp_path / "old")
    argv = ["convert", str(tmp_path / "old"), str(tmp_path / "new"), *TINY, *WANTED]
    outcome, said = run(capfd, tmp_path, argv)
    assert contents(tmp_path / "old") == before
    if outcome == ACCEPTED:
      assert expected is not None, said
      is_same = same(loaded(tmp_path / "new"), expected)
      assert is_same or not checked, "converted to other values than the sound checkpoint's"
      outcome = outcome if is_same else UNNOTICED
      shutil.rmtree(tmp_path / "new")
    else:
      assert [path.name for path in tmp_path.iterdir()] == ["old"]
      assert len([line for line in said.splitlines() if line.startswith("maxtext-pp: ")]) == 1
    tried(outcome)
    return outcome, said

  return convert


def files(root):
  """The files of a checkpoint, sorted by size: Orbax names some of them at random."""
  found = [path for path in root.rglob("*") if path.is_file()]
  return sorted(found, key=lambda path: (path.parent, path.stat().st_size, path.name))


def damages(path, seed):
  """Each kind of damage to a file: (name, new content or None for no file)."""
  content = path.read_bytes()
  yield "gone", None
  yield "empty", b""
  yield "cut off", content[: len(content) // 2]
  yield "zeros", b"\0" * len(content)
  source = random.Random(seed)
  yield "noise", source.randbytes(len(content))
  at = source.randrange(max(len(content), 1))
  yield ONE_BIT, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] if content else b"x"


def check_damages(sound, convert, folder, chosen):
  root, expected = sound
  for path, kind, content in chosen:
    shutil.copytree(root, folder / "old")
    damaged = folder / "old" / path.relative_to(root)
    if content is None:
      damaged.unlink()
    else:
      damaged.write_bytes(content)
    # What Orbax compresses has no checksum, so that a bit of it may be another without anybody noticing.
    convert(expected, checked=kind != ONE_BIT)
    shutil.rmtree(folder / "old")


def all_damages(root):
  """Of the files in which each array is by itself, those of a few arrays."""
  chosen = files(root)
  if len(chosen) > 12:
    plain = [path for path in chosen if path.parent in (root, root / "items")]
    chosen = plain + random.Random(0).sample([path for path in chosen if path not in plain], 8)
  return [(path, *each) for i, path in enumerate(chosen) for each in damages(path, i)]


def test_damage_to_a_file_is_noticed_or_harmless(sound, convert, tmp_path):
  """Damage to files that nobody reads is harmless. Wrong values without an error are a failure."""
  check_damages(sound, convert, tmp_path, random.Random(0).sample(all_damages(sound[0]), 3))


@pytest.mark.slow
def test_every_damage_to_every_file_is_noticed_or_harmless(sound, convert, tmp_path):
  check_damages(sound, convert, tmp_path, all_damages(sound[0]))


METADATA = {
    "no object": "[]",
    "a number": "3",
    "nothing in it": "{}",
    "no tree": '{"tree_metadata": null}',
    "a tree of nothing": '{"tree_metadata": {}}',
    "a tree of numbers": '{"tree_metadata": {"a": 1}}',
    "a leaf without a path": '{"tree_metadata": {"a": {"key_metadata": [], "value_metadata": {"value_type": "scalar"}}}}',
    "a leaf of no type": '{"tree_metadata": {"a": {"key_metadata": [{"key": "a"}], "value_metadata": {}}}}',
    "deep": "[" * 100000,
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize(
    "text", slow_but(["no tree", "a tree of numbers", "a leaf without a path", "not UTF-8"], METADATA)
)
def test_metadata_of_any_kind_is_refused(sound, convert, tmp_path, text):
  shutil.copytree(sound[0], tmp_path / "old")
  (tmp_path / "old" / "items" / "_METADATA").write_bytes(text if isinstance(text, bytes) else text.encode())
  assert convert()[0] == REFUSED


NOTES = ("[]", "3", "{", '{"custom_metadata": 3}', '{"custom_metadata": {"scan_layers": "x"}}')


@pytest.mark.parametrize("text", slow_but(["{", NOTES[-1]], NOTES))
def test_a_damaged_note_of_maxtexts_config_is_refused(sound, convert, tmp_path, text):
  shutil.copytree(sound[0], tmp_path / "old")
  (tmp_path / "old" / "_CHECKPOINT_METADATA").write_text(text)
  assert convert()[0] == REFUSED


LAYERS = ("params", "params", "decoder", "layers")
KERNEL = (*LAYERS, "mlp", "wo", "kernel")
NU = ("opt_state", "0", "nu", *KERNEL[1:])
ARRAYS = {
    "a layer less": (lambda path, x: x[:, :-1] if path == KERNEL else x, "has the shape"),
    "a wider array": (lambda path, x: np.concatenate([x, x]) if path == KERNEL else x, "has the shape"),
    "transposed": (lambda path, x: x.T if path == KERNEL else x, "has the shape"),
    "a scalar": (lambda path, x: np.float32(0) if path == KERNEL else x, "has the shape"),
    "integers": (lambda path, x: x.astype(np.int32) if path == KERNEL else x, "is int32 in the checkpoint"),
    "booleans": (lambda path, x: x > 0 if path == KERNEL else x, "is bool in the checkpoint"),
    "text": (lambda path, x: "text" if path == KERNEL else x, "is not an array"),
    "all layers less": (lambda path, x: x[:, :-1] if path[:4] == LAYERS else x, "not of this model in any layout"),
    "another array": (lambda path, x: {"more": x} if path == KERNEL else x, "is not in the model"),
    "no layers": (lambda path, x: None if path[:4] == LAYERS else x, f"it lacks {'/'.join(LAYERS)}"),
    "a weight less": (lambda path, x: None if path == KERNEL else x, f"it lacks {'/'.join(KERNEL)} [32, 4, 16]"),
    "a moment less": (lambda path, x: None if path == NU else x, f"it lacks {'/'.join(NU)} [32, 4, 16]"),
    "no second moments": (lambda path, x: None if path[:3] == NU[:3] else x, "it lacks opt_state/0/nu/"),
    "no counter": (lambda path, x: None if path == (*NU[:2], "count") else x, "it lacks opt_state/0/count"),
    "a moment more": (
        lambda path, x: {"x": x, "y": x} if path == (*NU[:2], "count") else x,
        "it has opt_state/0/count/x",
    ),
}


@pytest.mark.parametrize("change, words", slow_but(["a layer less", "integers", "a moment less"], ARRAYS, spread=True))
def test_arrays_of_wrong_shapes_and_dtypes_are_refused_by_name(convert, tmp_path, change, words):
  save(tmp_path / "old", weights(change))
  outcome, said = convert()
  assert outcome == REFUSED and words in said


def test_folders_that_are_no_checkpoints_are_refused(convert, tmp_path, capfd):
  (tmp_path / "old").mkdir()
  assert convert()[0] == REFUSED
  (tmp_path / "old" / "items").write_text("a file where a folder should be")
  assert convert()[0] == REFUSED
  (tmp_path / "old" / "items").unlink()
  os.symlink("items", tmp_path / "old" / "items")
  assert convert()[0] == REFUSED
  (tmp_path / "old" / "items").unlink()
  (tmp_path / "old" / "items" / "_METADATA").mkdir(parents=True)
  assert convert()[0] == REFUSED
