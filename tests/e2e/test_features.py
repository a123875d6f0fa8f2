"""vLLM's own features with the plugin, compared with the plugin's plain answers.

A feature that groups tokens in another way also takes sums in another order, as in vLLM itself. There the answers have
to meet vLLM's logprobs-close criterion and to share most tokens.
"""

import contextlib
import os
import shutil

import pytest
import torch
from vllm import SamplingParams

from tests.e2e.engines import (
    MODEL,
    Answer,
    answer,
    check_logprobs_close,
    engine,
    equal_share,
    in_own_process,
    prompts,
    recorded_layers,
    server_of,
)
from tests.executor.steps import forward
from vllm_dymoe.kernels import native

pytestmark = pytest.mark.engine

OPTIONS = {"high": 4, "expert_budget": "25%"}


def long_prompts():
    """Return four prompts of at least 150 tokens; the last repeats the first."""
    texts = ["\n".join(prompts()[i : i + 5]) for i in (0, 5, 10)]
    return [*texts, texts[0]]


@pytest.fixture(scope="module")
def plain():
    with engine(dymoe=OPTIONS) as llm:
        yield llm
        server_of(llm).check_integrity()


@pytest.fixture(scope="module")
def plain_answers(plain):
    return answer(plain, prompts())


@pytest.fixture(scope="module")
def long_answers(plain):
    return answer(plain, long_prompts())


@pytest.fixture(scope="module")
def crowded():
    """An engine with chunked prefill, prefix caching and a small KV cache.

    Chunks have 48 tokens; the KV cache has 20 blocks of 32 tokens.
    """
    settings = {
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 48,
        "block_size": 32,
        "num_gpu_blocks_override": 20,
    }
    with engine(dymoe=OPTIONS, **settings) as llm:
        yield llm
        server_of(llm).check_integrity()


@contextlib.contextmanager
def counted_tokens(llm):
    """Collect the number of tokens of every step, as the first MoE layer sees them."""
    steps = []
    with recorded_layers(server_of(llm)) as layers:
        yield steps
    steps += [len(out) for out in layers[:: len(server_of(llm).experts.layers)]]


def check_same_text(ours, theirs):
    check_logprobs_close(ours, theirs)
    assert equal_share(ours, theirs) >= 0.97


def sampled(llm, text, **settings):
    (output,) = llm.generate([text], SamplingParams(ignore_eos=True, **settings), use_tqdm=False)
    return output


def test_a_cached_prefix_gives_the_same_answer(crowded, long_answers):
    text = long_prompts()[1]
    first = answer(crowded, [text])
    with counted_tokens(crowded) as steps:
        again = answer(crowded, [text])
    length = len(crowded.get_tokenizer()(text).input_ids)
    assert sum(steps) < length, "the prefix was computed again"
    check_same_text(again, first)
    check_same_text(first, long_answers[1:2])


def test_a_prompt_in_chunks_gives_the_same_answer(crowded, long_answers):
    crowded.reset_prefix_cache()
    with counted_tokens(crowded) as steps:
        answers = [answer(crowded, [text])[0] for text in long_prompts()[:3]]
    assert max(steps) == 48
    tokenizer = crowded.get_tokenizer()
    assert steps.count(48) == sum(len(tokenizer(text).input_ids) // 48 for text in long_prompts()[:3]) > 3
    check_same_text(answers, long_answers[:3])


def test_preempted_requests_give_the_same_answers(crowded, plain):
    crowded.reset_prefix_cache()
    scheduler = crowded.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counted(request, *rest, **more):
        preempted.append(request.request_id)
        return preempt(request, *rest, **more)

    scheduler._preempt_request = counted
    try:
        answers = answer(crowded, prompts(), max_tokens=96)
    finally:
        del scheduler._preempt_request
    assert preempted, "the KV cache was large enough for every request"
    check_same_text(answers, answer(plain, prompts(), max_tokens=96))


def test_an_aborted_request_leaves_the_others_as_they_are(plain, plain_answers):
    """An abort does not change other answers, and leaves no expert pinned.

    Every second request is aborted, one per step.
    """
    llm_engine = plain.llm_engine
    settings = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=5)
    for number, text in enumerate(prompts()):
        llm_engine.add_request(str(number), text, settings)
    finished, step = {}, 0
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            if output.finished:
                finished[int(output.request_id)] = output
        if step < 8:
            llm_engine.abort_request([str(2 * step)])
        step += 1
        server_of(plain).check_integrity()
    assert sorted(finished) == list(range(1, 16, 2))
    answers = [Answer.of(finished[number].outputs[0]) for number in range(1, 16, 2)]
    check_same_text(answers, plain_answers[1::2])


def test_dummy_weights_need_no_checkpoint_and_no_time(tmp_path):
    for path in MODEL.glob("*.json"):
        if "safetensors" not in path.name:
            shutil.copy(path, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    with engine(tmp_path, dymoe=OPTIONS, load_format="dummy") as llm:
        server = server_of(llm)
        assert server.store.manifest.quantizer == "dummy"
        x = torch.randn(7, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        ids = torch.arange(28).view(7, 4).int()
        outputs = [forward(server, layer, x, torch.full((7, 4), 0.25), ids).float() for layer in range(8)]
        assert len(answer(llm, prompts()[:2], max_tokens=4, logprobs=None)[0].tokens) == 4
        server.check_integrity()
    assert all(torch.isfinite(output).all() and output.std() > 1e-3 for output in outputs)
    assert len({output.sum().item() for output in outputs}) == 8, "layers have the same experts"


@pytest.mark.skipif(native.load() is None, reason="the native library was not built")
def test_dense_layers_of_eight_bits_answer_like_those_of_sixteen_and_no_budget_changes_that(plain_answers):
    with engine(dymoe=OPTIONS | {"dense": 8}, enforce_eager=False) as llm:
        got = answer(llm, prompts()[:8], logprobs=None)
        server_of(llm).resize("100%")
        assert answer(llm, prompts()[:8], logprobs=None) == got
        model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
        packed = sum(hasattr(module, "packed") for module in model.modules())
        assert packed == 2 * 8 + 1, "attention's two of each layer, and the head"
    assert equal_share(got, plain_answers[:8]) > 0.8


def speculate():
    """Return answers with n-gram drafts, and the tokens and steps of a single prompt."""
    os.environ["NUMBA_DISABLE_JIT"] = "1"  # compiling the proposer takes a minute and changes no prediction
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    options = OPTIONS | {"planning": "device", "host_store": "pinned"}
    with engine(dymoe=options, speculative_config=speculation) as llm:
        server = server_of(llm)
        answers = answer(llm, prompts()[:6])
        server.check_integrity()
        before = int(server.small_batches.table.step[0])
        (alone,) = answer(llm, prompts()[3:4])
        assert before > 0
        return answers, len(alone.tokens), int(server.small_batches.table.step[0]) - before


def test_ngram_speculation_gives_the_same_tokens_in_fewer_steps(plain_answers):
    """Drafts by n-grams, with device planning.

    test_models covers draft models with host planning. The engine runs in a process of its own, because it leaves numba
    modules behind that break vLLM's next engine.
    """
    answers, tokens, steps = in_own_process(speculate)
    assert tokens > steps, "no draft was accepted"
    check_same_text(answers, plain_answers[:6])
