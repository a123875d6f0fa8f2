"""Where experts live on the host: what fits, what is said, and what is refused."""

import re
from dataclasses import replace

import pytest

from tests.small_model import make_experts
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.store import StoreError, memory_bytes
from vllm_dymoe.store.placement import HostPlace, choose_host_place

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


def test_automatic_is_memory_where_there_is_room_and_says_what_stays_free():
    place = choose()
    assert place.pinned
    assert place.reason == "auto: 15.2 GiB, 64.0 GiB of host memory are available, of which 6.4 GiB are left to others"


def test_automatic_is_files_where_there_is_no_room_and_says_what_would_be_needed():
    place = choose(available=16 * GIB)
    assert not place.pinned
    assert "would take 15.2 GiB, 16.0 GiB of host memory are available, of which 2.0 GiB are left" in place.reason


@pytest.mark.parametrize("left", [2 * GIB])
def test_the_margin_decides(left):
    assert choose(available=NEEDED + left).pinned
    assert not choose(available=NEEDED + left - 1).pinned
    assert not choose(available=0).pinned


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_machines_memory(ranks):
    assert choose(available=NEEDED * 10 // 9 * ranks + 100, ranks=ranks).pinned
    place = choose(available=NEEDED * ranks, ranks=ranks)
    assert not place.pinned
    assert f"15.2 GiB on each of {ranks} ranks" in place.reason


def test_without_a_cuda_device_files_are_as_good():
    assert choose(device="cpu") == HostPlace(False, "auto: there is no CUDA device")


def test_what_was_asked_for_needs_no_reason():
    assert choose("file", available=0) == HostPlace(False)
    for device in ("cpu", "cuda"):
        assert choose("pinned", available=NEEDED, device=device) == HostPlace(True)


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


def test_where_no_bits_would_fit_none_are_named():
    with pytest.raises(StoreError) as caught:
        choose("pinned", available=GIB)
    assert str(caught.value).endswith('use host_store = "file".')
