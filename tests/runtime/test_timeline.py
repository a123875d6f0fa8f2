"""A timeline says what happened: every transfer, wait and expert, when it was, and nothing without being asked."""

import pytest
import torch

from tests.runtime.steps import ByNumber, run, with_budget
from tests.runtime.test_prefetch import Guesses
from tests.small_model import make_experts, make_store
from vllm_dymoe.predict import Predictor
from vllm_dymoe.runtime import start_timeline, stop_timeline

STORE = make_store(make_experts(layers=4))
FORMAT = STORE.experts.formats[4]
STEPS = [(seed, seed % 4, (1, 1, 7)[seed // 4 % 3]) for seed in range(24)]
SECONDS = 1e-3  # of one expert over the link


def recorded():
    runtime = with_budget(
        STORE, "50%", ByNumber(staging=3), predictor=Guesses(1), link_gbps=FORMAT.nbytes / SECONDS / 1e9
    )
    start_timeline(runtime)
    outputs = run(runtime, STEPS)
    events = stop_timeline(runtime, rank=3)
    runtime.engine.close()
    return runtime, outputs, events


@pytest.fixture(scope="module")
def recording():
    """On a busy machine the link may find no time to fetch ahead: then once more."""
    for _ in range(10):
        found = recorded()
        if found[0].stats().bytes_moved["prefetch"]:
            break
    return found


def spans(events, kind):
    return [event for event in events if event["ph"] == "X" and event["cat"] == kind]


def test_rows_have_names_and_every_event_a_place(recording):
    _, _, events = recording
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["compute", "disk", "host", "host's cores", "link"]
    assert {event["pid"] for event in events} == {3}
    assert {names[event["tid"]] for event in spans(events, "demand")} == {"link"}
    assert {names[event["tid"]] for event in spans(events, "wait")} == {"host"}
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert times == sorted(times)


def test_every_wanted_expert_is_computed_once_inside_its_layer(recording):
    _, outputs, events = recording
    assert len(spans(events, "layer")) == len(STEPS) == len(outputs)
    computed = 0
    for layer in spans(events, "layer"):
        inside = [e for e in spans(events, "compute") if layer["ts"] <= e["ts"] <= layer["ts"] + layer["dur"]]
        assert inside
        assert all(event["name"].startswith(layer["name"] + ",") for event in inside)
        names = {event["name"] for event in inside}  # one expert has a span for each projection that it waits for
        experts = [int(number) for name in names for number in name.split("expert")[1].lstrip("s").split(",")]
        assert len(experts) == len(set(experts))
        computed += len(experts)
        waits = [e for e in spans(events, "wait") if layer["ts"] <= e["ts"] <= layer["ts"] + layer["dur"]]
        for wait in waits:
            middle = wait["ts"] + wait["dur"] / 2
            assert not any(event["ts"] < middle < event["ts"] + event["dur"] for event in inside)
    assert computed == sum(recording[0].stats().planned.values())


def test_transfers_take_the_time_of_their_bytes_and_waits_add_up(recording):
    runtime, _, events = recording
    stats = runtime.stats()
    for reason in ("demand", "prefetch"):
        took = sum(event["dur"] for event in spans(events, reason)) / 1e6
        assert took == pytest.approx(SECONDS * stats.bytes_moved[reason] / FORMAT.nbytes, rel=1e-3)
        assert took > 0
    waited = sum(event["dur"] for event in spans(events, "wait")) / 1e6
    assert waited == pytest.approx(stats.exposed_wait_seconds, rel=1e-3)
    assert len(spans(events, "predict")) == len(STEPS)


def test_recording_changes_no_bit_and_ends(recording):
    runtime, outputs, _ = recording
    plain = run(with_budget(STORE, "100%"), STEPS)
    assert all(torch.equal(a, b) for a, b in zip(plain, outputs, strict=True))
    assert runtime.engine.timeline is None
    with pytest.raises(ValueError, match="no timeline was started"):
        stop_timeline(runtime)


def test_what_failed_is_in_it_too():
    class Broken(Predictor):
        def observe(self, *arguments):
            raise RuntimeError("broken")

        def predict(self, layer):
            return []

    runtime = with_budget(STORE, "50%", predictor=Broken())
    start_timeline(runtime)
    with pytest.raises(RuntimeError, match="broken"):
        run(runtime, STEPS[:1])
    assert spans(stop_timeline(runtime), "layer")
