"""Every line of `make bench-gpu` and of its tuning, in the interpreter, with the host in place of the card.

What the numbers are then means nothing. That the command runs to its end is what this is about: on a rented GPU the
first typing error costs an hour.
"""

import json
import shutil
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.on_the_host import OnTheHost
from tests.kernels.sections import DEVICE

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a card: make bench-gpu")


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, end):
        return 1000.0  # ms: enough after one call


class Graph:
    def replay(self):
        pass


class Inline:
    """A pool of this process, where what tests replace is replaced."""

    def __init__(self, *arguments):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future

    def map(self, function, *arguments):
        return map(function, *arguments)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """bench_gpu with a small layer and few of everything."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "get_device_capability": lambda *device: (9, 0),
        "get_device_name": lambda: "a card",
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=0),
        "mem_get_info": lambda: (1 << 20, 1 << 20),
        "current_stream": lambda: stream,
        "Stream": lambda: stream,
        "stream": nullcontext,
        "graph": nullcontext,
        "CUDAGraph": Graph,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_gpu
    import correctness
    import layers
    import measure
    import report

    from vllm_dymoe.kernels import Activation
    from vllm_dymoe.kernels.triton import DecodeTile, ExpertShape, tiles

    shutil.copy(report.README, tmp_path / "README.md")
    monkeypatch.setattr(report.write_readme, "__defaults__", (tmp_path / "README.md",))
    monkeypatch.setattr(measure, "SIDE", 32)
    monkeypatch.setattr(correctness, "REPEATS", 1)
    monkeypatch.setattr(correctness, "BITS", (4,))
    monkeypatch.setattr(correctness, "COUNTS", (1, 20))
    monkeypatch.setattr(correctness, "DECODED", (66, 40))
    small = (ExpertShape(66, 40, 32, torch.bfloat16, True, frozenset((4,)), frozenset((4,))), Activation.SILU)
    monkeypatch.setattr(correctness, "FORWARD_CASES", [small])
    monkeypatch.setattr(correctness, "DECODE_CASES", [(torch.float16, DecodeTile(4, 2))])
    for name, value in {
        "HERE": tmp_path,
        "ProcessPoolExecutor": Inline,
        "LAYERS": (layers.Layer("Mixtral-8x7B", 64, 64, 3, 2),),
        "TIERS": {"4": (4,), "4/2": (4, 2)},
        "TOKENS": (1, 9),
    }.items():
        monkeypatch.setattr(bench_gpu, name, value)
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py"])
    tiles.choose_tiles.cache_clear()
    with OnTheHost():
        yield bench_gpu
    tiles.choose_tiles.cache_clear()


def test_it_runs_to_its_end(bench, tmp_path, capsys):
    assert bench.main() == 0
    printed = capsys.readouterr().out.splitlines()
    results = json.loads(printed[-1])
    (path,) = tmp_path.glob("results-a-card-*.json")
    assert json.loads(path.read_text()) == results
    assert [(row["tiers"], row["tokens"]) for row in results["rows"]] == [("4", 1), ("4", 9), ("4/2", 1), ("4/2", 9)]
    assert all(row["time_us"] == 0.5e6 for row in results["rows"])  # a second for one replay of two sets
    assert all("cannot be imported here" in note for note in results["vllm_notes"])
    assert "| Mixtral-8x7B | 4/2 | 9 |" in (tmp_path / "README.md").read_text()
    assert "every variant agrees with float64, and repeats its bits" in printed
    assert sum(line.startswith(("reached", "NOT reached")) for line in printed) == 2  # there are no 2 bits, no 4096


def test_wrong_kernels_are_not_measured(bench, monkeypatch, capsys):
    import correctness

    right = correctness.expert_reference
    monkeypatch.setattr(correctness, "expert_reference", lambda *arguments: 1.05 * right(*arguments))
    monkeypatch.setattr(correctness, "COUNTS", (1,))
    monkeypatch.setattr(bench, "measure", None)
    assert bench.main() == 1
    sentences = capsys.readouterr().err.splitlines()
    assert sentences[-1] == "bench_gpu: the kernels are wrong on this card; nothing is measured."
    assert [sentence.split()[1] for sentence in sentences if "relative error 0.0" in sentence] == ["forward", "decode"]
