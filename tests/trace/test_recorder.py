"""Recording: choices are read back, even after a crash, and the size limit holds."""

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.patience import becomes
from tests.test_durable import leave_temporary
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.trace.gates import GateWeights
from vllm_dymoe.trace.recorder import Recorder, Span
from vllm_dymoe.trace.trace import Trace, TraceError

HEADER = ModelIdentity("a model", "0123456789abcdef", num_layers=3, num_experts=6, top_k=2, hidden=4)
ROOT = Path(__file__).resolve().parents[2]


def make_recorder(folder, limit=2**20, interval=600, **options):
    said = []
    return Recorder(folder, HEADER, limit, say=said.append, interval=interval, **options), said


def choices(tokens, seed):
    random = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(tokens, 6, generator=random).topk(2)
    return torch.randn(tokens, 4, generator=random).bfloat16(), weights, ids.int()


def columns(tokens, seed):
    return dict(zip(("router_inputs", "weights", "experts"), choices(tokens, seed), strict=True))


def run(recorder, spans, seed, *, first=0, layers=range(3), predictions=False, gates_right=True, number=0):
    """Record one step, and overwrite its tensors as soon as they were passed on."""
    tokens = sum(span.tokens for span in spans)
    recorder.begin()
    for layer in layers:
        x, weights, ids = choices(tokens, seed * 10 + layer)
        next_gate = choices(tokens, seed * 10 + layer + 1)[2].long() if predictions and layer < 2 else None
        fates = ids.byte() + 1 if first == 0 else None
        chosen = {"weights": weights, "router_inputs": x, "next_gate": next_gate}
        recorder.record(layer, ids, **chosen, fates=fates)
        x.fill_(torch.nan), weights.fill_(torch.nan), ids.fill_(99)
    position = torch.arange(first, first + tokens + 3)  # vLLM passes its whole buffer
    recorder.end(spans, position, number, next_gate=gates_right)
    position.fill_(-1)


def test_actions_are_left_out_where_a_step_has_none(tmp_path):
    recorder, _ = make_recorder(tmp_path)
    run(recorder, [Span(0, 5, 5)], seed=1)
    recorder.flush()
    trace = Trace.load(tmp_path)
    assert torch.equal(trace.fates, trace.experts + 1)
    run(recorder, [Span(0, 1, 5)], seed=2, first=5)
    recorder.close()
    assert Trace.load(tmp_path).fates is None


def test_what_was_chosen_is_what_is_read(tmp_path):
    recorder, said = make_recorder(tmp_path / "new" / "folder", inputs=True)
    run(recorder, [Span(0, 5, 6)], seed=1, predictions=True)
    run(recorder, [Span(0, 1, 6), Span(1, 2, 7)], seed=2, first=5, predictions=True)
    recorder.close()
    trace = Trace.load(recorder.folder)
    for layer in range(3):
        (x1, weights1, ids1), (x2, weights2, ids2) = choices(5, 10 + layer), choices(3, 20 + layer)
        assert torch.equal(trace.experts[:, layer], torch.cat([ids1[:5], ids2]).byte())
        assert torch.equal(trace.weights[:, layer], torch.cat([weights1[:5], weights2]).half())
        assert torch.equal(trace.router_inputs[:, layer], torch.cat([x1[:5], x2]).half())
        if layer:
            assert torch.equal(trace.next_gate[:, layer - 1], trace.experts[:, layer])
    assert trace.request.tolist() == [0] * 6 + [1] * 2
    assert trace.position.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert trace.prefill.tolist() == [True] * 7 + [False], "behind its prompt a token is decoded"
    assert recorder.tokens == 8
    assert said == []
    assert all(path.suffix == ".safetensors" for path in recorder.folder.iterdir())


def test_gates_are_in_the_next_part_alone_and_go_when_they_turn_out_to_be_wrong(tmp_path):
    recorder, _ = make_recorder(tmp_path, inputs=True)
    gates = GateWeights(torch.randn(3, 6, 4).bfloat16(), torch.randn(3, 6), torch.randn(3, 6), "sigmoid")
    run(recorder, [Span(0, 3, 3)], seed=1, predictions=True)
    recorder.take_gates(gates)
    recorder.flush()
    run(recorder, [Span(0, 2, 3)], seed=2, first=3, predictions=True)
    recorder.flush()
    first, second = sorted(tmp_path.iterdir())
    assert Trace.load(second).gates is None
    trace = Trace.load(tmp_path).select(torch.arange(2))
    trace.save(first)
    for found in (trace.gates, Trace.load(first).gates):
        assert found.scoring == "sigmoid"
        for name in ("weights", "biases", "correction"):
            assert torch.equal(getattr(found, name), getattr(gates, name))
    run(recorder, [Span(0, 1, 3)], seed=3, first=5, gates_right=False)
    recorder.close()
    assert Trace.load(tmp_path).gates is None


def test_without_inputs_no_gates_are_written(tmp_path):
    recorder, _ = make_recorder(tmp_path)
    recorder.take_gates(GateWeights(torch.zeros(3, 6, 4), torch.zeros(3, 6)))
    run(recorder, [Span(0, 3, 3)], seed=1)
    recorder.close()
    assert Trace.load(tmp_path).gates is None


def test_a_step_that_failed_elsewhere_is_forgotten_as_long_as_it_is_not_on_disk(tmp_path):
    recorder, _ = make_recorder(tmp_path)
    for number in range(4):
        run(recorder, [Span(number, 2, 2)], seed=number, number=number)
        if number == 0:
            recorder.flush()
    recorder.forget(0)
    recorder.forget(2)
    recorder.flush()
    assert Trace.load(tmp_path).request.tolist() == [0, 0, 1, 1, 3, 3]
    assert recorder.tokens == 6


@pytest.mark.parametrize("tells", ["this step", "the next step", "a step behind a part"])
def test_what_wrong_gates_said_is_left_out(tmp_path, tells):
    """A gate is found to be wrong in the step that uses it, or later.

    By then a part of the trace may be on disk.
    """
    recorder, _ = make_recorder(tmp_path, inputs=True)
    run(recorder, [Span(0, 3, 3)], seed=1, predictions=True, gates_right=tells != "this step")
    if tells == "a step behind a part":
        recorder.flush()
        assert Trace.load(tmp_path).next_gate is not None
    run(recorder, [Span(0, 2, 3)], seed=2, first=3, predictions=tells != "this step", gates_right=False)
    recorder.flush()
    trace = Trace.load(tmp_path)
    assert trace.next_gate is None
    assert trace.position.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(trace.router_inputs[:3, 1], choices(3, 11)[0].half())


def test_steps_that_are_not_whole_are_left_out(tmp_path):
    recorder, _ = make_recorder(tmp_path)
    run(recorder, [Span(0, 4, 4)], seed=1, layers=[0, 1])  # a layer is missing
    recorder.begin()
    for layer in range(3):
        recorder.record(layer, **columns(4 - layer // 2, layer))  # the last layer sees fewer tokens
    recorder.end([Span(0, 4, 4)], torch.arange(4))
    recorder.begin()
    for layer in range(3):
        recorder.record(layer, **columns(4, layer))
    recorder.end([Span(0, 3, 4)], torch.arange(4))  # a token of the request is missing
    for layer in range(3):
        recorder.record(layer, **columns(4, layer))  # outside a step, as when vLLM warms up
    recorder.end([Span(0, 4, 4)], torch.arange(4))
    run(recorder, [Span(0, 2, 4)], seed=5)
    recorder.flush()
    assert Trace.load(tmp_path).position.tolist() == [0, 1]


def test_parts_come_by_size_and_by_time(tmp_path):
    recorder, _ = make_recorder(tmp_path, part_bytes=200)
    for step in range(8):  # 23 bytes per token
        run(recorder, [Span(0, 5, 5)], seed=step)
        if step % 2:
            assert becomes(lambda step=step: len(list(tmp_path.glob("*.safetensors"))) == (step + 1) // 2)
    assert Trace.load(tmp_path).num_tokens == 40
    recorder.close()
    recorder, _ = make_recorder(tmp_path, interval=0.05)
    run(recorder, [Span(0, 1, 5)], seed=1)
    assert becomes(lambda: Trace.load(tmp_path).num_tokens == 41)
    recorder.close()


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_folder_never_becomes_larger_than_allowed(tmp_path):
    (tmp_path / "notes.txt").write_bytes(bytes(5000))
    limit = 30_000
    recorder, said = make_recorder(tmp_path, limit)
    for step in range(20):
        run(recorder, [Span(step, 30, 30)], seed=step)
        recorder.flush()
        assert size_of(tmp_path) <= limit
    assert not recorder.recording
    assert len(said) == 1
    assert "has reached its limit, 29.3 KiB" in said[0]
    assert limit / 2 < size_of(tmp_path)
    kept = Trace.load(tmp_path)
    assert 0 < kept.num_tokens == recorder.tokens < 600
    assert torch.equal(kept.position, torch.arange(30).repeat(20)[: kept.num_tokens].int())
    again, said = make_recorder(tmp_path, limit)
    run(again, [Span(0, 1000, 1000)], seed=1)
    again.close()
    assert size_of(tmp_path) <= limit
    assert len(said) == 1


@pytest.mark.parametrize("fault", ["No space left on device", "No such file or directory"])
def test_a_disk_that_refuses_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, fault):
    recorder, said = make_recorder(tmp_path / "folder")

    def fails(*_):
        raise OSError(28, fault)

    if fault == "No space left on device":
        monkeypatch.setattr("vllm_dymoe.durable.os.fsync", fails)
    else:
        (tmp_path / "folder").rmdir()
    for seed in (1, 2):
        run(recorder, [Span(0, 3, 3)], seed=seed)
        recorder.flush()
    recorder.close()
    assert not recorder.recording
    assert len(said) == 1
    assert "recording of the trace has stopped" in said[0]
    assert fault in said[0]
    assert not list(tmp_path.glob("folder/*"))


def test_only_a_folder_of_the_same_model_is_shared(tmp_path):
    for _ in range(2):
        recorder, _ = make_recorder(tmp_path)
        run(recorder, [Span(0, 3, 3), Span(1, 1, 1)], seed=1)
        recorder.close()
    assert Trace.load(tmp_path).num_requests == 4
    for change in ({"fingerprint": "another"}, {"num_layers": 4}):
        with pytest.raises(TraceError, match="another model"):
            Recorder(tmp_path, replace(HEADER, **change), 2**20)
    with pytest.raises(TraceError, match="other tensors"):
        Recorder(tmp_path, HEADER, 2**20, inputs=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot be created"):
        Recorder(tmp_path / "file", HEADER, 2**20)


def test_a_recorder_removes_old_temporary_files_and_no_other_file(tmp_path, monkeypatch):
    kept, left = tmp_path / "routing-1.safetensors.gz", leave_temporary(tmp_path / "routing-2.safetensors", monkeypatch)
    kept.write_bytes(b"mine")
    os.utime(kept, (0, 0))
    recorder, _ = make_recorder(tmp_path)
    recorder.close()
    assert kept.exists()
    assert not left.exists()


def record_and_return(folder):
    recorder, _ = make_recorder(folder)
    run(recorder, [Span(0, 3, 3)], seed=1)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_ends_writes_what_is_left(tmp_path, method):
    process = multiprocessing.get_context(method).Process(target=record_and_return, args=(tmp_path,))
    process.start()
    process.join(300)  # the new process imports torch, which takes long on a busy machine
    assert process.exitcode == 0
    assert Trace.load(tmp_path).num_tokens == 3
