"""Servers whose steps a GPU's kernels plan and compute, beside those of a CPU."""

from dataclasses import replace

import pytest
import torch

from tests.executor.device_planned import (
    KINDS,
    decode,
    device_planned_server,
    run_device_planned,
    run_large_batch,
    store_of,
)
from tests.executor.steps import CPU, make_server, random_step, run
from tests.kernels.sections import DEVICE, TOLERANCE, relative_error
from tests.prefetch.gates import random_gates
from tests.small_model import make_experts, make_store
from tests.support.decode_steps import numbers_of, own_ids
from tests.support.memory_writer import MemoryWriter
from tests.support.no_launches import CardParts
from vllm_dymoe.executor.triton_kernels import TritonKernels
from vllm_dymoe.experts.encoding import E8, FP8, NVFP4, PLAIN
from vllm_dymoe.experts.encoding import STEPS as GRIDS
from vllm_dymoe.experts.format import DownFormat, ModelExperts
from vllm_dymoe.kernels import Activation, Decode, Grouped
from vllm_dymoe.kernels.triton import TritonKernel, large_batch_step
from vllm_dymoe.kernels.triton.kernel import MINIMUM_WORKSPACE_BYTES
from vllm_dymoe.kernels.triton.prefetch import name_experts_on_gpu
from vllm_dymoe.kernels.triton.tiles import EVERY, Tiles
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.prefetch import Gate, on_device
from vllm_dymoe.prefetch.next_gate import NextGate
from vllm_dymoe.quantize.dummy import random_store

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the server's own device is the CPU here")

CARD = {"parts": CardParts(CPU, Decode.PLAIN, Grouped.PLAIN)}
"""Arguments of a server with the kernels that Triton's interpreter can run."""
STEPS = [(0, 0, 1), (1, 1, 1), (2, 0, 3), (3, 1, 40)]


def dymoe():
    """Return a new policy for a server: its thresholds move with the steps."""
    return Dymoe(retention=0.5, reuse_high=False)


def on_card(store, budget, steps, policy=None, activation=Activation.SILU, told=None, **options):
    server = device_planned_server(store, budget, policy, **CARD, **options)
    assert isinstance(server.small_batches.kernel, TritonKernels)
    return run_device_planned(server, steps, activation, **told or {})


def close(found, want):
    return all(relative_error(got, one.double()) < TOLERANCE[one.dtype] for got, one in zip(found, want, strict=True))


def check_budgets(
    store, steps, policy=lambda: None, activation=Activation.SILU, budgets=("50%", "minimum"), told=None, **options
):
    """Check steps with a CPU's, and that every budget gives the same bits.

    Stores are of float16, because the interpreter does not round to bfloat16 as a GPU does.
    """
    of_cpu = run(make_server(store, "100%", policy(), **options), steps, activation, **told or {})
    want = on_card(store, "100%", steps, policy(), activation, told, **options)
    assert close(want, of_cpu)
    for budget in budgets:
        found = on_card(store, budget, steps, policy(), activation, told, **options)
        assert all(map(torch.equal, found, want)), budget
    return want


@pytest.mark.parametrize("nested", [False, True])
def test_steps_have_the_same_bits_at_every_budget(nested):
    """They are planned by the program, and fetched by the kernels that compute."""
    store = make_store(make_experts(dtype=torch.float16, nested=nested))
    check_budgets(store, [(0, 0, 1), (1, 1, 3), (2, 0, 3), (3, 1, 1), (4, 0, 40), (5, 0, 2)], dymoe)


def test_the_integers_of_a_checkpoint_beside_a_precision_derived_from_them():
    """Only at 4 bits are zero points integers, and columns in an order."""
    plain = make_experts(dtype=torch.float16)
    formats = {bits: replace(fmt, integer_zeros=bits == 4, act_order=bits == 4) for bits, fmt in plain.formats.items()}
    experts = ModelExperts(plain.layers, plain.num_experts, plain.top_k, formats)
    check_budgets(random_store(experts, MemoryWriter(experts), seed=3), STEPS, dymoe, budgets=("50%",))


@pytest.mark.parametrize(("decode_tokens", "kernel"), [(0, "grouped_gate_up"), (EVERY, "decode_gate_up")])
def test_one_kernel_can_compute_all_experts_of_a_large_batch(monkeypatch, decode_tokens, kernel):
    """Whatever their numbers of tokens, and at any budget."""

    def of_large_batch(tiles, *, crowded):
        grouped = {} if decode_tokens == 0 else {"grouped_gate_up": (), "grouped_down": ()}
        return replace(tiles, decode_tokens=decode_tokens, **grouped)

    store, launched = make_store(make_experts(dtype=torch.float16)), set()
    monkeypatch.setattr(Tiles, "of_large_batch", of_large_batch)
    for name in ("decode_gate_up", "grouped_gate_up"):
        launch = getattr(large_batch_step, name)
        spied = lambda *given, name=name, launch=launch, **named: launched.add(name) or launch(*given, **named)  # noqa: E731
        monkeypatch.setattr(large_batch_step, name, spied)
    check_budgets(store, [(4, 0, 40), (5, 1, 90), (6, 0, 40)], dymoe)
    assert launched == {kernel}


@pytest.mark.parametrize("encoding", [GRIDS[4], E8], ids=lambda encoding: encoding.name)
def test_weights_on_inputs(encoding):
    """Small and large batches have a row of the input for each pair.

    Lattice codes rotate these rows.
    """
    high = encoding.bits
    plain = make_experts(bits=(high,), dtype=torch.float16)
    experts = replace(plain, formats={high: replace(plain.formats[high], encoding=encoding)})
    store = random_store(experts, MemoryWriter(experts), seed=3)
    steps = [(0, 0, 1), (1, 1, 3), (2, 0, 40)]
    told = {"weights_on_input": True}
    want = check_budgets(store, steps, budgets=("50%",), told=told, low=0, high=high)
    assert not any(map(torch.equal, on_card(store, "50%", steps, low=0, high=high), want))


@pytest.mark.parametrize("nested", [False, True])
def test_steps_with_predictions_have_the_bits_of_steps_without(nested, monkeypatch):
    """A GPU's kernels name, judge, list and copy experts for two layers ahead."""
    name = lambda table, *given: name_experts_on_gpu(vars(table), *given)  # noqa: E731
    monkeypatch.setattr(on_device, "_name_experts_on", lambda device: name)
    store = make_store(make_experts(dtype=torch.float16, layers=3, nested=nested))
    gates, _ = random_gates(3, 6, store.experts.formats[4].hidden)
    floats = [Gate(lambda x, gate=gate: gate.logits(x.float())) for gate in gates]
    steps = [(seed, layer, 1 + seed % 2) for seed in range(3) for layer in range(3)]
    policy = Dymoe(retention=0.5, high_by="depth", reuse_high=False)
    want = on_card(store, "100%", steps, policy)
    server = device_planned_server(store, "50%", policy, predictor=NextGate(floats, 2, 2), **CARD)
    assert all(map(torch.equal, run_device_planned(server, steps), want))
    stats = server.stats()
    assert stats.predictions["correct"] > 0
    assert stats.prefetches["useful"] > 0


@pytest.mark.parametrize("high_by", ["threshold", "depth"])
def test_a_rank_chooses_among_the_experts_of_all_as_on_the_emulated_card(memory_store, high_by):
    """Launches of large batches are repeated with other tensors."""
    numbers = numbers_of(12, 6)

    def table_after_steps(**parts):
        policy = Dymoe(retention=0.5, high_by=high_by, reuse_high=False)
        server = device_planned_server(memory_store, "50%", policy, all_experts=len(numbers), **parts)
        server.small_batches.warm_up(Activation.SILU)
        for seed, tokens in enumerate((1, 3, 40, 40, 2, 40, 40, 40)):
            x, weights, _ = random_step(seed, tokens, server.experts)
            chance = torch.rand(tokens, len(numbers), generator=torch.Generator().manual_seed(seed))
            ids = chance.topk(2).indices.int()
            run_step = decode if tokens <= 16 else run_large_batch
            run_step(server, seed // 2 % 2, x, weights, own_ids(numbers, ids), global_ids=ids)
        return server.cache.device_table.table, server.small_batches.kernel

    want, _ = table_after_steps()
    found, kernel = table_after_steps(**CARD)
    assert isinstance(kernel, TritonKernels)
    for name in ("threshold", "chosen", "precision", "score", "step"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name


def test_rows_without_an_expert_are_zero(memory_store):
    """The output's previous contents are overwritten.

    Such rows are padding, and tokens whose experts all belong to another rank.
    """
    x, weights, ids = random_step(1, 4, memory_store.experts)
    ids[1], ids[2, 0] = -1, -1
    out = decode(device_planned_server(memory_store, "50%", **CARD), 0, x, weights, ids, rows=3)
    assert out.any(1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_experts(kind):
    store, activation = store_of(kind, dtype=torch.float16, hidden=96)
    steps = [(0, 0, 1), (2, 0, 3), *([(4, 0, 40)] if kind == "e8" else [])]
    budgets = ("50%", "minimum") if kind == "e8" else ("50%",)
    want = check_budgets(store, steps, dymoe, activation, budgets, high=max(store.experts.formats))
    assert any(one.any() for one in want)


def test_a_step_that_the_scratch_has_no_room_for_is_refused(memory_store):
    with pytest.raises(ValueError, match=f"expected at least {MINIMUM_WORKSPACE_BYTES}"):
        TritonKernel("cpu", 1000)
    with pytest.raises(ValueError, match="9000 rows"):
        TritonKernels(TritonKernel("cpu"), memory_store.experts, 9000)
    with pytest.raises(ValueError, match="a layer has 1025 experts, but device-side planning supports at most 1024"):
        TritonKernels(TritonKernel("cpu"), replace(memory_store.experts, num_experts=1025), 1)


DOWN = {
    "8 bits": (GRIDS[4], DownFormat(GRIDS[8], 32)),
    "16 bits": (GRIDS[4], DownFormat(PLAIN, 32)),
    "FP8": (NVFP4, DownFormat(FP8, 64)),
    "integers in an order": (GRIDS[8], DownFormat(GRIDS[4], 32, integer_zeros=True, act_order=True)),
    "larger groups": (GRIDS[4], DownFormat(GRIDS[4], 64)),
    "8 bits in larger groups": (GRIDS[4], DownFormat(GRIDS[8], 128)),
    "4 bits beside FP8 of larger groups": (GRIDS[4], DownFormat(FP8, 128)),
    "other zeros": (GRIDS[4], DownFormat(GRIDS[4], 32, integer_zeros=True)),
    "other zeros, groups and order": (GRIDS[2], DownFormat(GRIDS[2], 64, integer_zeros=True, act_order=True)),
}


@pytest.mark.parametrize("name", DOWN)
def test_down_projections_in_a_format_of_their_own(name):
    """Of small and large batches, fetched and resident, at every budget."""
    encoding, down = DOWN[name]
    high = encoding.bits
    plain = make_experts(bits=(high,), dtype=torch.float16, hidden=96, intermediate=64)
    experts = replace(plain, formats={high: replace(plain.formats[high], encoding=encoding, down=down)})
    store = random_store(experts, MemoryWriter(experts), seed=3)
    steps = [(0, 0, 1), (1, 1, 3), (2, 0, 40), (3, 1, 2)]
    check_budgets(store, steps, low=0, high=high)


def test_layers_of_other_formats_have_launches_of_their_own():
    """Their groups and integers differ in ways that one launch cannot compute."""
    plain = make_experts(layers=3, bits=(4,), dtype=torch.float16, intermediate=64)
    usual = plain.formats[4]
    own = {2: replace(usual, encoding=PLAIN), 3: replace(usual, group_size=64, integer_zeros=True)}
    experts = replace(plain, own=own)
    store = random_store(experts, MemoryWriter(experts), seed=3)
    steps = [(seed, layer, tokens) for seed, tokens in enumerate((1, 3)) for layer in range(3)] + [(4, 1, 40)]
    check_budgets(store, steps, low=0)
