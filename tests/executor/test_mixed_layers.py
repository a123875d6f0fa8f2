"""Layers in several formats: 16 bits, other bits or groups, published floats."""

from dataclasses import replace

import pytest
import torch

from tests.cache.store.stores import read
from tests.executor.device_planned import device_planned_server, run_device_planned
from tests.executor.steps import BUDGETS, STEPS, equal, make_server, random_step, run, with_budget
from tests.small_model import make_experts
from tests.support.memory_writer import MemoryWriter
from vllm_dymoe.cache.host_cache import HostCache, join
from vllm_dymoe.cache.store import FileStore, Manifest, smallest_host_cache, whole_host_cache
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.encoding import FP8, NVFP4, PLAIN
from vllm_dymoe.experts.encoding import STEPS as GRIDS
from vllm_dymoe.experts.format import DownFormat, SliceKey, all_keys
from vllm_dymoe.kernels import Activation, expert_reference
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.quantize.dummy import random_store

POLICIES = ["exact", "on-demand", "layer-prefetch", "duoserve", "firm"]
ALONE = {"low": 0, "misses": "fetch"}


def mixed_experts(**sizes):
    """Return seven layers, of which three have 4 bits in groups of 32."""
    plain = make_experts(layers=7, bits=(4,), num_experts=8, hidden=96, intermediate=64, **sizes)
    usual = plain.formats[4]
    own = {
        2: replace(usual, encoding=PLAIN),
        3: replace(usual, encoding=FP8),
        5: replace(usual, group_size=64, integer_zeros=True, act_order=True),
        6: replace(usual, encoding=NVFP4),
    }
    return replace(plain, own=own)


EXPERTS = mixed_experts()
ALL_STEPS = [(seed, layer, tokens) for seed, tokens in enumerate((1, 3, 40)) for layer in range(7)]


@pytest.fixture(scope="module")
def store():
    return random_store(EXPERTS, MemoryWriter(EXPERTS), seed=1)


def reference(store, layer, x, weights, ids):
    """Compute a layer in float64 from the bytes of the store."""
    want = torch.zeros(x.shape, dtype=torch.float64)
    for token, (chosen, gates) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for expert, gate in zip(chosen, gates, strict=True):
            key = SliceKey(layer, expert, 4)
            packed = store.experts.format(key).view(read(store, key))
            want[token] += gate * expert_reference(x[token : token + 1].double(), *packed, Activation.SILU)[0]
    return want


def test_kinds_of_layers():
    assert EXPERTS.kinds == (0, 1, 2, 0, 3, 4, 0)
    assert EXPERTS.of_kind(0).layers == (1, 4, 7)
    assert EXPERTS.nbytes(4) == sum(EXPERTS.num_experts * formats[4].nbytes for formats in EXPERTS.of_layers)
    with pytest.raises(ValueError, match="one version"):
        replace(make_experts(), own=EXPERTS.own)


@pytest.mark.parametrize("misses", ["fetch", "compute"])
@pytest.mark.parametrize("native", [True, False])
def test_no_budget_changes_a_bit_and_the_sum_is_right(store, native, misses, monkeypatch):
    if not native:
        if misses == "compute":
            pytest.skip("without the native call every miss is fetched")
        monkeypatch.setattr("vllm_dymoe.server.expert_server.ExpertServer._make_cpu_executor", lambda *_, **__: None)
    want = run(with_budget(store, "100%", low=0, misses=misses), ALL_STEPS)
    for budget in BUDGETS[1:]:
        assert equal(want, run(with_budget(store, budget, low=0, misses=misses), ALL_STEPS)), budget
    for (seed, layer, tokens), got in zip(ALL_STEPS, want, strict=True):
        right = reference(store, layer, *random_step(seed, tokens, EXPERTS))
        # The tolerance is bf16's: rounding the inner activation, each expert's output and the sum.
        assert (got.double() - right).norm() / right.norm() < 1e-2


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_without_the_host_have_the_bits_of_steps_with_it(store, policy):
    want = run(with_budget(store, "100%", **ALONE), ALL_STEPS)
    for budget in ("100%", "40%", "minimum"):
        assert equal(want, run(with_budget(store, budget, policy, **ALONE), ALL_STEPS)), budget
        server = device_planned_server(store, budget, policy, **ALONE)
        assert equal(want, run_device_planned(server, ALL_STEPS)), budget
        server.check_integrity()


def test_a_devices_cpu_worker_tells_layers_of_the_same_bits_apart(store):
    """4 bits in groups of 32 and of 64, integers and floats, and 16 bits."""
    want = run(with_budget(store, "100%", **ALONE), ALL_STEPS)
    server = device_planned_server(store, "minimum", low=0, misses="compute")
    assert equal(want, run_device_planned(server, ALL_STEPS))
    assert server.stats().cpu_executed > 20
    server.close(keep_store=True)


def test_an_emulated_link_brings_each_layer_at_its_own_size(store):
    want = run(with_budget(store, "100%", **ALONE), ALL_STEPS)
    assert equal(want, run_device_planned(device_planned_server(store, "30%", link_gbps=5.0, **ALONE), ALL_STEPS))


def test_a_layer_that_is_brought_costs_its_own_bytes(store):
    """The device counts bytes at a budget that keeps nothing of the layer."""
    server = device_planned_server(store, "100%", "on-demand", **ALONE)
    moved = []
    for layer in range(7):
        server.reset_stats()
        run_device_planned(server, [(1, layer, 1)])
        moved.append(server.stats().bytes_moved["demand"])
    sizes = [formats[4].nbytes for formats in EXPERTS.of_layers]
    assert moved == [EXPERTS.top_k * size for size in sizes]


def test_layers_of_which_none_has_the_usual_format():
    """A pipeline stage can have such layers, and so do the tests of kernels."""
    experts = EXPERTS.of_kind(1)
    assert (experts.layers, experts.formats[4].bits) == ((2,), 16)
    store = random_store(experts, MemoryWriter(experts), seed=1)
    want = run(with_budget(store, "100%", **ALONE), [(1, 0, 3)])
    assert equal(want, run(with_budget(store, "minimum", **ALONE), [(1, 0, 3)]))
    assert equal(want, run_device_planned(device_planned_server(store, "100%", **ALONE), [(1, 0, 3)]))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_every_kind_has_slots_of_its_own_size_for_the_same_share(store, share):
    server = make_server(store, f"{share:.0%}", **ALONE)
    plan, pool = server.slot_plan, server.cache.pools[Precision.HIGH]
    assert server.cache.budget.reserved <= plan.limit
    quotas = plan.quotas[Precision.HIGH]
    assert max(quotas) - min(quotas) <= 1
    for slot in pool.slots:
        assert slot.packed.numel() == EXPERTS.of_kinds[slot.kind][4].nbytes
    unused = plan.limit - server.cache.budget.reserved
    assert unused < max(fmt.nbytes for fmt in EXPERTS.all_formats), "what is left is less than a slot"


def test_files_hold_each_layer_in_its_own_format(tmp_path, store):
    writer = StoreWriter(tmp_path / "store", Manifest(EXPERTS, "rtn", "a model"))
    files = random_store(EXPERTS, writer, seed=1)
    assert FileStore(tmp_path / "store").experts == EXPERTS
    for key in all_keys(EXPERTS):
        assert torch.equal(read(files, key), store.packed(key)), key
    sizes = [path.stat().st_size for path in sorted((tmp_path / "store").glob("*.safetensors"))]
    assert sizes[0] < sizes[2] < sizes[1], "4, 8 and 16 bits"
    some = FileStore(tmp_path / "store", EXPERTS.layers[2:4])
    assert torch.equal(read(some, SliceKey(0, 5, 4)), store.packed(SliceKey(2, 5, 4)))


@pytest.mark.parametrize("part", [0, 0.4, 1])
def test_host_memory_holds_a_share_of_every_kind(tmp_path, store, part):
    files = random_store(EXPERTS, StoreWriter(tmp_path / "store", Manifest(EXPERTS, "rtn", "a model")), seed=1)
    least, whole = smallest_host_cache(EXPERTS), whole_host_cache(EXPERTS)
    host_cache = HostCache(files, max(least, int(part * whole)), None, None)
    if part == 1:
        host_cache.fill()
    want = run(with_budget(store, "100%", **ALONE), ALL_STEPS)
    server = make_server(host_cache, "25%", **ALONE)
    assert equal(want, run(server, ALL_STEPS))
    assert host_cache.slots.nbytes <= max(least, int(part * whole))
    if part == 1:
        assert host_cache.slots.nbytes == whole
    for key in all_keys(EXPERTS):
        assert torch.equal(read(host_cache, key), store.packed(key)), key
    host_cache.check_integrity()
    server.engine.close()
    host_cache.close()


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_draft_joins_in_its_own_format(tmp_path, in_memory):
    model = make_experts(layers=2, bits=(4,))
    draft = replace(make_experts(layers=1, bits=(4,)), own={1: replace(model.formats[4], encoding=PLAIN)})
    stores = []
    for name, experts in (("model", model), ("draft", draft)):
        files = random_store(experts, StoreWriter(tmp_path / name, Manifest(experts, "rtn", name)), seed=len(stores))
        stores.append(HostCache(files, whole_host_cache(experts), None, None) if in_memory else files)
        if in_memory:
            stores[-1].fill()
    packed = read(stores[1], SliceKey(0, 3, 4))
    joined = join(*stores)
    assert joined.experts.kinds == (0, 0, 1)
    assert torch.equal(read(joined, SliceKey(2, 3, 4)), packed)
    steps = [(seed, layer, tokens) for seed, layer, tokens in STEPS[:10]] + [(1, 2, 1), (2, 2, 7)]
    server = make_server(joined, "100%", **ALONE)
    want = run(server, steps)
    server.resize("40%")
    assert equal(want, run(server, steps))
    server.engine.close()
    joined.close()


def test_grids_of_other_bits_beside_each_other():
    """A layer at 8 bits among layers at 4, and the other way round."""
    for usual, other in ((4, 8), (8, 4)):
        plain = make_experts(layers=3, bits=(usual,))
        experts = replace(plain, own={2: replace(plain.formats[usual], encoding=GRIDS[other])})
        store = random_store(experts, MemoryWriter(experts), seed=2)
        given = {"high": usual, **ALONE}
        want = run(with_budget(store, "100%", **given), ALL_STEPS[:3])
        assert equal(want, run(with_budget(store, "minimum", **given), ALL_STEPS[:3]))
        assert equal(want, run_device_planned(device_planned_server(store, "50%", **given), ALL_STEPS[:3]))


def test_down_projections_in_a_format_of_their_own():
    """Down projections may have formats of their own.

    Other bits, floats, other groups, and the same bits with other zeros and another order are tried. One layer's
    down projections are like its gate and up. The CPU worker of a device tells layers apart.
    """
    plain = make_experts(layers=5, bits=(4,), num_experts=8, hidden=96, intermediate=64)
    usual = replace(plain.formats[4], down=DownFormat(GRIDS[8], 32))
    own = {
        1: replace(usual, down=None),
        2: replace(usual, encoding=NVFP4, down=DownFormat(FP8, 64)),
        3: replace(usual, down=DownFormat(GRIDS[4], 64, integer_zeros=True, act_order=True)),
        4: replace(usual, group_size=64, integer_zeros=True, down=DownFormat(GRIDS[4], 32)),
    }
    experts = replace(plain, formats={4: usual}, own=own)
    store = random_store(experts, MemoryWriter(experts), seed=4)
    steps = [(seed, layer, tokens) for seed, tokens in enumerate((1, 3, 40)) for layer in range(5)]
    want = run(with_budget(store, "100%", low=0), steps)
    for misses in ("fetch", "compute"):
        assert equal(want, run(with_budget(store, "minimum", low=0, misses=misses), steps))
        for budget in ("100%", "40%", "minimum"):
            server = device_planned_server(store, budget, low=0, misses=misses)
            assert equal(want, run_device_planned(server, steps)), (misses, budget)
            assert bool(server.stats().cpu_executed) == (misses == "compute" and budget != "100%")
            server.close(keep_store=True)
    for (seed, layer, tokens), got in zip(steps, want, strict=True):
        right = reference(store, layer, *random_step(seed, tokens, experts))
        assert (got.double() - right).norm() / right.norm() < 1e-2


def test_files_say_how_down_projections_are_packed(tmp_path):
    plain = make_experts(layers=2, bits=(4,))
    usual = replace(plain.formats[4], down=DownFormat(GRIDS[8], 32, integer_zeros=True))
    experts = replace(plain, formats={4: usual}, own={1: replace(usual, down=None, encoding=NVFP4)})
    files = random_store(experts, StoreWriter(tmp_path / "store", Manifest(experts, "rtn", "a model")), seed=1)
    assert FileStore(tmp_path / "store").experts == experts == files.experts
