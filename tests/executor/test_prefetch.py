"""A predictor in a server: counted, called in time, and harmless when wrong."""

import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.errors import refused
from tests.executor.steps import ByNumber, forward, kept_by, random_step, run, with_budget
from tests.small_model import make_experts, make_store
from vllm_dymoe.options import Options
from vllm_dymoe.prefetch import Candidate, Predictor
from vllm_dymoe.prefetch.popularity import Popularity
from vllm_dymoe.server import ExpertServer

LAYERS = 4
STORE = make_store(make_experts(layers=LAYERS))
FORMAT = STORE.experts.formats[4]
LINK = FORMAT.nbytes / 1e-3 / 1e9  # an expert takes a millisecond
STEPS = [(seed, seed % LAYERS, 1) for seed in range(96)]


class Adversary(Predictor):
    nbytes = property(lambda self: self._nbytes)

    def __init__(self, nbytes=0):
        self._nbytes = nbytes
        self._random = random.Random(0)
        self._step = 0

    def observe(self, routing):
        self._step += 1

    def predict(self, layer):
        if layer + 1 == LAYERS or self._step == len(STEPS):
            return []
        seed, following, tokens = STEPS[self._step]
        assert following == layer + 1
        wanted = set(random_step(seed, tokens, STORE.experts)[2].flatten().tolist())
        wrong = [expert for expert in range(6) if expert not in wanted] * 2
        self._random.shuffle(wrong)
        return [Candidate(following, expert) for expert in wrong]


@pytest.mark.parametrize("budget", ["25%", "50%"])
def test_naming_only_what_is_not_wanted_changes_neither_values_nor_the_cache_nor_demand(budget):
    def served(predictor):
        server = with_budget(STORE, budget, ByNumber(staging=3), predictor=predictor, link_gbps=LINK, planning="host")
        kept = []
        outputs = []
        for step in STEPS:
            outputs += run(server, [step])
            kept.append(kept_by(server))
        server.engine.close()
        return outputs, kept, server.stats()

    outputs, kept, alone = served(None)
    wrong_outputs, wrong_kept, beside = served(Adversary())
    assert all(torch.equal(a, b) for a, b in zip(outputs, wrong_outputs, strict=True))
    assert kept == wrong_kept
    assert (beside.hits, beside.misses, beside.evictions) == (alone.hits, alone.misses, alone.evictions)
    assert beside.bytes_moved["demand"] == alone.bytes_moved["demand"]
    assert beside.prefetches["useful"] == beside.prefetches["late"] == 0
    assert beside.prefetches["wasted"] + beside.prefetches["cancelled"] >= 32, "it was not tried"
    assert beside.prefetch_interval["decode"] > 1, "and it is still trusted"


class Names(Predictor):
    """A predictor that names one expert; the test sets the size of its weights."""

    nbytes = property(lambda self: self._nbytes)

    def __init__(self, nbytes=0, later=False, log=None):
        super().__init__(SimpleNamespace(answers_later=later))
        self._nbytes, self._log = nbytes, log if log is not None else []

    def observe(self, routing):
        self._log.append(f"observe {routing.layer}")

    def begin(self, layer):
        assert self.answers_later
        self._log.append(f"begin {layer}")

    def predict(self, layer):
        self._log.append(f"predict {layer}")
        return [Candidate(layer + 1, 0)] if layer + 1 < LAYERS else []


@pytest.mark.parametrize("later", [False, True])
def test_what_computes_on_a_side_stream_is_read_when_experts_compute(later):
    log = []
    server = with_budget(STORE, "100%", predictor=Names(later=later, log=log), link_gbps=LINK, planning="host")
    compute = server.kernel.compute

    def logged(*arguments):
        log.append("compute")
        return compute(*arguments)

    server.kernel.compute = logged
    begin = time.perf_counter()
    run(server, [(0, 0, 1)] * 3)
    assert 0 < server.stats().prediction_seconds < time.perf_counter() - begin
    server.engine.close()
    first = log[: 1 + log.index("compute")]
    assert first == ["observe 0", "begin 0" if later else "predict 0", "compute"]
    assert log.count("predict 0") == 3, "once in each step, also where its experts are there"


def test_its_memory_is_part_of_the_budget():
    def slots(nbytes, budget):
        server = with_budget(STORE, budget, predictor=Names(nbytes), link_gbps=LINK, planning="host")
        stats = server.stats()
        assert stats.predictor_bytes == nbytes
        assert server.budget.reserved == server.kernel.workspace_bytes + nbytes + stats.slots["high"] * FORMAT.nbytes
        assert server.budget.reserved <= stats.budget_bytes
        return stats.slots["high"]

    of_bytes = with_budget(STORE, "50%").budget.limit
    assert slots(2 * FORMAT.nbytes, of_bytes) == slots(0, of_bytes) - 2  # a budget in bytes includes the predictor
    assert slots(2 * FORMAT.nbytes, "50%") == slots(0, "50%")  # a budget as a share counts only experts
    assert slots(2 * FORMAT.nbytes, "top-k") == STORE.experts.top_k
    with refused(option="expert_budget"):
        slots(10**9, of_bytes)


def test_training_and_what_it_makes_are_in_the_budget_from_the_start():
    options = Options(high=4, low=2, group_size=32, expert_budget="50%", link_gbps=LINK, planning="host")
    room = {"training_bytes": 3 * FORMAT.nbytes, "predictor_room": FORMAT.nbytes}
    plain = ExpertServer(STORE, options, torch.device("cpu"), predictor=Names())
    server = ExpertServer(STORE, options, torch.device("cpu"), predictor=Names(), **room)
    assert server.overhead == plain.overhead + 4 * FORMAT.nbytes
    assert server.slot_plan.slots == plain.slot_plan.slots, "a share counts experts"
    run(server, STEPS[:8])
    before, slots = server.stats(), server.cache.pools
    log = []
    server.use_predictor(Names(FORMAT.nbytes, log=log))
    run(server, STEPS[:8])
    after = server.stats()
    assert log, "it is not asked"
    assert server.cache.pools is slots, "slots are what they were"
    assert after.predictions["predicted"] > before.predictions["predicted"] > 0, "counts go on"
    assert server.overhead == plain.overhead + 4 * FORMAT.nbytes
    server.resize("60%")
    server.check_integrity()
    server.engine.close(), plain.engine.close()


def test_where_nobody_asks_what_was_trained_is_not_taken():
    server = with_budget(STORE, "50%", predictor=Names(10))
    assert server.unasked
    server.use_predictor(Names(10))
    assert server.predictor is None
    assert server.stats().predictor_bytes == 0


def test_what_was_computed_to_warm_up_is_not_counted():
    x, weights = torch.randn(512, STORE.experts.formats[4].hidden).bfloat16(), torch.full((512, 2), 0.5)

    def favourites(ids, warm):
        predictor = Popularity(LAYERS, STORE.experts.num_experts, decode_experts=2)
        server = with_budget(STORE, "100%", ByNumber(staging=3), predictor=predictor, link_gbps=LINK, planning="host")
        for layer in range(LAYERS):
            if warm and layer in (0, 2):  # before a request, and between two requests
                before = server.stats()
                with server.host_planned.unobserved():
                    for other in range(LAYERS):
                        forward(server, other, x, weights, torch.tensor([[0, 1]]).expand(512, -1).int())
                after = server.stats()
                assert replace(after, resident_experts={}) == replace(before, resident_experts={})
                assert after.resident_experts["high"] >= 2 * LAYERS, "it was not computed"
            forward(server, layer, x[:1], weights[:1], torch.tensor([ids]).int())
        assert server.stats().planned["high"] == 2 * LAYERS
        server.engine.close()
        return predictor.predict(0)

    assert favourites([4, 5], warm=True) == favourites([4, 5], warm=False) != []


@pytest.mark.parametrize("budget", ["100%", "50%"])
def test_hits_of_a_layer_are_counted_when_its_predictor_hears_of_it(budget):
    """FIRM-MoE Eq. 11 counts what the layer found on the device.

    It does not count what the layer before it left there.
    """
    heard = []

    class Hears(Names):
        def observe(self, routing):
            counts = server.host_planned.counts
            heard.append(counts.hits + counts.misses)

    server = with_budget(STORE, budget, predictor=Hears(), link_gbps=LINK, planning="host")
    x, weights, ids = random_step(0, 1, STORE.experts)
    for _ in range(3):  # from the second time on all are resident
        forward(server, 0, x, weights, ids)
    assert heard == [number * ids.numel() for number in (1, 2, 3)]
