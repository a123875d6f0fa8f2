"""The device memory that an automatic budget leaves.

Above all it leaves room for the KV cache of the longest request.
"""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import refused
from vllm_dymoe.executor.device_share import StepShape, automatic_share
from vllm_dymoe.options import ConfigError

GIB = 2**30
MIB = 2**20
# Qwen3-30B-A3B at 4 bits: 48 layers, 4 KV heads of 128 in bf16, and vLLM's default settings on a GPU below 70 GB.
LENGTH = 40960
KV_CACHE = 48 * 2 * 4 * 128 * 2 * LENGTH
DENSE = 3 * GIB  # embeddings, attention, routers, head
EXPERTS = int(15.2 * GIB)
LEAST = 32 * MIB + EXPERTS // (48 * 128)
SHAPE = StepShape(
    tokens=2048, sequences=256, hidden=2048, attention=40 * 128, intermediate=768, top_k=8, vocabulary=151936
)


def free_on(card, utilization=0.92, context=GIB // 2):
    """Return the memory that vLLM may use on a card with the dense weights loaded."""
    return int(card * GIB * utilization) - context - DENSE


def share(free, shape=SHAPE, **changes):
    arguments = {"kv_cache": KV_CACHE, "least": LEAST, "max_model_len": LENGTH} | changes
    return automatic_share(free, activations=shape.nbytes, **arguments)


@pytest.mark.parametrize("kv_cache", [KV_CACHE, KV_CACHE // 40], ids=["the default length", "short requests"])
@pytest.mark.parametrize(("card", "least"), [(16, 5 * GIB), (24, 12 * GIB), (80, EXPERTS)])
def test_a_request_fits_and_experts_get_up_to_four_fifths_of_the_rest(card, least, kv_cache):
    spare = free_on(card) - SHAPE.nbytes
    budget = share(free_on(card), kv_cache=kv_cache)
    assert budget == min(spare - kv_cache, int(0.8 * spare)) > least


def test_the_least_is_given_where_that_can_work():
    spare = 10 * LEAST
    assert share(SHAPE.nbytes + spare, kv_cache=9 * LEAST) == LEAST
    assert share(SHAPE.nbytes + LEAST, kv_cache=0) == LEAST


def test_what_cannot_work_is_refused_with_the_length_that_would():
    free = free_on(8)
    with pytest.raises(ConfigError) as caught:
        share(free)
    sentence = str(caught.value)
    assert "one request of 40960 tokens takes 3.8 GiB in the KV cache" in sentence
    with pytest.raises(ConfigError, match=r"2 requests of 40960 tokens take 7\.5 GiB"):
        share(free, kv_cache=2 * KV_CACHE, requests=2)
    length = int(re.search(r"--max-model-len to at most (\d+)", sentence)[1])
    assert 0 < length < LENGTH
    assert share(free, kv_cache=KV_CACHE * length // LENGTH, max_model_len=length) >= LEAST


def test_where_no_length_would_do_none_is_named():
    with refused("--gpu-memory-utilization", option="expert_budget"):
        share(-5)


def test_a_length_that_vllm_chooses_takes_at_most_a_half():
    free = free_on(8)
    assert share(free, fixed=False) == (free - SHAPE.nbytes) - (free - SHAPE.nbytes) // 2
    assert share(free_on(24), fixed=False) == share(free_on(24))


@given(st.integers(0, 200), st.integers(1, 40 * GIB), st.integers(1, GIB), st.booleans())
def test_nothing_is_reserved_twice(gigabytes, kv_cache, least, fixed):
    free = gigabytes * GIB
    try:
        budget = share(free, kv_cache=kv_cache, least=least, fixed=fixed)
    except ConfigError:
        assert free - SHAPE.nbytes - (kv_cache if fixed else 0) < least or not fixed
        return
    assert budget >= least
    assert budget + SHAPE.nbytes + (kv_cache if fixed else 0) <= free


def test_activations_grow_with_what_a_step_does():
    for larger in ({"tokens": 16384}, {"sequences": 1024}, {"graphs": 5000}, {"graph_tokens": 512}):
        assert replace(SHAPE, **larger).nbytes > SHAPE.nbytes
    assert GIB < SHAPE.nbytes < 2.5 * GIB
    # Sampling ends before a step begins, so the larger of the two counts.
    assert replace(SHAPE, sequences=1).nbytes < SHAPE.nbytes == replace(SHAPE, tokens=1).nbytes
