# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversions of checkpoints on disk: what Orbax reads afterwards, and what a failed conversion leaves."""

import json
import os
import shlex
import subprocess
import sys

from etils import epath
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_pp_ext.checkpoint import convert, files, places
from maxtext_pp_ext.checkpoint.moves import converted
from tests.checkpoint import models

LAYERS = 6
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32)
PREFIXES = {("params", "params"): jnp.float32, ("opt_state", "0", "mu", "params"): jnp.bfloat16}


def nested(arrays):
  tree = {}
  for path, array in arrays.items():
    node = tree
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = array
  return tree


def train_state(of, dtypes=PREFIXES, random=None):
  """A train state as MaxText saves it, and its arrays by path, filled with random bits."""
  random = random or np.random.default_rng(0)
  arrays = {}
  for prefix, dtype in dtypes.items():
    for path, array in models.values(of).items():
      if path[-1] != "key":
        arrays[(*prefix, *path)] = (array + random.standard_normal(array.shape)).astype(dtype)
  tree = nested(arrays)
  # As optax has it: a chain with empty states in it.
  tree["opt_state"] = [tree["opt_state"]["0"] | {"count": np.int32(7)}, None] if "opt_state" in tree else [None]
  tree["step"] = np.int32(7)
  return tree, arrays


def save(root, tree, *, shard=True, **options):
  """Saves with Orbax; arrays are in pieces, as several devices write them."""
  mesh = Mesh(np.array(jax.devices()[:4]), "x")

  def put(array):
    axis = next((i for i, size in enumerate(np.shape(array)) if size % 2 == 0), None)
    spec = P(*[None] * axis, "x") if shard and axis is not None and np.shape(array)[axis] % 4 == 0 else P()
    return jax.device_put(array, NamedSharding(mesh, spec))

  root.mkdir(parents=True)
  handler = ocp.PyTreeCheckpointHandler(**({"use_ocdbt": True, "use_zarr3": True} | options))
  (root / "items").mkdir()
  handler.save(epath.Path(root / "items"), args=ocp.args.PyTreeSave(item=jax.tree.map(put, tree)))
  handler.finalize(epath.Path(root / "items"))
  (root / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": {"scan_layers": True}}))
  (root / "iter").mkdir()
  (root / "iter" / "process_0").write_text("what a data iterator noted")


def load(root):
  return ocp.PyTreeCheckpointHandler().restore(epath.Path(root / "items"))


def by_path(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {tuple(str(getattr(k, "key", getattr(k, "idx", None))) for k in path): leaf for path, leaf in leaves}


def same_bits(a, b):
  a, b = np.asarray(a), np.asarray(b)
  return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def run(source, destination, old, new, **options):
  return convert.convert(files.open_checkpoint(source), destination, old, new, **({"scan_layers": False} | options))


TARGETS = {
    "pipeline": models.pipeline(3, 2),
    "stages of scanned layers": models.pipeline(1, 3, 2, scanned=True),
    "layers outside": models.pipeline(2, 2, outside=2),
    "single layers": models.single(LAYERS),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_orbax_reads_every_layer_bit_by_bit_and_a_round_trip_gives_the_old_checkpoint(tmp_path, target):
  source = models.stacked(LAYERS)
  tree, arrays = train_state(source)
  save(tmp_path / "old", tree)
  report = run(tmp_path / "old", tmp_path / "new", source, target)
  found = by_path(load(tmp_path / "new"))
  for prefix in PREFIXES:
    own = {path[len(prefix) :]: array for path, array in arrays.items() if path[: len(prefix)] == prefix}
    expected = converted(own, source, target)
    assert expected and all(same_bits(found[(*prefix, *path)], array) for path, array in expected.items())
  assert len(report.layers) == LAYERS and len(set(report.layers)) == LAYERS
  back = run(tmp_path / "new", tmp_path / "back", target, source, scan_layers=True)
  old, again = by_path(load(tmp_path / "old")), by_path(load(tmp_path / "back"))
  assert old.keys() == again.keys() and all(same_bits(again[path], old[path]) for path in old)
  assert jax.tree.structure(load(tmp_path / "back")) == jax.tree.structure(load(tmp_path / "old"))
  assert back.nbytes == report.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("use_ocdbt, use_zarr3", [(True, True), (True, False), (False, False)])
def test_dtypes_and_orbaxs_formats_stay(tmp_path, dtype, use_ocdbt, use_zarr3):
  source, target = models.stacked(LAYERS), models.pipeline(3, 2)
  tree, arrays = train_state(source, {("params", "params"): dtype})
  save(tmp_path / "old", tree, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
  run(tmp_path / "old", tmp_path / "new", source, target)
  expected = converted({path[2:]: array for path, array in arrays.items()}, source, target)
  found = by_path(load(tmp_path / "new"))
  assert all(same_bits(found["params", "params", *path], array) for path, array in expected.items())
  stored = json.loads((tmp_path / "new" / "items" / "_METADATA").read_text())
  assert (stored["use_ocdbt"], stored["use_zarr3"]) == (use_ocdbt, use_zarr3)


def test_what_is_beside_the_train_state_passes_and_scan_layers_is_noted(tmp_path):
  source = models.stacked(LAYERS)
  save(tmp_path / "old", train_state(source)[0])
  run(tmp_path / "old", tmp_path / "new", source, models.single(LAYERS))
  assert (tmp_path / "new" / "iter" / "process_0").read_text() == "what a data iterator noted"
  assert files.open_checkpoint(tmp_path / "new").scan_layers is False
  assert files.open_checkpoint(tmp_path / "old").scan_layers is True


@pytest.fixture
def old(tmp_path):
  source = models.stacked(LAYERS)
  save(tmp_path / "old", train_state(source)[0])
  return tmp_path / "old"


def contents(folder):
  return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("there", ["new", f"new{places.SUFFIX}"])
def test_nothing_is_overwritten(old, there):
  (old.parent / there).mkdir()
  (old.parent / there / "file").write_text("mine")
  with pytest.raises(FileExistsError, match="exists; nothing is overwritten"):
    run(old, old.parent / "new", models.stacked(LAYERS), models.pipeline(3, 2))
  assert contents(old.parent / there) == {old.parent / there / "file": b"mine"}


@pytest.mark.parametrize("phase", ["writing", "verifying"])
def test_a_conversion_that_fails_leaves_nothing_and_the_old_checkpoint_as_it_was(old, phase):
  before = contents(old)

  def stop(now, done, total):
    if now == phase and 0 < done < total:
      raise OSError("disk full")

  with pytest.raises(OSError, match="disk full"):
    run(old, old.parent / "new", models.stacked(LAYERS), models.pipeline(3, 2), on_bytes=stop)
  assert [path.name for path in old.parent.iterdir()] == ["old"] and contents(old) == before


def test_what_a_killed_conversion_leaves_is_no_checkpoint(old):
  """The conversion is killed after everything is written and before anything is verified."""
  code = f"""
import os, pathlib
from tests.checkpoint import models, test_convert
stop = lambda phase, done, total: os._exit(9) if phase == "verifying" and done == total else None
root = pathlib.Path({str(old.parent)!r})
test_convert.run(root / "old", root / "2", models.stacked({LAYERS}), models.pipeline(3, 2), on_bytes=stop)
"""
  done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, timeout=300, check=False)
  assert done.returncode == 9, done.stderr.decode()
  assert {path.name for path in old.parent.iterdir()} == {"old", f"2{places.SUFFIX}"}
  assert places.steps(old.parent) == []
  manager = ocp.CheckpointManager(epath.Path(old.parent), item_names=("items",))
  assert manager.latest_step() is None
  left = old.parent / f"2{places.SUFFIX}"
  before = contents(left)
  with pytest.raises(FileExistsError, match="is an unfinished conversion.* It may be removed") as error:
    places.source_and_destination(str(old), str(old.parent / "2"), None)
  assert contents(left) == before
  with pytest.raises(ValueError, match="is an unfinished conversion, and no checkpoint"):
    places.source_and_destination(str(left), str(old.parent / "new"), None)
  remove = shlex.split(str(error.value).splitlines()[-1])
  subprocess.run(remove, check=True)
  run(old, old.parent / "2", models.stacked(LAYERS), models.pipeline(3, 2))
  assert not left.exists() and not (old.parent / "2" / places.MARKER).exists()


@pytest.mark.parametrize("error", [OSError("no locks"), PermissionError("of another user")])
def test_where_locks_do_not_tell_it_is_left_to_the_person_whether_a_conversion_runs(old, monkeypatch, error):
  folder = places.folder_of(old.parent / "new")
  folder.mkdir()

  def flock(*_):
    raise error

  monkeypatch.setattr(places.fcntl, "flock", flock)
  with pytest.raises(KeyboardInterrupt), places.marked(folder):
    raise KeyboardInterrupt
  with pytest.raises(FileExistsError, match="If none runs any more that writes it, it may be removed"):
    places.check_absent(old.parent / "new")


def test_a_conversion_that_still_runs_is_not_called_unfinished(old):
  said = []

  def ask(phase, done, total):
    if phase == "writing" and done == total:
      with pytest.raises(FileExistsError) as error:
        run(old, old.parent / "new", models.stacked(LAYERS), models.pipeline(3, 2))
      said.append(str(error.value))

  run(old, old.parent / "new", models.stacked(LAYERS), models.pipeline(3, 2), on_bytes=ask)
  assert said and "is being written by another conversion" in said[0] and "removed" not in said[0]


def test_values_that_are_read_back_otherwise_are_found_and_nothing_is_left(old, monkeypatch):
  original = files.create

  def create_and_damage(root, like, arrays, *, scan_layers, fill):
    def fill_and_damage(stores):
      fill(stores)
      path = next(path for path in stores if path[0] == "params" and path[-2:] == ("mlp", "kernel"))
      stores[path][1, 2, 0, 0] = stores[path][1, 2, 0, 0].read().result() + 1

    original(root, like, arrays, scan_layers=scan_layers, fill=fill_and_damage)

  monkeypatch.setattr(files, "create", create_and_damage)
  with pytest.raises(convert.VerificationError, match="mlp/kernel of layer 5"):
    run(old, old.parent / "new", models.stacked(LAYERS), models.pipeline(3, 2))
  assert [path.name for path in old.parent.iterdir()] == ["old"]


def test_checksums_are_of_layers_and_not_of_where_they_are(old):
  one = run(old, old.parent / "one", models.stacked(LAYERS), models.pipeline(3, 2))
  two = run(old, old.parent / "two", models.stacked(LAYERS), models.single(LAYERS))
  assert one.layers == two.layers and one.rest == two.rest


def test_a_layout_is_known_again(old):
  opened = files.open_checkpoint(old)
  assert convert.is_same(opened, models.stacked(LAYERS), models.stacked(LAYERS))
  assert not convert.is_same(opened, models.stacked(LAYERS), models.pipeline(3, 2))


MEMORY = """
import pathlib, re, sys
import numpy as np
from maxtext_pp_ext.checkpoint import convert, files
from maxtext_pp_ext.checkpoint.layout import LayerAxis, Layout, Leaf
from tests.checkpoint import test_convert

root, many = pathlib.Path(sys.argv[1]), int(sys.argv[2])
names = [("decoder", "layers", f"w{i}") for i in range(many)]
stacked = [Leaf(path=p, shape=(1024, 16, 1024), name=p[-1:], axes=(LayerAxis(axis=1, stride=1),)) for p in names]
pipeline = [
    Leaf(
        path=("decoder", "pipeline_module", "layers", p[-1]),
        shape=(4, 4, 1024, 1024),
        name=p[-1:],
        axes=(LayerAxis(axis=0, stride=4), LayerAxis(axis=1, stride=1)),
    )
    for p in names
]
old = Layout(leaves=tuple(stacked), description="stacked")
new = Layout(leaves=tuple(pipeline), description="pipeline")
convert.hold_no_freed_memory()
opened = files.open_checkpoint(root / "old")
status = lambda key: 1024 * int(re.search(key + r":\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the largest size begins anew
before = status("VmRSS")
convert.convert(opened, root / "new", old, new, scan_layers=True)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
  """Converts up to 8 parameters of 64 MiB each, written whole, as one device writes them."""
  parameter, random = 2**26, np.random.default_rng(0)
  peaks = {}
  for many in (2, 8):
    root = tmp_path / str(many)
    layers = {f"w{i}": random.standard_normal((1024, 16, 1024), np.float32) for i in range(many)}
    save(root / "old", {"params": {"params": {"decoder": {"layers": layers}}}}, shard=False)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(root), str(many)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    peaks[many] = int(done.stdout.split()[-1])
  print({many: f"{peak / parameter:.2f} parameters" for many, peak in peaks.items()})
  assert parameter < peaks[8] < 2 * parameter


@pytest.mark.parametrize("given", ["output", "output/run"])
def test_where_checkpoints_are_is_said_if_a_folder_above_them_is_given(tmp_path, given):
  checkpoints = tmp_path / "output" / "run" / "checkpoints"
  (checkpoints / "9" / places.ITEMS).mkdir(parents=True)
  (checkpoints / "9" / places.ITEMS / places.TREE).touch()
  with pytest.raises(FileNotFoundError, match=f"but there are some in {checkpoints}"):
    places.source_and_destination(str(tmp_path / given), str(tmp_path / "new"), None)
  old, new = places.source_and_destination(str(checkpoints), str(tmp_path / "new"), None)
  assert (old, new) == (checkpoints / "9", tmp_path / "new" / "9")


def test_a_tilde_of_an_unknown_user_is_a_folders_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(FileNotFoundError, match="no-such-user"):
    places.source_and_destination("~no-such-user", "new", None)
