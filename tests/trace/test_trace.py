"""A trace and its files: loading, and refusals of damaged or foreign files."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.trace.trace import TRACE_FORMAT, Trace, TraceError, expert_dtype, write_file

HEADER = ModelIdentity("a model", "0123456789abcdef", num_layers=3, num_experts=6, top_k=2, hidden=4)


def make_trace(header=HEADER, tokens=7, seed=0, *, inputs=False, requests=2):
    """Return random tokens; their requests and positions need not make sense."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, header.num_layers, header.num_experts, generator=random)
    router_inputs = torch.randn(tokens, header.num_layers, header.hidden, generator=random).half()
    weights, experts = scores.topk(header.top_k)
    return Trace(
        header,
        experts=experts.to(expert_dtype(header.num_experts)),
        weights=weights.half(),
        request=torch.randint(requests, (tokens,), generator=random, dtype=torch.int32),
        position=torch.randint(50, (tokens,), generator=random, dtype=torch.int32),
        prefill=torch.rand(tokens, generator=random) < 0.5,
        router_inputs=router_inputs if inputs else None,
        next_gate=experts[:, 1:].to(expert_dtype(header.num_experts)) if inputs else None,
    )


def assert_same(ours, theirs):
    assert ours.header == theirs.header
    ours, theirs = ours.tensors(), theirs.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.integers(1, 5),
    experts=st.sampled_from([1, 2, 8, 256, 257, 300]),
    tokens=st.integers(1, 20),
    seed=st.integers(0, 99),
    inputs=st.booleans(),
    model=st.text(max_size=10),
)
def test_what_is_saved_is_loaded(tmp_path, layers, experts, tokens, seed, inputs, model):
    header = ModelIdentity(model, "f", layers, experts, min(3, experts), hidden=5)
    trace = make_trace(header, tokens, seed, inputs=inputs)
    trace.save(tmp_path / "one.safetensors")
    loaded = Trace.load(tmp_path / "one.safetensors")
    assert_same(loaded, trace)
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]
    (tmp_path / "one.safetensors").unlink()


def test_parts_of_a_run_number_their_requests_together_and_runs_apart(tmp_path):
    traces = [make_trace(seed=seed) for seed in range(4)]
    for number, (trace, run) in enumerate(zip(traces, ["a", "a", "b", "c"], strict=True)):
        write_file(tmp_path / f"{run}-{number}.safetensors", HEADER, trace.tensors(), run)
    loaded = Trace.load(tmp_path)
    offsets = [0, 0, 2, 4]
    assert torch.equal(
        loaded.request, torch.cat([t.request + offset for t, offset in zip(traces, offsets, strict=True)])
    )
    assert torch.equal(loaded.experts, torch.cat([trace.experts for trace in traces]))
    assert loaded.num_requests == 6


def test_a_file_has_its_name_when_it_is_whole(tmp_path, monkeypatch):
    names, trace = [], make_trace()
    monkeypatch.setattr("vllm_dymoe.durable.os.fsync", lambda _: names.extend(p.name for p in tmp_path.iterdir()))
    trace.save(tmp_path / "a.safetensors")
    assert [name.rpartition(".")[2] for name in names] == ["dymoe-partial"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    (tmp_path / names[0]).write_bytes((tmp_path / "a.safetensors").read_bytes()[:100])
    (tmp_path / "notes.txt").write_text("mine")
    assert_same(Trace.load(tmp_path), trace)  # a file that is still being written is ignored


def test_requests_are_read_in_the_order_of_their_positions_with_the_last_of_what_was_computed_twice():
    trace = make_trace(tokens=9)
    request = torch.tensor([0, 1, 0, 0, 1, 0, 0, 3, 1], dtype=torch.int32)
    position = torch.tensor([0, 0, 1, 2, 1, 1, 3, 5, 1], dtype=torch.int32)  # position 1 occurs twice in both requests
    trace = replace(trace, request=request, position=position)
    assert [rows.tolist() for rows in trace.by_request()] == [[0, 5, 3, 6], [1, 8], [7]]
    assert trace.in_order().tolist() == [0, 5, 3, 6, 1, 8, 7]
    assert trace.num_requests == 4
    empty = trace.select(torch.zeros(9, dtype=torch.bool))
    assert list(empty.by_request()) == []
    assert empty.num_requests == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("experts", torch.zeros(7, 3, 2, dtype=torch.int32), r"experts are torch.int32 \[7, 3, 2\]"),
        ("experts", torch.zeros(7, 2, 2, dtype=torch.uint8), r"need torch.uint8 \[7, 3, 2\]"),
        ("experts", torch.full((7, 3, 2), 6, dtype=torch.uint8), "an expert is 6, but a layer has 6"),
        ("next_gate", torch.full((7, 2, 2), 6, dtype=torch.uint8), "an expert is 6, but a layer has 6"),
        ("weights", torch.zeros(6, 3, 2).half(), "weights are"),
        ("position", torch.full((7,), -1, dtype=torch.int32), "negative"),
        ("request", torch.full((7,), -1, dtype=torch.int32), "negative"),
        ("prefill", torch.zeros(7), "prefill are"),
        ("router_inputs", torch.zeros(7, 3, 5).half(), "router_inputs are"),
        ("next_gate", torch.zeros(7, 3, 2, dtype=torch.uint8), r"need torch.uint8 \[7, 2, 2\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(field, value, message):
    with pytest.raises(TraceError, match=message):
        replace(make_trace(), **{field: value})


def test_every_file_that_was_cut_off_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    make_trace().save(path)
    content = path.read_bytes()
    for length in [0, 1, 7, 8, 20, 300, len(content) - 100, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(TraceError) as caught:
            Trace.load(tmp_path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def rewritten(path, **changes):
    """Write the file again with other metadata or tensors; None removes a tensor."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif value is None:
            tensors.pop(name)
        else:
            metadata[name] = value
    save_file(tensors, path, metadata)


def header_with(**changes):
    values = {**HEADER.__dict__, "format": TRACE_FORMAT, **changes}
    return json.dumps({name: value for name, value in values.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "something else"}, "is not a trace of vllm-dymoe"),
        ({"header": header_with(format=TRACE_FORMAT + 1)}, f"has format {TRACE_FORMAT + 1}"),
        ({"header": header_with(num_layers=4)}, r"need torch.uint8 \[7, 4, 2\]"),
        ({"header": header_with(num_experts=3)}, "but a layer has 3"),
        ({"header": header_with(top_k=None)}, "cannot be read as a trace"),
        ({"header": header_with(num_layers="3")}, "num_layers is '3'"),
        ({"header": "[]"}, "cannot be read as a trace"),
        ({"header": "{"}, "cannot be read as a trace"),
        ({"position": None}, "cannot be read as a trace"),
        ({"position": torch.zeros(3, dtype=torch.int32)}, r"position are torch.int32 \[3\]"),
        ({"request": torch.zeros(2, 2, dtype=torch.int32)}, "request are"),
    ],
)
def test_foreign_and_contradictory_files_are_refused(tmp_path, changes, message):
    path = tmp_path / "a.safetensors"
    make_trace().save(path)
    rewritten(path, **changes)
    with pytest.raises(TraceError, match=message) as caught:
        Trace.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_to_read_is_said(tmp_path):
    with pytest.raises(TraceError, match="does not exist"):
        Trace.load(tmp_path / "absent")
    with pytest.raises(TraceError, match="holds no tokens"):
        Trace.load(tmp_path)
    make_trace(tokens=0).save(tmp_path / "a.safetensors")
    with pytest.raises(TraceError, match="holds no tokens"):
        Trace.load(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_trace(replace(HEADER, fingerprint="another")), r"b\.safetensors .*fingerprint another"),
        (make_trace(inputs=True), r"router inputs"),
    ],
)
def test_traces_that_differ_are_not_joined(tmp_path, other, message):
    make_trace().save(tmp_path / "a.safetensors")
    other.save(tmp_path / "b.safetensors")
    with pytest.raises(TraceError, match=message):
        Trace.load(tmp_path)
