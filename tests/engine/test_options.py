# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Under every option that MaxText has for pipelines, training equals that with MaxText's plain pipeline.

Losses and gradient norms of three steps, from the same initial weights, in float32. They are sums of a few thousand
terms, added in another order: relative differences of √1000·2⁻²⁴ ≈ 2e-6 in the first step, which three steps of Adam
with a learning rate of 0.01 may multiply a few times. The bound is 2e-5; the steps themselves change the loss by more
than 1e-2. Adam's epsilon is 1e-4: with its default of 1e-8, a gradient that is as small as rounding takes a step of full
size up or down. With one seed and layers of a stage that are not stacked, that alone changed the gradient norm of step 2
by 2e-4.
"""

import pytest

from tests.host.common import TINY
from tests.trainer.runs import Run, run_all

STEPS = 3
BOUND = 2e-5
PIPELINE = (
    *(key for key in TINY if not key.startswith(("run_name", "base_num_decoder_layers"))),
    f"steps={STEPS}",
    "learning_rate=0.01",
    "adam_eps=1e-4",
    "ici_pipeline_parallelism=4",
    "num_pipeline_microbatches=8",
    "base_num_decoder_layers=8",
    "ici_fsdp_parallelism=2",
)
PLAIN, OURS = "pipeline_impl=host", "pipeline_impl=circular_bsw"
# name: keys of both runs.
SAME_KEYS = {
    "layers_outside": ("base_num_decoder_layers=10", "pipeline_parallel_layers=8"),
    "layers_outside_one_repeat": ("base_num_decoder_layers=6", "pipeline_parallel_layers=4"),
    "no_remat_of_iterations": ("set_remat_policy_on_pipeline_iterations=False",),
    "several_layers_per_stage": ("base_num_decoder_layers=16", "num_layers_per_pipeline_stage=2"),
    "scan_over_layers_per_stage": (
        *("base_num_decoder_layers=16", "num_layers_per_pipeline_stage=2"),
        *("scan_layers_per_stage=True", "set_remat_policy_on_layers_per_stage=True"),
    ),
    "gradient_accumulation": ("gradient_accumulation_steps=2",),
    "optimizer_sharded_over_data": (
        *("ici_fsdp_parallelism=1", "ici_data_parallelism=2", "shard_optimizer_over_data=True"),
    ),
    "data_and_fsdp": ("ici_pipeline_parallelism=2", "ici_data_parallelism=2", "num_pipeline_microbatches=4"),
    "delayed_forwarding": ("pipeline_delay_activation_forwarding=True",),
    "tensor_parallelism": ("ici_fsdp_parallelism=1", "ici_tensor_parallelism=2"),
    "context_parallelism": ("ici_fsdp_parallelism=1", "ici_context_parallelism=2"),
    "optimizer_on_the_host": ("optimizer_memory_host_offload=True", "log_step_diagnostics=True"),
    "parameters_on_the_host": ("parameter_memory_host_offload=True", "param_scan_axis=0"),
}
# name: (keys of ours, keys of MaxText's plain pipeline), where plain fails with ours' keys.
OTHER_KEYS = {
    # ShardingTypeError: Use `.at[...].get(out_sharding=)` … for the gather indexing (0.2.5).
    "explicit_sharding": (("shard_mode=explicit",), ()),
    "explicit_sharding_of_tensors": (
        ("shard_mode=explicit", "ici_fsdp_parallelism=1", "ici_tensor_parallelism=2"),
        ("ici_fsdp_parallelism=1", "ici_tensor_parallelism=2"),
    ),
    "explicit_sharding_with_layers_outside": (
        ("shard_mode=explicit", "base_num_decoder_layers=10", "pipeline_parallel_layers=8"),
        ("base_num_decoder_layers=10", "pipeline_parallel_layers=8"),
    ),
    "explicit_sharding_and_gradient_accumulation": (
        ("shard_mode=explicit", "ici_fsdp_parallelism=1", "ici_data_parallelism=2", "gradient_accumulation_steps=2"),
        ("ici_fsdp_parallelism=1", "ici_data_parallelism=2", "gradient_accumulation_steps=2"),
    ),
    # TypeError: zeros_like requires ndarray … got tuple (0.2.5).
    "no_scan_over_layers": (("scan_layers=False",), ()),
    # ValueError: The return value of the policies should be a boolean (0.2.5).
    "offloaded": (("remat_policy=minimal_offloaded",), ("remat_policy=minimal",)),
}
# Keys of two runs of ours. MaxText's plain pipeline adds fp8's scales up over microbatches, its runs would differ.
SAME_RESULT = {
    "fp8": (("quantization=fp8",), ("quantization=fp8", "num_pipeline_microbatches=4")),
}


def _runs() -> dict[str, Run]:
  evaluation = ("eval_interval=1", "eval_steps=1")
  cases = {name: (keys, keys) for name, keys in (SAME_KEYS | {"evaluation": evaluation}).items()} | OTHER_KEYS
  runs = {}
  for name, (ours, plain) in cases.items():
    runs[f"{name}_ours"] = Run(keys=[*_merged(ours), OURS])
    runs[f"{name}_plain"] = Run(keys=[*_merged(plain), PLAIN])
  for name, cases in SAME_RESULT.items():
    runs |= {f"{name}_{k}": Run(keys=[*_merged(keys), OURS]) for k, keys in enumerate(cases)}
  return runs


def _merged(keys) -> list[str]:
  """The common keys, overridden by these: MaxText refuses a key that is given twice."""
  return [f"{k}={v}" for k, v in dict(key.split("=", 1) for key in (*PIPELINE, *keys)).items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  return run_all(tmp_path_factory.mktemp("trained"), _runs(), devices=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SAME_KEYS, *OTHER_KEYS])
def test_training_goes_as_with_the_hosts_plain_pipeline(trained, name):
  _check(trained, f"{name}_ours", f"{name}_plain")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_RESULT)
def test_training_with_delayed_scaling_does_not_depend_on_the_number_of_microbatches(trained, name):
  _check(trained, f"{name}_0", f"{name}_1")


def _check(trained, ours: str, plain: str) -> None:
  for key in ("learning/loss", "learning/raw_grad_norm"):
    actual, expected = _values(trained, ours, key), _values(trained, plain, key)
    assert len(expected) == STEPS and abs(expected[0] - expected[-1]) > 1e-2 * abs(expected[0])
    assert _difference(actual, expected) < BOUND, (key, actual, expected)


@pytest.mark.slow
def test_evaluation_gives_the_loss_of_the_hosts_plain_pipeline(trained):
  ours, plain = (_values(trained, f"evaluation_{side}", "eval/avg_loss") for side in ("ours", "plain"))
  assert plain and _difference(ours, plain) < BOUND


def _values(trained, run: str, metric: str) -> list[float]:
  return [m[metric] for m in trained.metrics(run, metric)]


def _difference(actual: list[float], expected: list[float]) -> float:
  return max(abs(a - b) / b for a, b in zip(actual, expected, strict=True))
