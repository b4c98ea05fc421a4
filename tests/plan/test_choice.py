# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The chosen policy against all policies, one by one."""

import functools
import itertools
import types

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_pp_ext.plan import choice, estimate, layers
from maxtext_pp_ext.plan.blocks import Again
from maxtext_pp_ext.plan.operations import Kind

NAMES = ("query_proj", "out_proj", "mlpwi_0", "mlpwo")
CONFIG = types.SimpleNamespace(**dict.fromkeys(NAMES, "remat"), decoder_layer_input="device")
TOKENS, WIDE, LAYERS = 8, 32, 3


def layer(weights, x):
  """A chain, whose named values spare each other's recomputation; mlpwi_0 is large."""
  x = checkpoint_name(x, "decoder_layer_input")
  query = checkpoint_name(jnp.sin(x) @ weights["query"], "query_proj")
  context = checkpoint_name(jnp.tanh(query) @ weights["out_proj"], "out_proj")
  hidden = checkpoint_name(jnp.exp(context) @ weights["wide"], "mlpwi_0")
  return x + checkpoint_name(jnp.sin(jnp.cos(hidden) @ weights["out"]), "mlpwo")


def toy():
  shapes = {"query": (4, 4), "out_proj": (4, 4), "wide": (4, WIDE), "out": (WIDE, 4)}
  weights = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in shapes.items()}

  def loss(weights, x):
    x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), x, weights)
    return x.sum()

  program = jax.make_jaxpr(loss)(weights, jax.ShapeDtypeStruct((1, TOKENS, 4), jnp.float32))
  return layers.of_program(program, {}, [None] * len(weights) + [((), (), ())], len(weights))


def costs(kept, *, timed=True, per_byte, product, between, base=100.0, copies=False, inputs=0.0, on_the_way=0.0):
  """A run whose memory is what is kept and on the way, and whose seconds are recomputation and waiting for the host."""
  pipeline = base + product * kept.share(Kind.PRODUCT) + between * kept.again[Again.BETWEEN]
  to_host = per_byte * kept.host
  waits = float(estimate.waiting_for_host(to_host, 0.5 * base / 3, 0.75 * (pipeline - base / 3)))
  parts = {"pipeline": pipeline, "host": waits}
  copied = max(kept.device - inputs, 0.0) if copies and kept.host else 0.0
  peak = 1000 + kept.device + copied + on_the_way * max(kept.host, kept.most_host)
  of_memory = types.SimpleNamespace(peak=peak, on_host=kept.host, copies_kept=copies)
  if not timed:
    return of_memory, None
  return of_memory, estimate.Estimate(
      parts=parts,
      beside={"links": 0.0},
      pipeline=pipeline,
      to_host=to_host,
      while_sent=0.5,
      while_fetched=0.75,
      at_peak={},
  )


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("rates", [(0.01, 30.0, 1.0), (0.3, 30.0, 9.0), (2.0, 1.0, 30.0), (1e9, 30.0, 1.0)])
def test_no_policy_that_fits_is_faster(rates, copies):
  found, (per_byte, product, between) = toy(), rates
  full = found.under(lambda name: None)
  predict = functools.partial(
      costs, per_byte=per_byte, product=product, between=between, copies=copies, inputs=full.device
  )
  assert found.names == tuple(sorted((*NAMES, "decoder_layer_input")))
  choices = choice.Choices(CONFIG, found, predict, full)
  every = []
  for places in itertools.product((None, "device", "offload"), repeat=len(NAMES)):
    for of_input in ("device", "offload"):
      of = dict(zip(NAMES, places, strict=True)) | {"decoder_layer_input": of_input}
      every.append(predict(found.under(of.get)))
  peaks = sorted({cost.peak for cost, _ in every})
  for limit in (*peaks, peaks[-1] * 2):
    kept, (cost, seconds) = choices.best(predict, limit)
    assert cost.peak <= limit
    assert seconds.seconds == pytest.approx(min(each.seconds for cost, each in every if cost.peak <= limit))
    of_inputs = {"decoder_layer_input": "device"} | kept.places
    assert predict(found.under(of_inputs.get))[1] == seconds
  kept, (cost, _) = choices.best(predict, peaks[0] - 1)  # nothing fits
  assert cost.peak == peaks[0]


def every_policy():
  """(place of each name, the input's among them) of all policies of the toy."""
  for places in itertools.product((None, "device", "offload"), repeat=len(NAMES)):
    for of_input in ("device", "offload"):
      yield dict(zip(NAMES, places, strict=True)) | {"decoder_layer_input": of_input}


@pytest.mark.parametrize("on_the_way", [0.0, 0.25])
@pytest.mark.parametrize("rates", [(1e9, 30.0, 1.0), (2.0, 1.0, 30.0), (0.3, 30.0, 9.0)])
def test_no_number_of_first_iterations_that_keep_less_is_faster(rates, on_the_way):
  found, (per_byte, product, between), iterations = toy(), rates, 5
  predict = functools.partial(costs, per_byte=per_byte, product=product, between=between, on_the_way=on_the_way)
  choices = choice.Choices(CONFIG, found, predict, found.under(lambda name: None))
  of = lambda places: found.under(places.get)
  mixed = []
  for places in every_policy():
    kept, own = of(places), [name for name in NAMES if places[name]]
    for count in range(1, len(own) + 1):
      for names in itertools.combinations(own, count):
        less = of(places | dict.fromkeys(names))
        mixed += [predict(kept.averaged(less, 1 - first / iterations)) for first in range(1, iterations)]
  whole = [predict(of(places)) for places in every_policy()]
  fastest = lambda every, limit: min(each.seconds for cost, each in every if cost.peak <= limit)
  peaks, improved = sorted({cost.peak for cost, _ in whole}), 0
  between_peaks = [(low + high) / 2 for low, high in itertools.pairwise(peaks)]
  for limit in (*peaks, *between_peaks, peaks[-1] * 2):
    kept, (_, alone) = choices.best(predict, limit)
    better = choices.in_parts(predict, limit, iterations=iterations)
    seconds = better[1][1].seconds if better else alone.seconds
    assert seconds == pytest.approx(fastest(whole + mixed, limit))
    if better:
      improved += 1
      kept, (cost, _) = better
      first, names = kept.first
      less = of({name: place for name, place in kept.places.items() if name not in names})
      again = of(kept.places).averaged(less, 1 - first / iterations)
      assert cost.peak <= limit and (again.device, again.host) == pytest.approx((kept.device, kept.host))
      keys = choices.keys_of(kept)
      assert keys["pipeline_remat_iterations"] == first and keys["pipeline_remat_tensors"] == ",".join(names)
  assert improved


def test_what_the_compiler_may_not_fetch_stays_on_the_device():
  kept = {"context": np.array([8.0, 0.0]), "mlpwo": np.array([4.0, 1.0]), None: np.array([2.0, 0.0])}
  found = choice._placements(kept)
  assert found.names == ("context", "mlpwo") and found.may_leave == ("mlpwo",)
  assert (list(found.device), list(found.host)) == ([15.0, 11.0], [0.0, 4.0])


def test_what_is_offloaded_fits_into_the_hosts_memory():
  found = toy()
  predict = lambda kept, timed=True: costs(kept, timed=timed, per_byte=0.0, product=30.0, between=1.0)
  choices = choice.Choices(CONFIG, found, predict, found.under(lambda name: None))
  limit = predict(found.under(lambda name: None))[0].peak  # nothing else fits on the device
  most, _ = choices.best(predict, limit)
  assert most.host > 0
  for of_host in (most.host, most.host - 1, most.host / 2, 0.0):
    kept, (_, seconds) = choices.best(predict, limit, of_host)
    assert kept.host <= of_host
    assert (kept == most) == (of_host == most.host) and seconds.seconds >= choices.best(predict, limit)[1][1].seconds


def test_keys_are_those_whose_place_is_not_the_runs():
  own = types.SimpleNamespace(
      decoder_layer_input="device", query_proj="remat", out_proj="device", mlpwi_0="remat", mlpwo="remat"
  )
  found = toy()
  choices = choice.Choices(
      own, found, functools.partial(costs, per_byte=1.0, product=1.0, between=1.0), found.under(lambda name: None)
  )
  of = lambda **places: choices.keys_of(layers.Kept(device=0.0, again={}, places=places))
  assert of() == {"remat_policy": "full"}
  assert of(decoder_layer_input="offload") == {
      "remat_policy": "custom",
      "decoder_layer_input": "offload",
      "out_proj": "remat",
  }
  assert of(decoder_layer_input="device", out_proj="device", mlpwo="offload") == {
      "remat_policy": "custom",
      "mlpwo": "offload",
  }
