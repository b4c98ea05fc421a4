# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps trees of variables to trees of shardings."""

import subprocess
import sys

from flax import nnx
from flax.core.spmd import logical_axis_rules
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import pytest

from maxtext_pp_ext.sharding import layouts, logical_axes, named_shardings, unwrap
from tests.sharding.common import mesh_of, param

MESH = mesh_of(stage=2, fsdp=4, tensor=2)
RULES = [("layers", "stage"), ("circular_repeats", ()), ("embed", "fsdp"), ("mlp", "tensor"), ("norm", None)]


def spec(variable, rules=RULES, mesh=MESH):
  return named_shardings(variable, mesh, rules).get_value().spec


def test_variables_keep_their_wrappers_and_unwrap_takes_them_off():
  state = nnx.State({"kernel": param((8, 4), ("embed", "mlp"), tag=1), "count": nnx.RngCount(jnp.zeros((), jnp.uint32))})
  found = named_shardings(state, MESH, RULES)
  assert isinstance(found["kernel"], nnx.Param) and found["kernel"].get_metadata()["tag"] == 1
  assert isinstance(found["count"], nnx.RngCount)
  clean = unwrap(found)
  assert clean["kernel"] == NamedSharding(MESH, P("fsdp", "tensor")) and clean["count"] == NamedSharding(MESH, P())


@pytest.mark.parametrize("key", ["out_sharding", "sharding_names", "sharding"])
def test_an_annotation_may_have_any_of_the_names_that_flax_gave_it(key):
  assert spec(param((8, 4), **{key: ("embed", "mlp")})) == P("fsdp", "tensor")


def test_the_newest_annotation_that_says_something_wins():
  assert spec(param((8, 4), (), sharding_names=("embed", "mlp"), sharding=("mlp", "embed"))) == P("fsdp", "tensor")


def test_a_single_name_is_one_name():
  assert logical_axes(param((8,), "embed")) == ("embed",) and spec(param((8,), "embed")) == P("fsdp")


def test_a_variable_without_annotation_is_replicated():
  assert logical_axes(param((8,))) is None and spec(param((8,))) == P()


@pytest.mark.parametrize(
    "shape, names, axis, expected",
    [
        ((6, 8, 4), ("embed", "mlp"), 0, P("stage", "fsdp", "tensor")),
        ((8, 6, 4), ("embed", "mlp"), 1, P("fsdp", "stage", "tensor")),
        ((8, 4, 6), ("embed", "mlp"), 2, P("fsdp", "tensor", "stage")),
        ((8, 6, 4), ("embed", "layers", "mlp"), 1, P("fsdp", "stage", "tensor")),
        # Named already, and for all dimensions: the annotation is right.
        ((6, 8, 4), ("layers", "embed", "mlp"), 1, P("stage", "fsdp", "tensor")),
        # Fewer names than dimensions: the name belongs where the layers are stacked.
        ((8, 4, 6), ("embed",), 2, P("fsdp", None, "stage")),
        ((8, 6), ("layers",), 1, P(None, "stage")),
    ],
)
def test_the_scan_axis_is_named_where_layers_are_stacked(shape, names, axis, expected):
  variable = param(shape, names, param_scan_axis=axis, **{nnx.PARTITION_NAME: "layers"})
  assert spec(variable) == expected


@pytest.mark.parametrize(
    "shape, names, stacked, axis, expected",
    [
        ((8, 4, 3), ("local_layers", "layers"), "layers", 1, (None, "layers", "local_layers")),
        ((4, 3, 8), ("layers", "local_layers"), "layers", 0, ("layers", "local_layers", None)),
        ((2, 8, 3), ("layers", "local_layers"), "local_layers", 1, ("layers", None, "local_layers")),
        (
            (2, 2, 8, 3),
            ("circular_repeats", "layers", "local_layers"),
            "local_layers",
            1,
            ("circular_repeats", "layers", None, "local_layers"),
        ),
        (
            (2, 8, 2, 3),
            ("layers", "local_layers", "layers_per_stage"),
            "local_layers",
            1,
            ("layers", None, "layers_per_stage", "local_layers"),
        ),
    ],
)
def test_names_of_several_stacks_alone_come_where_the_stacks_are(shape, names, stacked, axis, expected):
  """The stages of a pipeline are at the front, where their mesh axis belongs."""
  variable = param(shape, names, param_scan_axis=axis, **{nnx.PARTITION_NAME: stacked})
  assert logical_axes(variable) == expected


def test_axes_of_a_pipeline_are_names_like_others():
  assert spec(param((3, 2, 8, 4), ("circular_repeats", "layers", "embed", "mlp"))) == P(None, "stage", "fsdp", "tensor")


def test_own_rules_come_before_those_of_the_caller_and_of_the_context():
  variable = param((8, 4), ("embed", "mlp"), sharding_rules=(("embed", "tensor"),))
  assert spec(variable) == P("tensor", None)
  with logical_axis_rules(tuple(RULES)):
    assert spec(variable, rules=None) == P("tensor", None)
    assert spec(param((8, 4), ("embed", "mlp")), rules=None) == P("fsdp", "tensor")


def test_without_any_rules_names_are_mesh_axes():
  assert spec(param((8, 4), ("fsdp", None)), rules=[]) == P("fsdp", None)
  assert spec(param((8, 4), (("stage", "fsdp"), "tensor")), rules=None) == P(("stage", "fsdp"), "tensor")


def test_ready_shardings_and_specs_are_taken_as_they_are():
  ready = NamedSharding(mesh_of(other=2), P("other"))
  assert named_shardings(param((8,), ready), MESH, RULES).get_value() is ready
  assert spec(param((8, 4), P("tensor", "fsdp"))) == P("tensor", "fsdp")


def test_dimensions_that_do_not_divide_lose_their_axes():
  assert spec(param((6, 4), ("embed", "mlp"))) == P(None, "tensor")


def test_a_variable_without_arrays_stays_as_it_is():
  masked = nnx.Variable(optax.MaskedNode())
  state = named_shardings(nnx.State({"masked": masked}), MESH, RULES)
  assert state["masked"] is masked and layouts(state, MESH, RULES) == []


def test_an_array_that_is_no_variable_is_replicated():
  assert named_shardings({"x": jnp.zeros((8,))}, MESH, RULES) == {"x": NamedSharding(MESH, P())}


def test_parts_of_a_composite_value_get_what_of_the_annotation_fits_them():
  value = {"q": jnp.zeros((8, 4), jnp.int8), "scale": jnp.zeros((1, 4)), "shift": jnp.zeros((8,)), "all": jnp.zeros(())}
  variable = nnx.Param(value, out_sharding=("embed", "mlp"), eager_sharding=False)
  found = named_shardings(variable, MESH, RULES, on_conflict="error").get_value()
  assert {k: s.spec for k, s in found.items()} == {
      "q": P("fsdp", "tensor"),
      "scale": P(None, "tensor"),
      "shift": P("fsdp"),
      "all": P(),
  }


def test_quantized_weights_of_aqt_and_qwix_are_composite_values():
  from aqt.jax.v2.aqt_tensor import QTensor  # pylint: disable=import-outside-toplevel
  from qwix._src.core.qarray import QArray  # pylint: disable=import-outside-toplevel

  whole, scale = jnp.zeros((8, 4), jnp.int8), jnp.zeros((1, 4))
  aqt = QTensor(qvalue=whole, scale=[scale], scale_t=None, bias=[], dequant_dtype=jnp.float32)
  qwix = QArray(qvalue=whole, scale=scale)
  for value in (aqt, qwix):
    variable = nnx.Param(value, out_sharding=("embed", "mlp"), eager_sharding=False)
    found = named_shardings(variable, MESH, RULES)
    assert type(found.get_value()) is type(value)
    assert found.get_value().qvalue.spec == P("fsdp", "tensor")
    assert jax.tree.leaves(found.get_value().scale)[0].spec == P(None, "tensor")
    assert jax.tree.structure(unwrap(found)) == jax.tree.structure(value)


def test_a_model_and_its_optimizer_are_sharded_alike():
  def init():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("embed", "mlp")})
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

  with nnx.use_eager_sharding(False):
    state = nnx.state(nnx.eval_shape(init))
  found = {layout.path: layout.sharding.spec for layout in layouts(state, MESH, RULES)}
  assert found["0/kernel"] == found["1/opt_state/0/mu/kernel"] == found["1/opt_state/0/nu/kernel"] == P("fsdp", "tensor")
  assert found["0/bias"] == found["1/opt_state/0/count"] == P()


def test_the_package_imports_neither_maxtext_nor_the_rest_of_this_package():
  code = (
      "import sys, maxtext_pp_ext.sharding; print(sorted(m for m in sys.modules if m.split('.')[0] == 'maxtext'"
      " or m.startswith('maxtext_pp_ext.') and not m.startswith('maxtext_pp_ext.sharding')))"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
  # With this package installed, Python itself starts with the hook. These three import nothing of the package.
  own = {f"maxtext_pp_ext.{name}" for name in ("errors", "nearest", "units")}
  allowed = {"maxtext_pp_ext.host", "maxtext_pp_ext.host.startup", *own}
  assert set(eval(done.stdout)) <= allowed  # pylint: disable=eval-used
