"""The failure of a step: it is passed on with the output, and ends its requests.

Other requests go on. Tested in workers, in vLLM's own schedulers, and at the front end.
"""

import asyncio
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore
from vllm import PoolingParams, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm_plugin.steps import scheduled
from tests.vllm_plugin.test_prepare import configure
from vllm_dymoe.vllm_plugin.failures import FailedStep, StepFailures
from vllm_dymoe.vllm_plugin.patches import PATCHES, apply_patches
from vllm_dymoe.vllm_plugin.step import RunningStep

BLOCK = 16
PROMPT = list(range(100, 180))  # five blocks


@pytest.fixture(scope="module")
def store():
    return TCPStore("127.0.0.1", 0, 1, is_master=True)


class Rank:
    """The failures of one rank, and its steps of one token."""

    def __init__(self, store=None, **settings):
        self.step = RunningStep()
        self.failures = StepFailures(self.step, store, **settings)
        self.record, self.finish = self.failures.record, self.failures.finish

    def begin(self):
        self.step.begin(scheduled(1))


@pytest.fixture
def ranks(store):
    """Return the rank whose output is collected, and another one."""
    return Rank(store), Rank(store, collects=False)


def output():
    return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[7]])


def test_the_first_sentence_of_a_step_wins_and_other_steps_are_left_alone():
    rank, given = Rank(), output()
    rank.begin()
    rank.record("first")
    rank.record("second")
    failed = rank.finish(given)
    assert isinstance(failed, FailedStep)
    assert (failed.failure, failed.req_ids, failed.sampled_token_ids) == ("first", ["a"], [[7]])
    assert rank.step.warming_up
    rank.begin()
    assert rank.finish(given) is given, "an output that steps share is not written to"


def test_the_sentence_survives_the_way_between_processes():
    again = pickle.loads(pickle.dumps(FailedStep.of(output(), "it failed")))
    assert isinstance(again, FailedStep)
    assert again.failure == "it failed"


class Output(AsyncModelRunnerOutput):
    """An output with the method that vLLM calls from 0.33 on."""

    def get_kv_connector_output(self):
        return "of the connector"


def test_an_asynchronous_output_is_checked_when_it_is_there(ranks):
    """The output shows a failure that happens after all of its work was enqueued.

    The other rank fails before the step's tokens arrive.
    """

    class Later(Output):
        def get_output(self):
            there.record("on the other rank")
            return output()

    here, there = ranks
    here.begin()
    there.begin()
    finished = here.finish(Later())
    assert finished.get_output().failure == "on the other rank"
    assert finished.get_kv_connector_output() == "of the connector"


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_poller_fails_the_steps_on_their_way_and_no_other(store, ranks, late):
    """A wait of the second step is given up when the host has begun the third.

    The first step has ended by then, and the fourth has not begun, so the second and the third fail.
    """

    class RankServer(Output):
        def get_output(self):
            return output()

    heard, answers = [], []
    here = Rank(store, late=True, on_failure=heard.append)
    ranks = here, ranks[1]
    for number in range(1, 5):
        for rank in ranks:
            rank.begin()
        if number == 3:
            ranks[late].failures.record_late("the host has not computed")
        ranks[1].finish(output())
        answers.append(here.finish(RankServer()))
        if number in (1, 3, 4):
            answers = [answer if hasattr(answer, "req_ids") else answer.get_output() for answer in answers]
    failures = [getattr(answer, "failure", None) for answer in answers]
    assert failures == [None, *["vllm-dymoe: the host has not computed"] * 2, None]
    assert heard == [2, 3]


def test_what_a_device_of_another_rank_found_fails_the_steps_on_their_way(store):
    """The failure is reported during the third step.

    Nobody collects that rank's output, so it reads its second step's flag only then.
    """
    found = {2: "an expert that there is not"}
    here, there = Rank(store), Rank(store, collects=False, on_device=lambda step: found.pop(step, ""))
    failures = []
    for _ in range(4):
        here.begin(), there.begin()
        there.finish(output())
        failures.append(getattr(here.finish(output()), "failure", None))
    assert failures == [None, None, "vllm-dymoe: an expert that there is not", None]


def test_a_ranks_failure_fails_its_step_and_no_other(store, ranks):
    heard, (_, there) = [], ranks
    here = Rank(store, on_failure=heard.append)
    for failing in ((), (there,), (here,), (there, here), ()):
        here.begin()
        there.begin()
        for rank in failing:
            rank.record("here" if rank is here else "there")
        given = output()
        assert there.finish(given) is given
        got = here.finish(given)
        if failing:
            assert got.failure == ("here" if here in failing else "there")
        else:
            assert got is given
    assert heard == [2, 3, 4]


def test_ranks_of_a_pipeline_may_be_in_different_steps(ranks):
    last, first = ranks
    first.begin()
    assert first.finish(None) is None
    first.begin()
    first.record("the second step")
    first.finish(None)
    last.begin()
    assert not isinstance(last.finish(output()), FailedStep)
    last.begin()
    assert last.finish(output()).failure == "the second step"


def make_scheduler(kind, **settings):
    apply_patches()
    config = configure({}, enable_prefix_caching=True, max_num_batched_tokens=128, max_num_seqs=4, **settings)
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


def request(name, prompt=PROMPT, pooling=None):
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    sampling.update_from_generation_config({}, 2)
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=None if pooling else sampling,
        pooling_params=pooling,
        block_hasher=get_request_block_hasher(BLOCK, function),
    )


def update(scheduler, step, failure=None):
    ids = list(step.num_scheduled_tokens)
    output = ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, [[5] for _ in ids])
    by_client = scheduler.update_from_output(step, FailedStep.of(output, failure) if failure else output)
    found = [output for client in by_client.values() for output in client.outputs]
    failed = {output.request_id: output.stop_reason for output in found if str(output.finish_reason) == "error"}
    return [output.request_id for output in found], failed


def cached_tokens(scheduler, name="probe"):
    """Return how many prompt tokens a new request would find in the prefix cache."""
    scheduler.add_request(request(name))
    (new,) = [entry for entry in scheduler.schedule().scheduled_new_reqs if entry.req_id == name]
    return new.num_computed_tokens


@pytest.mark.parametrize("failure", [None, "the sentence"])
@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_the_requests_of_a_failed_step_end_and_what_they_wrote_is_forgotten(kind, failure):
    scheduler = make_scheduler(kind)
    scheduler.add_request(request("a"))
    _, failed = update(scheduler, scheduler.schedule(), failure)
    assert failed == ({"a": failure} if failure else {})
    assert scheduler.has_unfinished_requests() == (not failure)
    assert cached_tokens(scheduler) == (0 if failure else 64)


def test_requests_that_were_not_in_the_step_go_on():
    scheduler = make_scheduler(Scheduler)
    for number in range(5):  # one more than fit into a step
        scheduler.add_request(request(str(number), [number] * 20))
    _, failed = update(scheduler, scheduler.schedule(), "the sentence")
    assert failed.keys() == {"0", "1", "2", "3"}
    assert scheduler.schedule().num_scheduled_tokens == {"4": 20}


def test_a_step_that_was_scheduled_already_is_told_nothing_wrong():
    """Asynchronous scheduling: when the failure is known, the next step runs already."""
    scheduler = make_scheduler(AsyncScheduler)
    scheduler.add_request(request("a"))
    failing = scheduler.schedule()
    scheduler.add_request(request("reader"))  # its prefix is found in blocks that the failing step is writing
    scheduler.add_request(request("other", list(range(500, 540))))
    following = scheduler.schedule()
    assert following.num_scheduled_tokens.keys() == {"a", "reader", "other"}
    (reader,) = [new for new in following.scheduled_new_reqs if new.req_id == "reader"]
    assert reader.num_computed_tokens == 64
    _, failed = update(scheduler, failing, "the sentence")
    assert failed == {"a": "the sentence", "reader": "the sentence"}
    assert update(scheduler, following) == (["other"], {})
    assert [running.request_id for running in scheduler.running] == ["other"]
    assert cached_tokens(scheduler) == 0


def test_a_request_that_was_aborted_meanwhile_leaves_no_prefix_behind():
    scheduler = make_scheduler(Scheduler)
    scheduler.add_request(request("a"))
    step = scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert update(scheduler, step, "the sentence") == ([], {})
    assert cached_tokens(scheduler) == 0


def test_what_may_have_read_blocks_of_a_request_that_was_aborted_meanwhile_ends():
    """Nobody knows these blocks any more, but a request without blocks cannot have read them."""
    scheduler = make_scheduler(AsyncScheduler)
    scheduler.add_request(request("a"))
    failing = scheduler.schedule()
    scheduler.add_request(request("reader"))
    following = scheduler.schedule()
    assert [new.num_computed_tokens for new in following.scheduled_new_reqs] == [64]
    scheduler.add_request(request("later"))
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert update(scheduler, failing, "the sentence")[1] == {"reader": "the sentence"}
    assert update(scheduler, following) == ([], {})
    assert scheduler.schedule().num_scheduled_tokens == {"later": 80}


@pytest.mark.parametrize("failure", [None, "the sentence"])
def test_what_a_failed_step_wrote_is_not_found_outside_of_the_device(failure):
    """vLLM's connector has begun to store it when the failure becomes known, and ends a step later."""
    scheduler = make_scheduler(Scheduler, kv_offloading_size=0.01)
    scheduler.add_request(request("a"))
    step = scheduler.schedule()
    stored = step.kv_connector_metadata.store_jobs
    assert stored
    update(scheduler, step, failure)
    following = scheduler.schedule()
    stored = dict.fromkeys(stored | following.kv_connector_metadata.store_jobs, 1)
    done = KVConnectorOutput(kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=stored))
    names = list(following.num_scheduled_tokens)
    indices = {name: index for index, name in enumerate(names)}
    tokens = [[5] for _ in names]
    scheduler.update_from_output(following, ModelRunnerOutput(names, indices, tokens, kv_connector_output=done))
    probe = request("probe")
    scheduler.add_request(probe)
    found, _ = scheduler.connector.get_num_new_matched_tokens(probe, 0)
    assert found == (0 if failure else len(PROMPT))


@pytest.mark.parametrize("confirms", [True, False, None])
def test_a_connector_that_may_keep_it_is_named(monkeypatch, said, confirms):
    scheduler = make_scheduler(Scheduler, kv_offloading_size=0.01)
    monkeypatch.setattr(scheduler.connector, "reset_cache", lambda: confirms)
    scheduler.add_request(request("a"))
    update(scheduler, scheduler.schedule(), "the sentence")
    assert any("OffloadingConnector did not confirm" in text for _, text in said) is not bool(confirms)


def completion(finish_reason, stop_reason):
    return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)])


def patched(name, original):
    (patch,) = [patch for patch in PATCHES if patch.target[1] == name]
    return patch.wrapped(original)


def test_the_front_end_raises_and_closes_what_it_read_from():
    closed = []

    async def outputs(engine, prompt):
        try:
            yield completion(None, None)
            yield completion("error", "the sentence")
            yield completion(None, None)
        finally:
            closed.append(prompt)

    async def read():
        async for output in patched("generate", outputs)(None, "hello"):
            got.append(output)

    got = []
    with pytest.raises(Exception, match="the sentence"):
        asyncio.run(read())
    assert len(got) == 1
    assert closed == ["hello"]


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("failure", [None, "the sentence"])
def test_a_pooling_model_answers_with_the_message_and_its_engine_goes_on(failure, served):
    """The engine's outputs pass vLLM's front end, which takes outputs without pooled data for completions."""
    scheduler, pooling = make_scheduler(Scheduler), PoolingParams(task="embed")
    scheduler.add_request(request("a", pooling=pooling))
    pooled = ModelRunnerOutput(["a"], {"a": 0}, pooler_output=[torch.ones(3)])
    output = FailedStep.of(pooled, failure) if failure else pooled
    by_client = scheduler.update_from_output(scheduler.schedule(), output)
    assert not scheduler.has_unfinished_requests()
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(by_client[0])).outputs

    processor = OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "a") if served else None
    asked = EngineCoreRequest("a", PROMPT, None, None, pooling, 0.0, None, None, None, external_req_id="a")
    processor.add_request(asked, None, queue=queue)

    def step(engine):
        return processor.process_outputs(arrived).request_outputs

    async def encode(engine):
        assert step(engine) == []
        yield queue.get_nowait()

    async def read():
        return [each async for each in patched("encode", encode)(None)]

    def answer():
        return asyncio.run(read()) if served else patched("step", step)(None)

    if failure:
        with pytest.raises(Exception, match=failure):
            answer()
    else:
        (answered,) = answer()
        assert answered.outputs.data.tolist() == [1, 1, 1]
    assert not processor.has_unfinished_requests()


def test_every_rank_hears_once_of_a_failure_on_any(ranks):
    _, other = ranks
    for rank in ranks:
        rank.failures.any_new()  # forget failures of other tests
        assert not rank.failures.any_new()
    other.begin()
    other.record("the disk is on fire")
    for rank in ranks:
        assert rank.failures.any_new()
        assert not rank.failures.any_new()
    assert not Rank().failures.any_new(), "without other ranks nothing is asked"
