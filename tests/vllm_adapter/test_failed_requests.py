"""vLLM's schedulers and a failed step: who ends, who goes on, and what stays in the prefix cache."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm_adapter.test_prepare import configure
from vllm_dymoe.vllm_adapter.failures import FailedStep, raise_failure
from vllm_dymoe.vllm_adapter.patches import apply_patches

BLOCK = 16
PROMPT = list(range(100, 180))  # five blocks


@pytest.fixture(scope="module", autouse=True)
def _patched():
    apply_patches()


def make_scheduler(kind):
    config = configure({}, enable_prefix_caching=True, max_num_batched_tokens=128, max_num_seqs=4)
    config.scheduler_config.async_scheduling = kind is AsyncScheduler
    config.cache_config.num_gpu_blocks = 64
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.block_size = BLOCK
    return kind(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def request(name, prompt=PROMPT):
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    sampling.update_from_generation_config({}, 2)
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, function),
    )


def result(step, failure=None):
    ids = list(step.num_scheduled_tokens)
    output = ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, [[5] for _ in ids])
    return FailedStep.of(output, failure) if failure else output


def ended(outputs):
    return {
        output.request_id: output.stop_reason
        for client in outputs.values()
        for output in client.outputs
        if output.finish_reason is not None and str(output.finish_reason) == "error"
    }


def cached_tokens(scheduler, name="probe"):
    """How many tokens of the prompt a new request would find in the prefix cache."""
    scheduler.add_request(request(name))
    (new,) = [entry for entry in scheduler.schedule().scheduled_new_reqs if entry.req_id == name]
    return new.num_computed_tokens


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_a_prefix_is_cached_if_its_step_was_well(kind):
    """What the tests below would see if nothing were forgotten."""
    scheduler = make_scheduler(kind)
    scheduler.add_request(request("a"))
    step = scheduler.schedule()
    assert not ended(scheduler.update_from_output(step, result(step)))
    assert cached_tokens(scheduler) == 64


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_the_requests_of_a_failed_step_end_and_what_they_wrote_is_forgotten(kind):
    scheduler = make_scheduler(kind)
    scheduler.add_request(request("a"))
    step = scheduler.schedule()
    outputs = scheduler.update_from_output(step, result(step, "the sentence"))
    assert ended(outputs) == {"a": "the sentence"}
    assert not scheduler.has_unfinished_requests()
    assert cached_tokens(scheduler) == 0


def test_requests_that_were_not_in_the_step_go_on():
    scheduler = make_scheduler(Scheduler)
    for number in range(5):  # four places
        scheduler.add_request(request(str(number), [number] * 20))
    step = scheduler.schedule()
    assert len(step.num_scheduled_tokens) == 4
    outputs = scheduler.update_from_output(step, result(step, "the sentence"))
    assert ended(outputs).keys() == {"0", "1", "2", "3"}
    assert scheduler.schedule().num_scheduled_tokens == {"4": 20}


def test_a_step_that_was_scheduled_already_is_told_nothing_wrong():
    """Asynchronous scheduling: the next step is under way when the failure of this one is known."""
    scheduler = make_scheduler(AsyncScheduler)
    scheduler.add_request(request("a"))
    failing = scheduler.schedule()
    scheduler.add_request(request("reader"))  # finds what the failing step is just writing
    scheduler.add_request(request("other", list(range(500, 540))))
    following = scheduler.schedule()
    assert following.num_scheduled_tokens.keys() == {"a", "reader", "other"}
    (reader,) = [new for new in following.scheduled_new_reqs if new.req_id == "reader"]
    assert reader.num_computed_tokens == 64
    outputs = scheduler.update_from_output(failing, result(failing, "the sentence"))
    assert ended(outputs) == {"a": "the sentence", "reader": "the sentence"}
    outputs = scheduler.update_from_output(following, result(following))
    assert [output.request_id for output in outputs[0].outputs] == ["other"]
    assert not ended(outputs)
    assert [running.request_id for running in scheduler.running] == ["other"]
    assert cached_tokens(scheduler) == 0


def test_a_request_that_was_aborted_meanwhile_leaves_no_prefix_behind():
    from vllm.v1.request import RequestStatus

    scheduler = make_scheduler(Scheduler)
    scheduler.add_request(request("a"))
    step = scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert not ended(scheduler.update_from_output(step, result(step, "the sentence")))
    assert cached_tokens(scheduler) == 0


def completion(finish_reason, stop_reason):
    return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)])


def test_only_our_sentences_are_raised():
    raise_failure(completion(None, None))
    raise_failure(completion("stop", "a stop string"))
    raise_failure(completion("error", None))  # vLLM's own
    with pytest.raises(Exception, match="the sentence") as caught:
        raise_failure(completion("error", "the sentence"))
    assert caught.value.status_code == 500


def test_the_front_end_raises_and_closes_what_it_read_from():
    from vllm_dymoe.vllm_adapter.patches import PATCHES

    (patch,) = [patch for patch in PATCHES if patch.target[1] == "generate"]
    closed = []

    async def outputs(engine, prompt):
        try:
            yield completion(None, None)
            yield completion("error", "the sentence")
            yield completion(None, None)
        finally:
            closed.append(prompt)

    async def read():
        async for output in patch.wrapped(outputs)(None, "hello"):
            got.append(output)

    got = []
    with pytest.raises(Exception, match="the sentence"):
        asyncio.run(read())
    assert len(got) == 1
    assert closed == ["hello"]
