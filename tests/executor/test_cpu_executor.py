"""One native call per layer gives the same bits as fetching by the plan.

The plan is the specification's, and all kinds of experts are tested.
"""

import pytest
import torch

from tests.executor.steps import BUDGETS, CPU, STEPS, ByNumber, forward, make_server, random_step
from tests.kernels.matrices import random_packed
from tests.small_model import make_experts, make_store
from tests.support.memory_writer import MemoryStore
from vllm_dymoe.cache.transfer import make_engine
from vllm_dymoe.experts.encoding import CODEBOOKS, E8, E8_NESTED, PLAIN
from vllm_dymoe.experts.encoding import STEPS as GRIDS
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, SliceKey, stored_formats
from vllm_dymoe.kernels import Activation, native
from vllm_dymoe.kernels.activation import Curve
from vllm_dymoe.planner.routing import PromptTokens, Routing, RoutingError
from vllm_dymoe.planner.table import check_integrity
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.dynaexq import DynaExq
from vllm_dymoe.policies.exact import Exact

pytestmark = pytest.mark.skipif(native.load() is None, reason="the native library was not built")

LAYERS, EXPERTS, TOP_K = 2, 6, 2
STORE, NESTED = (make_store(make_experts(layers=LAYERS, nested=nested)) for nested in (False, True))
MIXED = ByNumber(low=frozenset({0, 3}), skipped=frozenset({5}))


def both(store, budget="50%", policy=None, low=2, **options):
    """Return a server with the CPU executor, and one that fetches by the plan."""
    one_call = make_server(store, budget, policy and policy(), low, **options)
    stepwise = make_server(store, budget, policy and policy(), low, engine=make_engine(store, CPU, 0), **options)
    assert one_call.host_planned.cpu is not None
    assert stepwise.host_planned.cpu is None
    return one_call, stepwise


def same_tables(ours, theirs):
    for name in ("precision", "score", "used_at", "step"):
        ours_, theirs_ = getattr(ours.cache.table, name), getattr(theirs.cache.table, name)
        assert (ours_ == theirs_).all(), name


def check(ours, theirs, steps=STEPS, activation=Activation.SILU, **told):
    for seed, layer, tokens in steps:
        step = random_step(seed, tokens, ours.experts)
        got, want = (forward(server, layer, *step, activation, **told) for server in (ours, theirs))
        assert torch.equal(got, want), (seed, layer, tokens)
    same_tables(ours, theirs)
    ours.check_integrity()
    check_integrity(ours.cache.table)
    mine, others = ours.stats(), theirs.stats()
    for name in ("planned", "hits", "misses", "cpu_executed", "reuses", "promotions", "evictions", "bytes_moved"):
        assert getattr(mine, name) == getattr(others, name), name


@pytest.mark.parametrize("misses", ["compute", "fetch"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("store", [STORE, NESTED], ids=["versions", "nested"])
def test_every_budget_and_mixed_precisions(store, budget, misses):
    ours, theirs = both(store, "100%", lambda: MIXED, misses=misses)
    for server in (ours, theirs):
        server.resize(server.minimum_budget if budget == "minimum" else budget)
    check(ours, theirs)


@pytest.mark.parametrize("store", [STORE, NESTED], ids=["versions", "nested"])
@pytest.mark.parametrize("options", [{"retention": 0.5}, {"retention": 0.3, "high_by": "depth"},
                                     {"retention": 0.5, "skipped_weights": "renormalize"}])  # fmt: skip
@pytest.mark.parametrize("low", [0, 2])
def test_precision_by_importance(store, options, low):
    if low == 0 and store is NESTED:
        pytest.skip("a nested store has a low version")
    ours, theirs = both(store, "50%", lambda: Dymoe(**options), low, misses="compute")
    check(ours, theirs)
    if "high_by" not in options:
        mine, others = (server.policy.precision.thresholds for server in (ours, theirs))
        assert [t.tolist() for t in mine] == [t.tolist() for t in others]
    rows = torch.arange(40) % 3 > 0
    for seed in range(6):
        prompt = PromptTokens(rows, rows & (torch.arange(40) % 2 == 0), mixed=True)
        check(ours, theirs, [(seed, seed % 2, 40)], prompt=prompt)


@pytest.mark.parametrize("store", [STORE, NESTED], ids=["versions", "nested"])
def test_versions_that_move_between_steps(store):
    budget = "80%" if store is NESTED else 420_000
    ours, theirs = both(store, budget, lambda: DynaExq(window_s=0, window_uses=1))
    for seed, layer, tokens in STEPS:
        step = random_step(seed, tokens, ours.experts)
        held = ours.cache.table.precision.copy()
        got, want = (forward(server, layer, *step) for server in (ours, theirs))
        assert torch.equal(got, want) or (held != theirs.cache.table.precision).any()
        assert (ours.host_planned.migration.uses == theirs.host_planned.migration.uses).all()
    assert ours.stats().choices == theirs.stats().choices


def random_store(code, dtype=torch.bfloat16, low=None, **more):
    """Return a store of experts of any encoding, with valid random bytes."""
    hidden, inter = (128, 64) if code.lattice else (72, 40)
    make = {code.bits: code} | ({low: GRIDS[low]} if low else {})
    formats = stored_formats(tuple(make), lambda bits: ExpertFormat(hidden, inter, make[bits], 32, dtype, **more))
    if code is E8_NESTED:
        residual = ExpertFormat(hidden, inter, code, 32, dtype)
        formats = {4: residual, 2: residual.base}
    experts = ModelExperts(tuple(range(LAYERS)), EXPERTS, TOP_K, formats)
    store = MemoryStore(experts)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for bits, fmt in formats.items():
                if fmt.encoding.upper_of and not fmt.nested:
                    continue  # fetching the base also brings its residual slice
                for number, matrix in enumerate(fmt.matrices):
                    packed = random_packed(matrix, 100 * layer + 10 * expert + number)
                    parts = (
                        {bits: packed.weight} if not fmt.nested else {bits: packed.residual, bits // 2: packed.weight}
                    )
                    for width, part in parts.items():
                        section = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
                        where = experts.formats[width].sections[number]
                        store.packed(SliceKey(layer, expert, width))[where].copy_(section)
    return store


CODES = {"16": PLAIN, "8": GRIDS[8], "4": GRIDS[4], "2": GRIDS[2], "e8": E8, "e8+e8": E8_NESTED, **CODEBOOKS}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_encoding(name, dtype):
    code = CODES[name]
    store = random_store(code, dtype)
    low = 2 if code is E8_NESTED else 0
    ours, theirs = both(store, "50%", Exact, low, high=code.bits, misses="compute")
    check(ours, theirs)


@pytest.mark.parametrize("more", [{"bias": True}, {"integer_zeros": True}, {"act_order": True}])
def test_what_a_matrix_may_have_beside_its_codes(more):
    ours, theirs = both(random_store(GRIDS[4], **more), "50%", Exact, 0, misses="compute")
    check(ours, theirs)


def test_two_formats_in_one_step():
    ours, theirs = both(random_store(PLAIN, low=4), "60%", lambda: Dymoe(retention=0.5), 4, high=16, misses="compute")
    check(ours, theirs)


def test_activations_and_experts_without_a_gate():
    ours, theirs = both(STORE, "50%", Exact, 0, misses="compute")
    check(ours, theirs, activation=Activation.GELU_TANH)
    check(ours, theirs, activation=Activation(Curve.SWIGLU, limit=0.5, alpha=1.5, beta=0.5))
    with pytest.raises(ValueError, match="gate"):
        forward(ours, 0, *random_step(0, 1, ours.experts), Activation(Curve.RELU2, has_gate=False))
    ours, theirs = both(random_store(GRIDS[4], has_gate=False), "50%", Exact, 0, misses="compute")
    check(ours, theirs, activation=Activation(Curve.RELU2, has_gate=False))


@pytest.mark.parametrize("policy", [Exact, lambda: Dymoe(retention=0.5, skipped_weights="renormalize")])
def test_experts_of_other_ranks_and_weights_on_inputs(policy):
    ours, theirs = both(STORE, "50%", policy, 0, misses="compute")
    for seed, layer, tokens in STEPS:
        x, weights, ids = random_step(seed, tokens, ours.experts)
        ids = torch.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.3, -1, ids)
        for on_input in (False, True):
            told = {"weights_on_input": on_input}
            got, want = (forward(server, layer, x, weights, ids.int(), **told) for server in (ours, theirs))
            assert torch.equal(got, want)
            got = forward(ours, layer, x, weights, ids.long(), **told)
            want = forward(theirs, layer, x, weights, ids.long(), **told)
            assert torch.equal(got, want), "ids of 64 bits"
    same_tables(ours, theirs)


def test_ranks_that_share_out_experts_agree_with_the_host():
    """The native call receives versions that were chosen for the experts of all ranks."""
    ours, theirs = both(STORE, "50%", lambda: Dymoe(retention=0.3), misses="compute")
    for seed, layer, tokens in STEPS:
        x, weights, ids = random_step(seed, tokens, ours.experts)
        here = torch.where(ids % 2 == 0, ids // 2, -1)
        planned = [server.stats().planned for server in (ours, theirs)]
        got, want = (
            server.host_planned.forward(Routing(layer, LAYERS, x, here, weights, global_ids=ids))
            for server in (ours, theirs)
        )
        assert torch.equal(got, want)
        assert planned[0] == planned[1]
    same_tables(ours, theirs)


def test_tensors_that_are_views_and_a_prompt_larger_than_the_scratch():
    ours, theirs = both(STORE, "50%", Exact, 0, misses="compute")
    x, weights, ids = random_step(3, 3000, ours.experts)
    large = torch.full((3000, 2 * TOP_K), float("nan")), torch.full((3000, 2 * TOP_K), 7777, dtype=torch.int32)
    large[0][:, ::2], large[1][:, ::2] = weights, ids
    got = forward(ours, 0, x, large[0][:, ::2], large[1][:, ::2])
    assert torch.equal(got, forward(theirs, 0, x, weights, ids))
    check(ours, theirs)


def test_a_number_that_is_no_expert_is_refused_and_the_next_step_is_served():
    ours, theirs = both(STORE, "50%", Exact, 0, misses="compute")
    x, weights, ids = random_step(0, 2, ours.experts)
    for wrong in (EXPERTS, 65536 + 1):
        bad = ids.clone()
        bad[1, 0] = wrong
        with pytest.raises(RoutingError) as raised:
            forward(ours, 0, x, weights, bad)
        assert (raised.value.layer, raised.value.expert) == (0, wrong)
    check(ours, theirs)


def test_made_up_tokens_are_neither_counted_nor_learnt_from():
    ours, _ = both(NESTED, "80%", lambda: DynaExq(window_s=0, window_uses=1))
    before = ours.stats().to_dict()
    with ours.host_planned.unobserved():
        for layer in range(LAYERS):
            forward(ours, layer, *random_step(layer, 5, ours.experts))
    after = ours.stats().to_dict()
    assert {k: v for k, v in after.items() if k != "window_age_seconds"} == {
        k: v for k, v in before.items() if k != "window_age_seconds"
    }
    assert not ours.host_planned.migration.uses.any()


def test_actions_are_recorded():
    ours, theirs = both(STORE, "50%", lambda: Dymoe(retention=0.5), misses="compute")
    for server in (ours, theirs):
        server.serve(server.options.model_copy(update={"trace": object()}), server.policy)
    for seed, layer, tokens in STEPS:
        found = []
        for server in (ours, theirs):
            x, weights, ids = random_step(seed, tokens, server.experts)
            routing = Routing(layer, LAYERS, x, ids, weights)
            server.host_planned.forward(routing)
            found.append(routing.actions.tolist())
        assert found[0] == found[1]
