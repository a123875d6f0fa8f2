"""The launches of a large batch's layer on a card, without a GPU."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import groupby

import pytest

PROGRAM = """
import json
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from tests.executor.device_planned import device_planned_server, run_large_batch
from tests.executor.steps import random_step
from tests.small_model import make_experts, make_store
from tests.support.no_launches import CardParts, no_launches
from vllm_dymoe.cache import device_table
from vllm_dymoe.kernels.triton.uses import CountUses
from vllm_dymoe.policies.dynaexq import DynaExq
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.on_demand import OnDemand


class Roomy(Exact):
    def staging_slots(self, slots):
        return slots // 2


# name: policy, precisions, bits of the low version, budget, hidden size
SERVERS = {
    "exact": (Roomy(), (4,), 0, "50%", 64),
    "on-demand": (OnDemand(), (8,), 0, "50%", 64),
    "dynaexq": (DynaExq(), (4, 2), 2, "75%", 64),
    "odd sizes": (Roomy(), (4,), 0, "50%", 60),
}
found = {}
usual, run = [], JITFunction.run
spied = mock.patch.object(JITFunction, "run", lambda self, *a, **named: usual.append(self) or run(self, *a, **named))
counts = mock.patch.object(device_table, "_count_uses_on", return_value=CountUses())
for name, (policy, bits, low, budget, hidden) in SERVERS.items():
    store = make_store(make_experts(bits=bits, layers=4, num_experts=16, hidden=hidden))
    with no_launches() as launched, spied, counts:
        options = {"low": low, "high": bits[0], "parts": CardParts(torch.device("cpu"))}
        server = device_planned_server(store, budget, policy, **options)
        for tokens in (20, 65, 200):
            for seed in range(2):
                for layer in range(4):
                    launched.clear(), usual.clear()
                    run_large_batch(server, layer, *random_step(seed, tokens, store.experts))
                    if (seed, layer) == (1, 1):
                        found[f"{name}, {tokens}"] = list(launched), len(usual)
        server.close()
print(json.dumps(found))
"""
PLANNED = ["count_kernel", "decide_kernel", "list_kernel", "place_pairs_kernel"]
DECODED, IN_REGISTERS = (
    ["mma_gate_up_kernel", "mma_down_kernel"], ["mma_grouped_gate_up_kernel", "mma_grouped_down_kernel"],
)  # fmt: skip


@pytest.fixture(scope="module")
def launches():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for name, (_, usual) in found.items():
        assert usual == 0, f"{name}: from the second layer on every launch is a prepared one"
    return {name: names for name, (names, _) in found.items()}


def products(names):
    """Return the launches of each group, which a copy or nothing separates."""
    assert (names[:4], names[-1]) == (PLANNED, "combine_kernel")
    groups = groupby(names[4:-1], lambda name: name in ("copy_spans_kernel", "count_uses_kernel"))
    return [list(group) for copies, group in groups if not copies]


@pytest.mark.parametrize("name", ["exact", "on-demand", "dynaexq"])
@pytest.mark.parametrize(("tokens", "pair"), [(20, DECODED), (65, IN_REGISTERS), (200, IN_REGISTERS)])
def test_a_group_takes_two_launches(launches, name, tokens, pair):
    every = [kernel for group in products(launches[f"{name}, {tokens}"]) for kernel in group]
    assert every == pair * (len(every) // 2)


def test_experts_without_a_kernel_for_all_numbers_of_tokens_have_a_pair_for_each_class_that_can_occur(launches):
    for tokens, pairs in ((20, DECODED), (65, [*DECODED, "grouped_gate_up_kernel", "grouped_down_kernel"])):
        kinds = Counter(kernel for group in products(launches[f"odd sizes, {tokens}"]) for kernel in group)
        assert set(kinds) == set(pairs)
    assert kinds["grouped_down_kernel"] == 2 * kinds["mma_down_kernel"], "for up to 64 and up to 128 tokens"


def test_what_a_policy_never_has_is_not_launched(launches):
    """``exact`` admits and streams, ``on-demand`` only streams.

    ``dynaexq`` does neither and counts uses.
    """
    counts = {name: Counter(launches[f"{name}, 200"]) for name in ("exact", "on-demand", "dynaexq")}
    # 12 of 16 experts in groups of 8; and the next layer's, copied ahead.
    assert counts["exact"]["copy_spans_kernel"] == 1 + 2 + 1
    assert counts["exact"]["mma_grouped_down_kernel"] == 2 + 2
    # A group of 16, beside those that were copied ahead.
    assert counts["on-demand"]["copy_spans_kernel"] == 1 + 1
    assert counts["on-demand"]["mma_grouped_down_kernel"] == 1 + 1
    assert (counts["dynaexq"]["copy_spans_kernel"], counts["dynaexq"]["mma_grouped_down_kernel"]) == (1, 1)
    assert [count["count_uses_kernel"] for count in counts.values()] == [0, 0, 1]
