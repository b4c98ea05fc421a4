# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings that messages about sizes propose: each remedy alone, and the proposal as a whole, solve all problems."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from maxtext_pp_ext.config import derived, remedies
from maxtext_pp_ext.host.rules import candidates, problems, rows, sizes
from tests.host.rules.test_problems import make, problems_after, RULES, values_to_set

PARALLELISM = st.sampled_from([-1, 1, 1, 1, 2, 3, 4, 8])


@st.composite
def configs(draw):
  """Sizes of every kind, right and wrong; the batch is that of its key."""
  devices, slices = draw(st.sampled_from([(8, 1), (6, 1), (12, 1), (16, 2), (96, 3), (7, 1)]))
  size = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.125, 6.0])
  layers = draw(st.integers(2, 40))
  per_device, evaluated = draw(size), draw(size)
  return make(
      num_target_devices=devices,
      num_slices=slices,
      ici_pipeline_parallelism=draw(st.integers(-1, 9)),
      dcn_pipeline_parallelism=draw(st.sampled_from([1, 1, slices, 2])),
      ici_fsdp_parallelism=draw(PARALLELISM),
      ici_tensor_parallelism=draw(PARALLELISM),
      num_decoder_layers=layers,
      first_num_dense_layers=0,
      pipeline_parallel_layers=draw(st.sampled_from([layers, layers, layers - 1, layers + 1])),
      num_layers_per_pipeline_stage=draw(st.integers(0, 4)),
      num_pipeline_repeats=draw(st.integers(-1, 4)),
      num_pipeline_microbatches=draw(st.integers(-2, 20)),
      pipeline_delay_activation_forwarding=draw(st.booleans()),
      per_device_batch_size=per_device,
      micro_batch_size_to_train_on=int(devices * per_device),
      eval_interval=draw(st.sampled_from([-1, 5])),
      eval_per_device_batch_size=evaluated,
      micro_batch_size_to_eval_on=int(devices * evaluated),
      enable_rampup_batch_size=draw(st.booleans()),
      per_device_batch_size_start=draw(size),
      per_device_batch_size_increment=draw(size),
      gradient_accumulation_steps=draw(st.sampled_from([1, 1, 2])),
      fused_qkv=draw(st.booleans()),
      num_experts=draw(st.sampled_from([1, 4])),
      decoder_block=draw(st.sampled_from(["llama2", "mixtral"])),
  )


def with_dcn(config):
  """Data parallelism over slices takes the remaining devices, as in MaxText's base.yml."""
  config.dcn_data_parallelism = -1
  config.ici_data_parallelism = 1
  return config


@settings(max_examples=400)
@given(config=configs())
def test_what_is_proposed_taken_as_a_whole_leaves_nothing_wrong(config):
  found = problems.problems(with_dcn(config), whole_mesh=True)
  if derived.windowed(config):
    assert not any("pipeline_parallelism" in key for key in (values_to_set(found) if found else ()))
  if found and "No sizes fit these devices" in found[-1]:
    assert derived.windowed(config)
  elif found and "No pipeline of this model fits these devices" in found[-1]:
    within, between = derived.divisors(config.num_target_devices // config.num_slices), derived.divisors(
        config.num_slices
    )
    assert not any(2 <= a * b <= config.num_decoder_layers for a in within for b in between)
  elif found:
    assert problems_after(config, found) == []


WRONG = {
    "ici_pipeline_parallelism": (1, 2, 8),
    "ici_fsdp_parallelism": (1, 3, 4, 8),
    "num_decoder_layers": (4, 6, 7, 9, 10, 24),
    "pipeline_parallel_layers": (2, 6, 7, 12),
    "num_layers_per_pipeline_stage": (0, 3, 4, 2),
    "num_pipeline_repeats": (0, 1, 3, -1),
    "num_pipeline_microbatches": (-4, 0, 1, 6, 7, 12, 16, 20),
    "rows": (0, 1, 3, 4, 8, 12, 20, 33),
    "eval_rows": (1, 4, 8, 12, 20),
    "fused_qkv": (True,),
}


@settings(max_examples=300)
@given(
    data=st.data(),
    wrong=st.lists(st.sampled_from(sorted(WRONG)), min_size=1, max_size=2, unique=True),
    given_repeats=st.sampled_from([2, -1]),
)
def test_every_remedy_that_is_printed_is_enough_alone(data, wrong, given_repeats):
  values = {"num_pipeline_repeats": given_repeats} | {key: data.draw(st.sampled_from(WRONG[key])) for key in wrong}
  for key, of, rows_of in (
      ("rows", "per_device_batch_size", "micro_batch_size_to_train_on"),
      ("eval_rows", "eval_per_device_batch_size", "micro_batch_size_to_eval_on"),
  ):
    if key in values:
      values |= {rows_of: values[key], of: values.pop(key) / 8} | ({"eval_interval": 1} if key == "eval_rows" else {})
  config = make(**values)
  found = problems.problems(config, whole_mesh=True)
  if len(found) == 1 and "together" not in found[0]:
    text = found[0][found[0].rindex("Set ") + 4 :].partition(". ")[0].rstrip(".")
    for remedy in text.split(" or "):
      remedy = remedy.partition(" for ")[0].partition(" to have")[0].partition(" (")[0]
      pairs = dict(pair.split("=") for pair in remedy.split(", "))
      types = {"False": False, "host": "host"}
      settable = {key: types[v] if v in types else float(v) if "." in v else int(v) for key, v in pairs.items()}
      assert problems.problems(remedies.changed(config, settable), whole_mesh=True) == [], remedy


def test_a_model_without_a_pipeline_gets_none():
  config = make(ici_pipeline_parallelism=1, num_pipeline_repeats=-1, ici_fsdp_parallelism=3, num_pipeline_microbatches=3)
  found = problems.problems(config, whole_mesh=True)
  assert len(found) == 2 and "cannot be divided as" in found[1]
  assert found[1].endswith("Set, together: ici_fsdp_parallelism=8, num_pipeline_microbatches=2.")


def test_three_problems_at_once_have_one_proposal():
  config = make(
      ici_pipeline_parallelism=3,
      num_decoder_layers=12,
      pipeline_parallel_layers=12,
      num_pipeline_repeats=-1,
      num_pipeline_microbatches=5,
      per_device_batch_size=4.0,
      micro_batch_size_to_train_on=32,
  )
  found = problems.problems(config)
  assert len(found) == 3 and "num_pipeline_microbatches=5" in found[0] and "a batch of 32 rows" in found[1]
  assert "8 devices (num_target_devices=8) cannot be divided as ici_pipeline_parallelism=3" in found[2]
  assert "Set" not in found[0] + found[1]
  assert found[2].endswith("Set, together: ici_pipeline_parallelism=4, num_pipeline_microbatches=4.")
  assert problems_after(config, found) == []


@pytest.mark.parametrize(
    "values",
    [
        {"ici_fsdp_parallelism": 3},
        {"ici_fsdp_parallelism": 4},
        {"ici_fsdp_parallelism": 1},
        {"ici_tensor_parallelism": 3},
        {"ici_fsdp_parallelism": -1, "ici_tensor_parallelism": -1},
    ],
    ids=str,
)
def test_the_number_of_stages_is_kept_if_it_divides_the_devices(values):
  config = make(**values)
  [problem] = problems.problems(config, whole_mesh=True)
  assert "ici_pipeline_parallelism=4" in problem  # as it is
  assert set(values_to_set([problem])) <= {"ici_fsdp_parallelism", "ici_data_parallelism", "ici_tensor_parallelism"}
  assert problems_after(config, [problem]) == []


def test_devices_that_tests_of_models_need_not_use_are_not_refused_by_themselves():
  config = make(ici_pipeline_parallelism=8, ici_fsdp_parallelism=2, num_pipeline_repeats=1)
  assert problems.problems(config) == [] and len(problems.problems(config, whole_mesh=True)) == 1


@pytest.mark.parametrize("slices, other", [(3, 2), (16, 8), (10**9, 8)])
def test_slices_that_cannot_share_the_devices_are_told_by_their_key_and_other_sizes_keep_their_remedies(slices, other):
  told = f"num_slices={slices} slices cannot share num_target_devices=8 equally. .*such as num_slices={other}[.]"
  [problem] = problems.problems(make(num_slices=slices), whole_mesh=True)
  assert re.match(told, problem)
  of_batch, problem = problems.problems(make(num_slices=slices, num_pipeline_microbatches=5), whole_mesh=True)
  assert re.match(told, problem) and "Set num_pipeline_microbatches=4" in of_batch


def test_a_remedy_does_not_bring_another_problem_about():
  # One layer outside of the pipeline would do, but biases of experts would not move there.
  config = make(
      num_decoder_layers=9,
      pipeline_parallel_layers=9,
      num_pipeline_repeats=-1,
      routed_bias=True,
      routed_bias_update_rate=0.1,
  )
  [problem] = problems.problems(config)
  assert "pipeline_parallel_layers=8" not in problem


FEW_ROWS = {"num_pipeline_microbatches": 2, "ici_pipeline_parallelism": 2, "num_pipeline_repeats": 4}
FEW_ROWS |= {"per_device_batch_size": 0.5, "micro_batch_size_to_train_on": 4}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4}


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"fused_qkv": True},
            r"fused_qkv=True needs equally many rows on each of 4 devices \(fsdp=4\), .* has 2 \(4 / num_pipeline_microb",
        ),
        ({"fused_qkv": True}, "Set per_device_batch_size=1 or fused_qkv=False"),
        (
            {"fused_qkv": True, "per_device_batch_size": 2.0, "micro_batch_size_to_train_on": 16}
            | {"num_pipeline_microbatches": 8},
            "Set num_pipeline_microbatches=4 or per_device_batch_size=4",
        ),
        (EXPERTS | {"expert": 2, "ici_fsdp_parallelism": 2}, "sparse_matmul=True with 2 devices for 4 experts needs"),
        (EXPERTS | {"expert": 2, "ici_fsdp_parallelism": 2}, "Set per_device_batch_size=1 or sparse_matmul=False"),
        (
            EXPERTS | {"expert": 4, "per_device_batch_size": 0.25, "micro_batch_size_to_train_on": 2, "rules": "none"},
            "Set per_device_batch_size=0.5",
        ),
        (
            {"fused_qkv": True, "per_device_batch_size": 1.0, "micro_batch_size_to_train_on": 8, "eval_interval": 5}
            | {"eval_per_device_batch_size": 0.5, "micro_batch_size_to_eval_on": 4},
            "an evaluation's microbatch of eval_per_device_batch_size=0.5 .* Set eval_per_device_batch_size=1 or eval",
        ),
        (
            {"fused_qkv": True, "per_device_batch_size": 4.0, "micro_batch_size_to_train_on": 32}
            | {"enable_rampup_batch_size": True, "per_device_batch_size_start": 1.0, "gradient_accumulation_steps": 2},
            "microbatch of the growing batch of per_device_batch_size_start=1.0 has 2 .* Set per_device_batch_size_s.*=2",
        ),
        (
            {"fused_qkv": True, "per_device_batch_size": 1.0, "micro_batch_size_to_train_on": 8, "batch_split_factor": 2}
            | {"use_batch_split_schedule": True, "decoder_block": "deepseek", "num_experts": 4},
            "has 2 .*batch_split_factor=2.*Set per_device_batch_size=2",
        ),
    ],
)
def test_fewer_rows_than_devices_that_each_want_some_are_refused(values, message):
  config = few_rows(**values)
  [problem] = problems.problems(config)
  assert re.search(message, problem)
  assert problems_after(config, [problem]) == []
  config.pipeline_impl = "host"
  assert problems.problems(config) == []


def few_rows(*, expert=None, rules=None, **values):
  config = make(**(FEW_ROWS | values))
  if expert:
    config.mesh_axes = [*config.mesh_axes, "expert"]
    config.ici_expert_parallelism = expert
    if rules is None:
      rule = ["data", "fsdp", "expert"]
      config.logical_axis_rules = [("activation_batch", rule), ("activation_embed_and_logits_batch", ["stage", *rule])]
  return config


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"fused_qkv": True, "decoder_block": "gpt3"},  # MaxText's own projection there
        {"fused_qkv": True, "decoder_block": "simple"},
        {"fused_qkv": True, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
        EXPERTS,  # replicated without expert parallelism
        EXPERTS | {"expert": 2, "ici_fsdp_parallelism": 2, "sparse_matmul": False},
        EXPERTS | {"expert": 4, "ici_fsdp_parallelism": 1, "rules": "none"},
        {"expert": 2, "ici_fsdp_parallelism": 2},  # no experts
        {"attention": "flash"},  # on this machine's CPUs
        {"fused_qkv": True, "num_target_devices": 7},  # a mesh that only its maker knows
    ],
    ids=str,
)
def test_rows_that_layers_of_maxtext_can_do_with_are_not_refused(values):
  assert problems.problems(few_rows(**values)) == []


@pytest.mark.parametrize(
    "attention, length, few", [("flash", 16, True), ("autoselected", 16, False), ("dot_product", 256, False)]
)
def test_flash_attention_wants_rows_on_tpus_only(attention, length, few):
  config = few_rows(attention=attention, max_target_length=length)
  assert bool(list(sizes.of_rows(config, "tpu"))) == few and not list(sizes.of_rows(config, "gpu"))
  assert list(sizes.of_rows(few_rows(attention="autoselected", max_target_length=128), "tpu"))
  if few:
    config.compile_topology = "v5e-8"
    assert "attention=flash on TPUs needs equally many rows on each of 4 devices" in problems.problems(config)[0]


def test_rows_are_sharded_as_the_rules_say():
  names = ("activation_batch", "activation_norm_length")
  assert rows.shards(names, make()) == 2
  taken = [("activation_norm_length", "fsdp"), *RULES]
  assert rows.shards(names, make(logical_axis_rules=taken)) == 1
  assert rows.shards(names, make(ici_fsdp_parallelism=3)) == 1  # no mesh


def test_a_batch_that_is_proposed_can_be_loaded():
  config = make(per_device_batch_size=4.125, micro_batch_size_to_train_on=33)
  assert candidates.batches(config, 4) == [5]  # 36 rows cannot be shared out to 8 devices
  assert candidates.batches(make(per_device_batch_size=0.3, micro_batch_size_to_train_on=2), 4) == [0.5]  # 8 are loaded
