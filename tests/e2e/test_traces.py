"""Recording in a real engine: a trace holds the routers' choices.

Each has to be recorded with the right request and position.
"""

import pytest
import torch
from vllm import SamplingParams

from tests.e2e.engines import MODEL, engine, next_gate_accuracy, prompts, server_of
from vllm_dymoe import record_trace
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.trace.trace import Trace
from vllm_dymoe.vllm_plugin import offline
from vllm_dymoe.vllm_plugin.observers import Observer

pytestmark = pytest.mark.engine

LAYERS = 8


@pytest.fixture(scope="module", params=[{}, {"host_store": "pinned", "link_gbps": 8.0}], ids=["CPU", "emulated card"])
def planned(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, planned):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def llm(folder, planned):
    # Prompts are longer than a step, and the KV cache is too small for all requests at once.
    options = {"high": 4, "trace": {"folder": str(folder), "inputs": True}} | planned
    settings = {"max_num_batched_tokens": 48, "enable_prefix_caching": True}
    with engine(dymoe=options, **settings) as llm:
        yield llm


class Watched(Observer):
    """Keeps what a trace receives, in order."""

    needs_actions = True

    def __init__(self):
        self.layers = []

    def see(self, routing):
        self.layers.append(
            (routing.layer, routing.x.clone(), routing.weights.clone(), routing.ids.clone(), routing.actions)
        )


def tokens_of(llm, folder, before=0):
    (report,) = llm.collective_rpc("dymoe_trace")
    trace = Trace.load(folder)
    assert report["tokens"] == trace.num_tokens
    assert report["recording"]
    return trace.select(torch.arange(before, trace.num_tokens))


def test_everything_is_recorded_of_requests_in_chunks_and_side_by_side(llm, folder, planned):
    model, watched = llm.llm_engine.model_executor.driver_worker.worker.vllm_config.quant_config, Watched()
    assert (model.loaded_model().server.small_batches is not None) == bool(planned), "the device plans"
    observation = model.loaded_model().observation
    (before,) = llm.collective_rpc("dymoe_trace")
    observation.join(watched)
    texts = [prompts()[0] * 12, prompts()[6], prompts()[11] * 8, prompts()[1], prompts()[7] * 3]
    requests, lengths, steps = llm.llm_engine, {}, 0
    for number, text in enumerate(texts):  # each arrives while earlier ones are computed
        requests.add_request(f"request {number}", text, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        requests.step()
    while requests.has_unfinished_requests():
        for output in requests.step():
            if output.finished:
                lengths[output.request_id] = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        steps += 1
    observation.leave(watched)
    trace = tokens_of(llm, folder, before["tokens"])
    assert any(length > 48 for length, _ in lengths.values()), "no prompt had to be cut"

    # The routers' choices, layer by layer. A CPU has no padding rows after a step's tokens.
    for layer in range(LAYERS):
        heard = [of_layer for at, *of_layer in watched.layers if at == layer]
        inputs, weights, ids, actions = (torch.cat(parts) for parts in zip(*heard, strict=True))
        assert torch.equal(trace.router_inputs[:, layer], inputs.half())
        assert torch.equal(trace.weights[:, layer], weights.half())
        assert torch.equal(trace.experts[:, layer], ids.byte())
        assert torch.equal(trace.fates[:, layer], actions)

    # Every token of every request occurs once, except the last, which is never computed.
    of_requests = list(trace.by_request())
    for number, rows in enumerate(of_requests):
        prompt, answer = lengths[f"request {number}"]
        assert trace.position[rows].tolist() == list(range(prompt + answer - 1))
        assert trace.prefill[rows].tolist() == [True] * prompt + [False] * (answer - 1)
    assert trace.num_tokens == sum(prompt + answer - 1 for prompt, answer in lengths.values())

    # A request that runs alone chooses the same experts, except where two are nearly tied.
    llm.reset_prefix_cache()
    llm.generate(texts[2], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    alone = tokens_of(llm, folder, before["tokens"] + trace.num_tokens)
    other, _, together, *_ = (trace.select(rows[: alone.num_tokens]) for rows in of_requests)
    assert torch.equal(alone.position, together.position)
    assert agreement(alone, together) > 0.9
    assert agreement(alone, other) < 0.6


def agreement(ours, theirs):
    tokens = torch.arange(min(ours.num_tokens, theirs.num_tokens))
    ours, theirs = ours.select(tokens), theirs.select(tokens)
    return (ours.experts[:, :, :, None] == theirs.experts[:, :, None, :]).any(-1).float().mean().item()


def test_the_header_is_the_models_and_the_gates_are_known(llm, folder):
    trace = Trace.load(folder)
    header = trace.header
    assert (header.num_layers, header.num_experts, header.top_k, header.hidden) == (LAYERS, 32, 4, 256)
    assert header.fingerprint == Checkpoint.open(MODEL).fingerprint()
    accuracy = next_gate_accuracy(trace)
    assert accuracy[1:].min() > 0.6
    assert accuracy[1:].mean() > accuracy[0]
    inputs = trace.router_inputs[:, 1:].float()
    alike = torch.cosine_similarity(inputs[:, :-1], inputs[:, 1:], dim=-1).mean(0)
    assert alike.min() > 0.3
    assert alike.max() < 1


def test_what_the_prefix_cache_has_is_not_computed_and_preempted_requests_are(llm, folder):
    llm.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    text = prompts()[0] * 12
    before = tokens_of(llm, folder).num_tokens
    llm.generate(text, sampling, use_tqdm=False)
    first = tokens_of(llm, folder, before)
    llm.generate(text, sampling, use_tqdm=False)
    second = tokens_of(llm, folder, before + first.num_tokens)
    assert first.position[0] == 0
    assert 0 < second.position[0] < first.position[-1]
    assert second.position.tolist() == list(range(int(second.position[0]), int(first.position[-1]) + 1))
    assert second.request.unique().tolist() == [int(first.request[0]) + 1]

    requests = llm.llm_engine
    before = tokens_of(llm, folder).num_tokens
    requests.add_request("again", prompts()[1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for _ in range(5):
        requests.step()
    scheduler = requests.engine_core.engine_core.scheduler
    scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts all running requests
    while requests.has_unfinished_requests():
        (output,) = requests.step() or [None]
    length = len(output.prompt_token_ids) + 12 - 1
    trace = tokens_of(llm, folder, before)
    assert trace.request.unique().numel() == 1
    assert trace.num_tokens > length, "it was not computed again"
    (rows,) = trace.by_request()
    assert trace.position[rows].tolist() == list(range(length))
    assert trace.prefill[rows].sum() == len(output.prompt_token_ids)
    server_of(llm).check_integrity()


def test_prompts_are_recorded(llm, folder, monkeypatch):
    """Record prompts with the running engine, given the settings of a new one."""
    started, before = [], tokens_of(llm, folder).num_tokens
    monkeypatch.setattr(offline, "LLM", lambda **settings: started.append(settings) or llm)
    texts = [prompts()[0], prompts()[6], prompts()[2]]
    llm.reset_prefix_cache()
    report = record_trace(MODEL, texts, folder, max_tokens=5, options={"high": 4}, engine={"max_model_len": 512})
    trace = {"folder": str(folder), "limit": "256MiB", "inputs": False}
    assert started == [
        {
            "model": MODEL,
            "quantization": "dymoe",
            "additional_config": {"dymoe": {"high": 4, "trace": trace}},
            "enable_prefix_caching": False,
            "max_model_len": 512,
        }
    ]
    recorded = tokens_of(llm, folder, before)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert report == {
        "folder": str(folder), "tokens": before + recorded.num_tokens, "recording": True, "bytes": size,
    }  # fmt: skip
    assert (~recorded.prefill).sum() == 3 * 4
    lengths = [len(llm.get_tokenizer()(text).input_ids) for text in texts]
    assert [int(recorded.prefill[rows].sum()) for rows in recorded.by_request()] == lengths
