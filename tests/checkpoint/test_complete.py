# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint lacks, and what it has too much, compared with what its run saves."""

import pytest

from maxtext_pp_ext.checkpoint import complete
from maxtext_pp_ext.checkpoint.complete import Saved
from maxtext_pp_ext.checkpoint.layout import LayoutError


def of(text):
  return tuple(text.split("/"))


WEIGHT, BIAS = "params/params/decoder/w", "nnx_aux/model/decoder/gate/bias"
SAVED = {
    of(WEIGHT): Saved(shape=(4, 2)),
    of(BIAS): Saved(shape=(4,)),
    of("nnx_aux/model/decoder/rngs/key"): Saved(shape=(), is_random_state=True),
    of("opt_state/0/count"): Saved(shape=()),
    of("opt_state/0/mu/params/decoder/w"): Saved(shape=(4, 2)),
    of("opt_state/0/nu/params/decoder/w"): Saved(shape=(4, 2)),
    of("step"): Saved(shape=()),
}
WHOLE = {path: wanted.shape for path, wanted in SAVED.items()}
WEIGHTS = {of(WEIGHT): (4, 2)}


def without(*names):
  return {path: shape for path, shape in WHOLE.items() if path not in map(of, names)}


SOUND = {
    "all": WHOLE,
    "random keys as words": WHOLE | {of("nnx_aux/model/decoder/rngs/key"): (2,)},
    "no random state": without("nnx_aux/model/decoder/rngs/key"),
    "random state among the weights": WHOLE | {of("params/params/decoder/rngs/params/key"): (2,)},
    "a bias among the weights": without(BIAS) | {of("params/params/decoder/gate/bias"): (4,)},
    "a bias in a collection": without(BIAS) | {of("params/MoEBiasVar/decoder/gate/bias"): (4,)},
    "weights only": WEIGHTS,
    "imported weights, which have a step": WEIGHTS | {of("step"): ()},
    "something beside the train state": WHOLE | {of("mine/x"): (3,)},
}


@pytest.mark.parametrize("stored", SOUND.values(), ids=SOUND.keys())
def test_what_a_run_saves_and_what_it_may_save_is_complete(stored):
  complete.check(stored, SAVED)


DAMAGED = {
    "a weight": (without(WEIGHT), [f"it lacks {WEIGHT} [4, 2]"]),
    "a weight of weights only": (
        {of("params/params/other"): (1,)},
        [f"it lacks {WEIGHT}", "it has params/params/other [1]"],
    ),
    "a moment": (without("opt_state/0/nu/params/decoder/w"), ["it lacks opt_state/0/nu/params/decoder/w [4, 2]"]),
    "a counter": (without("opt_state/0/count"), ["it lacks opt_state/0/count []"]),
    "the step": (without("step"), ["it lacks step []"]),
    "a bias": (without(BIAS), [f"it lacks {BIAS} [4]"]),
    "a bias of weights only, which have another": (
        WEIGHTS | {of("nnx_aux/model/decoder/other/bias"): (4,)},
        [f"it lacks {BIAS}", "it has nnx_aux/model/decoder/other/bias [4]"],
    ),
    "a moment too much": (
        WHOLE | {of("opt_state/0/trace/w"): (2,)},
        ["it has opt_state/0/trace/w [2], which such a run"],
    ),
    "moments of another optimizer": (
        WEIGHTS | {of("opt_state/0/count"): (), of("step"): ()},
        ["it lacks opt_state/0/mu/"],
    ),
    "a counter of another shape": (
        WHOLE | {of("opt_state/0/count"): (2,)},
        ["opt_state/0/count has the shape [2], and []"],
    ),
}


@pytest.mark.parametrize("stored, words", DAMAGED.values(), ids=DAMAGED.keys())
def test_what_lacks_and_what_is_too_much_is_named(stored, words):
  with pytest.raises(LayoutError) as error:
    complete.check(stored, SAVED)
  assert all(word in str(error.value) for word in (*words, "--from opt_type=adamw"))


def test_of_many_arrays_the_message_has_the_first_and_the_number_of_the_others():
  saved = SAVED | {of(f"params/params/w{i}"): Saved(shape=()) for i in range(15)}
  with pytest.raises(LayoutError, match="  and 5 more") as error:
    complete.check(WHOLE, saved)
  assert str(error.value).count("it lacks") == 10


PARTS = {
    "nothing of it": (WEIGHTS, ""),
    "a counter that another optimizer has, too": (
        without("opt_state/0/mu/params/decoder/w", "opt_state/0/nu/params/decoder/w"),
        "",
    ),
    "all of it": (WHOLE, ""),
    "all of it, and no bias": (without(BIAS), ""),
    "no second moment": (without("opt_state/0/nu/params/decoder/w"), "opt_state/0/nu/params/decoder/w"),
    "no counter": (without("opt_state/0/count"), "opt_state/0/count"),
    "no step": (without("step"), "step"),
}


@pytest.mark.parametrize("stored, lacking", PARTS.values(), ids=PARTS.keys())
def test_a_part_of_an_optimizers_state_is_told_from_none_of_it(stored, lacking):
  found = list(complete.lacking_of_optimizer(stored, SAVED))
  assert [text.split()[2] for text in found] == ([lacking] if lacking else [])
