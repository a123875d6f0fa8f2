"""`make gpu` from start to end with the host in place of the card.

Its messages when something is wrong are tested, too.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.support.patience import becomes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
SANITIZER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do
    case "$1" in --tool|--error-exitcode|--report-api-errors) tool="$2"; shift 2;; *) exit 2;; esac
done
echo "========= COMPUTE-SANITIZER"
"$@" || exit $?
echo "========= {report}"
echo "========= ERROR SUMMARY: {errors} errors"
exit {status}
"""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card: make gpu")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    import gpu

    return gpu


def sanitizer(folder, report="nothing", errors=0, status=0):
    path = folder / "compute-sanitizer"
    path.write_text(SANITIZER.format(report=report, errors=errors, status=status))
    path.chmod(0o755)
    return str(folder)


def on_the_host(folder, *parts, planted=None, path=None):
    pytest.importorskip("triton")
    readme = folder / "README.md"
    shutil.copy(FOLDER / "README.md", readme)
    environment = os.environ | {"TRITON_INTERPRET": "1", "GPU_README": str(readme), "TMPDIR": str(folder)}
    if planted is not None:
        environment["PLANTED"] = planted
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, str(Path(__file__).with_name("gpu_on_the_host.py")), "--output", str(folder)]
    chosen = ["--parts", *parts] if parts else []
    done = subprocess.run([*command, *chosen], env=environment, capture_output=True, text=True, check=False)
    files = list(folder.glob("gpu-a-card-*.json"))
    return done, json.loads(files[0].read_text()) if files else {}, readme


def test_it_runs_to_its_end(tmp_path):
    """All parts run, with a sanitizer that finds nothing, and without vLLM.

    tests/e2e covers the part that needs vLLM.
    """
    done, results, readme = on_the_host(tmp_path, path=sanitizer(tmp_path))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert done.stderr == ""
    assert results["right"]
    assert results["wrong"] == results["not_run"] == []
    assert {"card", "driver", "cuda", "torch", "triton", "date"} <= results.keys()
    parts = results["parts"]
    counts = {name: len(part["checks"]) for name, part in parts.items()}
    assert counts == {
        "kernels": 1,
        "runtime": 12,
        "graphs": 9,
        "sanitizer": 3,
        "engine": 0,
        "speeds": 11,
    }
    assert parts["engine"]["sentences"][0].startswith("Left out: vLLM is not installed here")
    assert all(part["complete"] for part in parts.values())
    names = [speed["name"] for speed in parts["speeds"]["speeds"]]
    assert len(names) == len(set(names)) == 13
    assert all(speed["bound"] > 0 and speed["measured"] > 0 for speed in parts["speeds"]["speeds"])
    table = readme.read_text().split("<!-- gpu:begin -->\n")[1].split("<!-- gpu:end -->")[0]
    assert "a card, " in table
    assert "| runtime | 12 right |" in table
    assert "| decode decided on the device, misses fetch, 25%, a layer |" in table
    assert table.rstrip("\n") in done.stdout
    assert "gpu: everything that was checked is right." in done.stdout


SPEEDS = {"speeds": 23, "decode": 54, "prompts": 16, "layers": 51}


def test_every_line_of_the_measurements_runs_at_its_true_size(tmp_path):
    """True sizes split a down projection in four, which the small ones above do not."""
    pytest.importorskip("triton")
    program = str(Path(__file__).with_name("gpu_at_true_sizes.py"))
    command = [sys.executable, program, str(tmp_path), "few", *SPEEDS]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    for part, speeds in SPEEDS.items():
        entries = [json.loads(line) for line in (tmp_path / f"{part}.jsonl").read_text().splitlines()]
        assert [entry["wrong"] for entry in entries if entry["kind"] == "check" and entry["wrong"]] == []
        assert sum(entry["kind"] == "speed" for entry in entries) == speeds, part


INVALID_READ = "Invalid __global__ read of size 16 bytes"
PLANTED = {
    "reused slot": {"runtime": r"4 bits, prefetch none: .*: \d+ tokens of layer 0 have other bits"},
    # Of different parts. The sanitizer finds something by itself.
    "no fetches, old input": {
        "runtime": r"minimum: only 0 experts were fetched, so this check proves nothing",
        "graphs": r"decode steps at 100%: .*: step 1, layer 0: other bits than launches at 100% give",
        "sanitizer": f"memcheck finds nothing: {INVALID_READ}; ERROR SUMMARY: 1 errors",
    },
}
"""By faults, the sentences of parts that tell of them."""


@pytest.mark.parametrize("planted", PLANTED)
def test_a_fault_is_found_and_nothing_is_measured(tmp_path, planted):
    path = sanitizer(tmp_path, INVALID_READ, 1, 86)
    done, results, readme = on_the_host(tmp_path, *PLANTED[planted], "speeds", planted=planted, path=path)
    assert done.returncode == 1
    for part, told in PLANTED[planted].items():
        assert any(re.search(f"^{part}: .*{told}", sentence) for sentence in results["wrong"]), results["wrong"]
        assert any(re.search(f"^gpu: {part}: .*{told}", line) for line in done.stderr.splitlines())
    assert done.stderr.endswith("gpu: not right on this machine; no speeds are reported.\n")
    assert results["not_run"] == ["speeds"]
    assert " us" not in done.stdout
    assert readme.read_text() == (FOLDER / "README.md").read_text()


PART = """
import json, pathlib, subprocess, sys, time
result = pathlib.Path(sys.argv[sys.argv.index("--result") + 1])
kind = sys.argv[sys.argv.index("--part") + 1]
lines = [{"kind": "begin", "name": "a check"}]
if kind in ("died", "ended"):
    lines.append({"kind": "check", "name": "a check", "wrong": [], "seconds": 1})
result.write_text("".join(json.dumps(line) + "\\n" for line in lines))
if kind == "hung":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
    print(child.pid, flush=True)
    time.sleep(3600)
if kind == "died":
    sys.exit("CUDA error: an illegal memory access was encountered")
"""


@pytest.fixture
def processes(gpu, monkeypatch, tmp_path):
    import processes

    program = tmp_path / "part.py"
    program.write_text(PART)
    monkeypatch.setattr(processes, "PROGRAM", [sys.executable, "-S", str(program)])
    return processes


def test_a_part_that_hangs_is_ended_with_all_that_it_started(processes, tmp_path):
    told = []
    found = processes.run_part("hung", 3, tmp_path, told.append)
    assert found.failure.startswith('not finished after 3 seconds, in the middle of "a check"; the stacks')
    assert told == [{"kind": "begin", "name": "a check"}]
    child = int((tmp_path / "hung.log").read_text())
    state = Path(f"/proc/{child}/stat")
    # Z: dead, but not reaped yet.
    assert becomes(lambda: not state.exists() or state.read_text().split()[2] == "Z", 20), "what it started still runs"


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("died", "it ended with exit status 1 between two checks: CUDA error: an illegal memory access"),
        ("ended", "it ended with exit status 0 between two checks: it printed nothing"),
    ],
)
def test_a_part_that_does_not_come_to_its_end_has_failed(processes, tmp_path, kind, failure):
    found = processes.run_part(kind, 60, tmp_path, lambda entry: None)
    assert found.failure.startswith(failure)
    assert found.wrong == [found.failure]


def test_missing_packages_are_named_before_anything_runs(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "missing", lambda *names: ["pydantic", "xxhash"] if "xxhash" in names else [])
    monkeypatch.setattr(gpu, "_run", lambda *arguments: 0)
    assert gpu.main([]) == 1
    sentence = capsys.readouterr().err
    assert f"has no pydantic and no xxhash: {sys.executable} -m pip install pydantic xxhash, or name a" in sentence
    assert sentence.count("\n") == 1
    assert gpu.main(["--parts", "kernels"]) == 0


def test_the_named_packages_are_enough(gpu):
    """Besides torch's, the parts need only the dependencies that the command names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {re.split(r"[^\w-]", name)[0].replace("-", "_") for name in project["dependencies"]}
    absent = sorted(ours - {"torch", *gpu._PACKAGE} | {"vllm", "transformers", "prometheus_client"})
    assert absent
    program = (
        f"import sys; [sys.modules.__setitem__(name, None) for name in {absent}]; "
        "from parts import decode, engine, graphs, kernels, machine, prompts, runtime, sanitizer, serving, speeds; "
        "print('all')"
    )
    packages = str(Path(torch.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (FOLDER, ROOT, packages)))},
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert done.stdout == "all\n", done.stderr


def test_a_wheel_comes_together_from_its_pieces_or_says_which_are_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    import wheel_parts

    wheel, pieces, into = tmp_path / "some.whl", tmp_path / "pieces", tmp_path / "into"
    wheel.write_bytes(bytes(range(256)) * 9000)  # 2.2 MiB
    assert wheel_parts.main(["split", str(wheel), str(pieces), "--mib", "1"]) == 0
    assert wheel_parts.main(["join", str(pieces), str(into)]) == 0
    assert (into / "some.whl").read_bytes() == wheel.read_bytes()
    (pieces / "001.piece").write_bytes(b"other bytes")
    (pieces / "002.piece").unlink()
    assert wheel_parts.main(["join", str(pieces), str(into)]) == 1
    assert "001.piece, 002.piece" in capsys.readouterr().err


def test_routers_of_dummy_weights_choose_experts_by_zipfs_law(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from parts import serving

    generator = torch.Generator().manual_seed(0)
    weights = serving.router_weights(64, 256, 8, generator)
    chosen = (torch.randn(4000, 256, generator=generator) @ weights.T).topk(8).indices
    load = chosen.flatten().bincount(minlength=64).sort(descending=True).values / 4000
    assert 0.3 < load[0] < 0.6
    assert load[16] < load[0] / 2
    assert load[63] < load[0] / 8


def test_every_engine_that_is_measured_has_settings_that_vllm_knows():
    vllm = pytest.importorskip("vllm")
    sys.path.insert(0, str(FOLDER))
    try:
        from parts import serving
    finally:
        sys.path.remove(str(FOLDER))
    known = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    for settings in serving.ENGINES.values():
        assert settings.keys() | serving.SETTINGS.keys() <= known
