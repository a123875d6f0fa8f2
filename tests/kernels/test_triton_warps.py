"""Data that a program's warps exchange through memory, under random interleavings.

Tests `plan_small_batch_on_gpu` and `arrives_last`.
"""

import os
from unittest import mock

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_interpreter.py runs it, or TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

from tests.kernels.twins import Twins
from tests.support.decode_steps import EXPERTS, LAYERS, RANKS, random_step
from tests.support.deterministic_threads import DeadlockError
from tests.support.warps import random_warps
from vllm_dymoe.kernels.triton import decode
from vllm_dymoe.kernels.triton.decode import arrives_last
from vllm_dymoe.kernels.triton.planner import plan_small_batch_on_gpu
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.policies.dymoe import Dymoe


def device_planned(seed, nested=False, rank="alone", **options):
    """Return whether some steps, run in warps, give the plain rule's result."""
    numbers = RANKS[rank]
    experts = EXPERTS if numbers is None else len(numbers)
    twins = Twins(
        {LOW: [3] * LAYERS, HIGH: [4] * LAYERS}, numbers=numbers,
        policy=Dymoe(retention=0.5, high_by=("threshold", "depth")[seed % 2]), staging=1, nested=nested,
    )  # fmt: skip
    in_warps = lambda *given, **named: _in_warps(seed, options, given, named)  # noqa: E731
    try:
        with mock.patch("tests.kernels.twins.plan_small_batch_on_gpu", in_warps):
            for step in range(3):
                twins.step(step % LAYERS, *random_step(10 * seed + step, 1 + step, experts=experts))
    except (AssertionError, IndexError):
        return False
    return True


def _in_warps(seed, options, given, named):
    with random_warps(seed, **options):
        plan_small_batch_on_gpu(*given, **named)


@pytest.mark.parametrize(("nested", "rank"), [(False, "alone"), (True, "alone"), (False, "with copies")])
def test_no_interleaving_of_warps_decides_otherwise(nested, rank):
    assert all(device_planned(seed, nested, rank) for seed in range(4))


def test_without_barriers_some_do():
    assert not all(device_planned(seed, barriers=False) for seed in range(4))


@triton.jit
def add_up(partials, semaphore, out, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # noqa: N803
    """Sum into ``out`` what all programs store; grid [COUNT]."""
    lane = tl.arange(0, WIDTH)
    program = tl.program_id(0)
    tl.store(partials + program * WIDTH + lane, lane + 100 * program)
    if decode_arrives(semaphore, COUNT):
        total = tl.zeros([WIDTH], tl.int32)
        for number in range(COUNT):
            total += tl.load(partials + number * WIDTH + lane)
        tl.store(out + lane, total)


decode_arrives = arrives_last


@triton.jit
def without_a_barrier(semaphore, count):
    """Count a warp before the others have stored."""
    is_last = tl.atomic_add(semaphore, 1, sem="acq_rel") == count - 1
    if is_last:
        tl.store(semaphore, 0)
    return is_last


def added_up(seed, **options):
    """Return whether the last of three programs sees all stores, twice."""
    partials, out = torch.full((3, 128), -999, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    semaphore = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        partials.fill_(-999)
        try:
            with random_warps(seed, **options):
                add_up[(3,)](partials, semaphore, out, COUNT=3, WIDTH=128)
        except DeadlockError:
            return False
        if out.tolist() != [3 * lane + 300 for lane in range(128)] or int(semaphore):
            return False
    return True


def test_the_last_program_sees_what_all_have_stored():
    assert all(added_up(seed) for seed in range(20))


def test_a_count_before_the_others_have_stored_is_found(monkeypatch):
    monkeypatch.setitem(globals(), "decode_arrives", without_a_barrier)
    assert not all(added_up(seed) for seed in range(20))
    assert decode.arrives_last is arrives_last
