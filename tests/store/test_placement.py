"""Where experts live on the host: what fits, what is said, and what is refused."""

import re
from dataclasses import replace

import pytest

from tests.small_model import make_experts
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.store import StoreError, memory_bytes
from vllm_dymoe.store.memory import choose_host_place

GIB = 2**30
# Qwen3-30B-A3B at 4 bits.
LARGE = make_experts(layers=48, num_experts=128, top_k=8, hidden=2048, intermediate=768, bits=(4,), group_size=64)
NEEDED = memory_bytes(LARGE)


def choose(asked="auto", available=64 * GIB, ranks=1, device="cuda", experts=LARGE):
    return choose_host_place(asked, device, experts, available, ranks)


def test_what_is_needed_is_whole_pages_and_no_power_of_two():
    assert LARGE.nbytes(4) <= NEEDED < LARGE.nbytes(4) + 48 * 4096
    odd = make_experts(layers=3, num_experts=7)
    assert memory_bytes(odd) % (3 * 4096) == 0
    assert memory_bytes(odd) > sum(odd.nbytes(bits) for bits in odd.formats)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_machines_memory(ranks):
    assert choose(available=NEEDED * 10 // 9 * ranks + 100, ranks=ranks).pinned
    place = choose(available=NEEDED * ranks, ranks=ranks)
    assert not place.pinned
    assert f"15.2 GiB on each of {ranks} ranks" in place.reason


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_that_is_not_there_is_refused_with_the_numbers_that_would_fit(ranks):
    available = 9 * GIB * ranks
    with pytest.raises(StoreError) as caught:
        choose("pinned", available=available, ranks=ranks)
    sentence = str(caught.value)
    assert f'host_store = "pinned" needs {NEEDED} bytes' in sentence
    assert f"{9 * GIB} are available" in sentence
    assert ("on each of 2 ranks" in sentence) is (ranks == 2)
    more = int(re.search(r"free (\d+) more", sentence)[1])
    choose("pinned", available=available + more * ranks, ranks=ranks)
    bits, taken = map(int, re.search(r"or hi = (\d) and lo = 0, which take (\d+)", sentence).groups())
    fits = replace(LARGE, formats={bits: replace(LARGE.formats[4], code=code_of(bits))})
    assert memory_bytes(fits) == taken
    choose("pinned", available=available, ranks=ranks, experts=fits)


@pytest.mark.parametrize(
    ("asked", "available", "device", "pinned", "reason"),
    [
        ("auto", 64 * GIB, "cuda", True, "auto: 15.2 GiB, 64.0 GiB of host memory are available, of which 6.4 GiB are"),
        ("auto", 16 * GIB, "cuda", False, "would take 15.2 GiB, 16.0 GiB of host memory are available, of which 2.0"),
        ("auto", NEEDED + 2 * GIB, "cuda", True, ""),
        ("auto", NEEDED + 2 * GIB - 1, "cuda", False, ""),
        ("auto", 64 * GIB, "cpu", False, "auto: there is no CUDA device"),
        ("file", 0, "cuda", False, None),
        ("pinned", NEEDED, "cpu", True, None),
        ("pinned", NEEDED, "cuda", True, None),
    ],
)
def test_experts_live_where_there_is_room_and_the_reason_is_said(asked, available, device, pinned, reason):
    place = choose(asked, available=available, device=device)
    assert place.pinned == pinned
    assert place.reason == "" if reason is None else reason in place.reason
    with pytest.raises(StoreError, match=r'use host_store = "file"\.$'):
        choose("pinned", available=GIB)
