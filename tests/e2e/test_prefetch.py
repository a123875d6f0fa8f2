"""Prefetching in a real engine: predictions are good, and change nothing but time."""

import functools
import time
from unittest import mock

import pytest
import torch
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner
from vllm.model_executor.models import qwen3_moe

from tests.e2e.engines import MODEL, answer, engine, prompts, recorded_layers, same_bits, server_of
from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.cli import app
from vllm_dymoe.prefetch import TrainedPredictor
from vllm_dymoe.prefetch.checkpoint import load_predictor
from vllm_dymoe.prefetch.gate import FAR
from vllm_dymoe.prefetch.next_gate import NextGate
from vllm_dymoe.prefetch.popularity import Popularity
from vllm_dymoe.prefetch.tuner import Heop, Setting
from vllm_dymoe.trace.trace import Trace
from vllm_dymoe.vllm_plugin import gates
from vllm_dymoe.vllm_plugin.metrics import Statistics

pytestmark = pytest.mark.engine

BUDGET = "25%"


# At this rate the shipped model's experts take about a millisecond each, so there is time to hide: on a CPU from a
# disk, and on an emulated card over its link.
OPTIONS = {"high": 4, "expert_budget": BUDGET, "misses": "fetch", "host_store": "file", "disk_gbps": 0.03}
ON_DEVICE = {"high": 4, "expert_budget": BUDGET, "host_store": "pinned", "link_gbps": 0.03}


@pytest.fixture(scope="module", autouse=True)
def _disk_takes_no_core():
    """Make the store one that is read past the page cache.

    Where reads are copies by a core, nothing is prefetched.
    """
    with mock.patch.object(FileStore, "occupies_cores", new=False):
        yield


@pytest.fixture(scope="module")
def firm():
    with engine(dymoe=OPTIONS | {"policy": "firm"}) as llm:
        yield llm


def answered(llm):
    """Return tokens, layers' outputs and statistics, starting with an empty cache."""
    server = server_of(llm)
    server.resize(BUDGET)
    server.reset_stats()
    with recorded_layers(server) as layers:
        answers = [answer(llm, [text], max_tokens=24)[0] for text in prompts()[:3]]
    server.check_integrity()
    return [a.tokens for a in answers], layers, server.stats()


def test_what_is_foreseen_changes_no_bit_and_is_mostly_right(firm):
    server = server_of(firm)
    meeting = server.predictor
    setting = meeting.predictor._tuner.setting(1)
    tuner = Heop(8, setting, Setting(8, 3), update_every=2, rounds=4)
    meeting.predictor._tuner = tuner
    tokens, layers, stats = answered(firm)
    # Measured: 0.74 for the voting gates while they are tuned, 0.77 for the next gate. Chance would be an eighth.
    assert stats.predictions["correct"] / stats.predictions["predicted"] > 0.6
    assert stats.prefetches["useful"] + stats.prefetches["late"] > stats.prefetches["wasted"]
    assert tuner.settled

    server.predictor = type(meeting)(NextGate(meeting.predictor._gates, top_k=4))
    next_tokens, next_layers, stats = answered(firm)
    assert stats.predictions["correct"] / stats.predictions["needed"] > 0.6
    assert stats.prefetches["useful"] > 0

    server.predictor = None
    plain_tokens, plain_layers, stats = answered(firm)
    assert sum(stats.prefetches.values()) == 0
    assert tokens == next_tokens == plain_tokens
    assert same_bits(layers, plain_layers)
    assert same_bits(next_layers, plain_layers)
    server.predictor = meeting


ODD = 5  # the layer whose router is not its gate


def runners_up(hidden_states, gating_output, topk, renormalize):
    weights, ids = gating_output.float().softmax(-1).topk(topk + 1)
    return weights[:, 1:] / weights[:, 1:].sum(-1, keepdim=True), ids[:, 1:].int()


@pytest.fixture
def odd_router(monkeypatch):
    name = "FusedMoEFactory" if hasattr(qwen3_moe, "FusedMoEFactory") else "FusedMoE"
    make = getattr(qwen3_moe, name)

    @functools.wraps(make)
    def made(*args, prefix, **settings):
        own = {"custom_routing_function": runners_up} if f".layers.{ODD}." in prefix else {}
        return make(*args, prefix=prefix, **settings, **own)

    monkeypatch.setattr(qwen3_moe, name, made)


def test_a_router_that_is_more_than_its_gate_is_served_without_the_gate(odd_router, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(gates.logger, "warning", lambda sentence, *values: said.append(sentence % values))
    with engine(dymoe=OPTIONS | {"trace": {"folder": str(tmp_path), "inputs": True}}) as llm:
        server = server_of(llm)
        by_gates = server.predictor
        assert by_gates is not None
        first = [a.tokens for a in answer(llm, prompts()[:3], max_tokens=12)]
        server.check_integrity()

        # Earlier layers used their gates once, in the step that revealed the odd router.
        assert server.predictor is None
        named = by_gates.stats.predicted
        assert named > 0
        (sentence,) = said
        assert sentence.startswith(
            'vllm-dymoe: policy "exact" prefetches nothing, because the gate that was found for '
            f"model.layers.{ODD}.mlp.experts makes only "
        )
        assert sentence.endswith("% of vLLM's choices; experts are fetched when their router chooses them.")

        server.resize("100%")
        assert [a.tokens for a in answer(llm, prompts()[:3], max_tokens=12)] == first
        assert by_gates.stats.predicted == named
        (report,) = llm.collective_rpc("dymoe_trace")
    trace = Trace.load(tmp_path)
    assert trace.num_tokens == report["tokens"] == trace.in_order().numel()
    assert trace.num_requests == 6
    assert trace.next_gate is None
    assert trace.router_inputs is not None


def test_what_is_trained_on_a_trace_foresees_more_than_popularity(tmp_path):
    traces, file = tmp_path / "traces", tmp_path / "predictor.safetensors"
    with engine(dymoe=OPTIONS | {"policy": "duoserve", "trace": str(traces)}) as llm:
        assert isinstance(server_of(llm).predictor.predictor, Popularity), "until there is a predictor"
        answer(llm, prompts()[2:], max_tokens=32)
        tokens, layers, popular = answered(llm)
        llm.collective_rpc("dymoe_trace")
    command = ["train", str(traces), "--out", str(file), "--architecture", "linear", "--epochs", "6"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    with engine(dymoe=OPTIONS | {"policy": "duoserve", "predictor": str(file)}) as llm:
        begin = time.perf_counter()
        new_tokens, new_layers, trained = answered(llm)
        seconds = time.perf_counter() - begin
    assert new_tokens == tokens
    assert same_bits(new_layers, layers)

    def utilisation(stats):  # FIRM-MoE Eq. 8; popularity predicts nearly all experts of a prompt's first layer
        return stats.predictions["correct"] / stats.predictions["predicted"]

    assert utilisation(trained) > utilisation(popular), (trained.predictions, popular.predictions)
    assert trained.predictor_bytes == load_predictor(file)[1].nbytes * 2  # float32 on a CPU, float16 in the file
    assert trained.predictor_bytes < trained.peak_expert_bytes <= trained.budget_bytes
    assert 0 < trained.prediction_seconds < seconds


def pieces(count):
    """Return pieces of the held-out texts, taken from the texts in turns."""
    texts = [path.read_text() for path in sorted((MODEL / "heldout").glob("*.txt"))]
    return [texts[n % 3][1000 * (n // 3) :][:200] for n in range(count)]


def metric(registry, name, **labels):
    return registry.get_sample_value(f"vllm_dymoe_{name}_total", {"model_name": "tiny", "rank": "0"} | labels)


def test_tracing_training_and_serving_as_in_the_docs(tmp_path):
    """A predictor trained from a trace, and one trained while the same steps run.

    Both save time and change no token.
    """
    traces, file, own = tmp_path / "traces", tmp_path / "predictor.safetensors", tmp_path / "own.safetensors"
    options = {**OPTIONS, "disk_gbps": 0.3, "policy_options": {"look_ahead": 2}}
    recorded = options | {"trace": {"folder": str(traces), "inputs": True}, "train_predictor": str(own)}
    with engine(dymoe=recorded) as llm:
        server = server_of(llm)
        assert isinstance(server.predictor.predictor, NextGate), "until one is trained"
        before = server.overhead
        for first in range(0, 48, 16):
            answer(llm, pieces(48)[first : first + 16], max_tokens=64)
        trained = server.predictor.predictor
        assert isinstance(trained, TrainedPredictor)
        assert server.overhead == before, "there was room for it from the start"
        server.resize(BUDGET)
        tokens, layers, stats = answered(llm)
        assert stats.predictions["correct"] / stats.predictions["needed"] > 0.6
        (report,) = llm.collective_rpc("dymoe_predictor")
        assert report["written"]
        assert report["asked"]
        assert report["accuracy"] > report["next_gate"] > 0.6
        llm.collective_rpc("dymoe_trace")
    found = load_predictor(own)[1]
    assert torch.equal(found.gates, trained.network.gates.half())
    assert found.look_ahead == FAR, "experts lie in files"

    result = CliRunner().invoke(app, ["train", str(traces), "--out", str(file)])
    assert result.exit_code == 0, result.output
    card = ON_DEVICE | {"link_gbps": 0.3, "policy_options": {"look_ahead": 2}}
    for given in (options, card):
        with engine(dymoe=given | {"predictor": str(file)}) as llm:
            server = server_of(llm)
            assert (server.small_batches is None) == (given is options)
            new_tokens, new_layers, stats = answered(llm)
            registry = CollectorRegistry()
            Statistics("tiny", registry).publish(llm.collective_rpc("dymoe_stats"))
            network = server.predictor.predictor.network
            assert network.look_ahead == (FAR if given is options else 2)
            assert stats.predictor_bytes - network.nbytes in range(8192), "float32 here, float16 in the file"
        assert new_tokens == tokens
        assert same_bits(new_layers, layers)
        for kind in ("predicted", "needed", "correct"):
            assert metric(registry, "predictions", kind=kind) == stats.predictions[kind] > 0
        assert metric(registry, "prefetches", outcome="useful") == stats.prefetches["useful"] > 0
        assert metric(registry, "transfers", reason="prefetch") > 0
        assert stats.predictions["correct"] / stats.predictions["needed"] > 0.6


def test_a_device_asks_the_network_that_is_trained_meanwhile(tmp_path):
    """It does from the start: a captured graph cannot be given another predictor.

    Before it is trained it is the gate.
    """
    with engine(dymoe=ON_DEVICE | {"link_gbps": 0.3, "train_predictor": str(tmp_path / "own.safetensors")}) as llm:
        server = server_of(llm)
        predictor = server.predictor.predictor
        assert isinstance(predictor, TrainedPredictor)
        before = server.overhead
        tokens, layers, stats = answered(llm)
        assert stats.predictions["correct"] / stats.predictions["needed"] > 0.6, "the next gate is"
        for first in range(0, 48, 16):
            answer(llm, pieces(48)[first : first + 16], max_tokens=64)
        (report,) = llm.collective_rpc("dymoe_predictor")
        assert report["accuracy"] > report["next_gate"] > 0.6
        assert server.predictor.predictor is predictor
        assert server.overhead == before
        new_tokens, new_layers, trained = answered(llm)
        assert new_tokens == tokens
        assert same_bits(new_layers, layers)

    def accuracy(stats):
        return stats.predictions["correct"] / stats.predictions["needed"]

    assert accuracy(trained) > accuracy(stats)


def test_several_gates_vote_on_a_device():
    with engine(dymoe=ON_DEVICE | {"policy": "firm"}) as llm:
        server = server_of(llm)
        tuner = server.predictor.predictor._tuner
        tokens, layers, stats = answered(llm)
        assert stats.predictions["correct"] / stats.predictions["predicted"] > 0.6
        assert stats.prefetches["useful"] > 0
        assert any(group.rounds for group in tuner._groups), "HEOP was not told"
        server.resize("100%")
        server.reset_stats()
        with recorded_layers(server) as plain_layers:
            plain = [answer(llm, [text], max_tokens=24)[0].tokens for text in prompts()[:3]]
        assert server.stats().bytes_moved["prefetch"] == 0
    assert plain == tokens
    assert same_bits(plain_layers, layers)
