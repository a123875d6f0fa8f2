"""How a machine is measured while others use it, and what of that is kept."""

import json
import os
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.plan.test_start import CPU
from vllm_dymoe.plan import machine as plan_machine
from vllm_dymoe.plan.device import DenseRate
from vllm_dymoe.plan.machine import IN_VLLM, ROWS, Others, Probe, machine_here, measure

HERTZ = os.sysconf("SC_CLK_TCK")
QUIET, BUSY = 0.05, 0.4  # shares of the cores that others use


def line(core, *, user=0.0, idle=0.0, stolen=0.0):
    """Return a core's line of /proc/stat, from seconds."""
    return f"cpu{core} {user * HERTZ:.0f} 0 0 {idle * HERTZ:.0f} 7 0 0 {stolen * HERTZ:.0f} 9 9\n"


@pytest.mark.parametrize(
    ("then", "ours", "limit", "share"),
    [
        (line(0, user=1, idle=9) + line(3, user=5, idle=5), 6, 2, 0.0),
        (line(0, user=5, idle=5) + line(3, user=5, idle=5), 6, 2, 0.2),
        (line(0, user=1, idle=9) + line(3, user=5, stolen=4), 6, 2, 0.2),
        (line(0, user=6) + line(1, user=9) + line(3), 6, 2, 0.0),  # core 1 is not ours
        (line(0, user=10) + line(3, user=5, idle=5), 5, 1, 0.0),  # a container's limit leaves a core to others
        (line(0, user=10) + line(3, user=8, idle=2), 5, 1, 0.3),
        (line(0) + line(3), 1, 2, 0.0),  # a sandbox that counts nothing
    ],
)
def test_others_are_what_the_cores_of_this_process_do_besides(tmp_path, monkeypatch, then, ours, limit, share):
    """Cores have numbers of their own: those that are off are not listed."""
    clock, used = iter((100.0, 110.0)), iter(((5.0, 0.0), (5.0 + ours, 0.0)))
    monkeypatch.setattr(plan_machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(os, "times", lambda: (*next(used), 0.0, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3})
    monkeypatch.setattr(plan_machine, "usable_cores", lambda: limit)
    monkeypatch.setattr(plan_machine, "_STAT", tmp_path / "stat")
    (tmp_path / "stat").write_text(f"{line(' ', user=99)}{line(0)}{line(1)}{line(3)}intr 1 2 3\n")
    others = Others()
    (tmp_path / "stat").write_text(f"{line(' ', user=199)}{then}intr 1 2 3\n")
    assert others.share() == pytest.approx(share)


@pytest.fixture
def probe(tmp_path):
    return Probe(str(tmp_path / "store"), 256, 64, 2, 8, 2, 1 << 16)


@pytest.fixture
def runs(monkeypatch):
    """Replace the programs that measure; each run takes the next of both lists.

    They are the shares of others, and the rates.
    """
    found = SimpleNamespace(others=[], rates=[], environments=[])

    def run(command, *, env, **_):
        found.environments.append(env)
        others, rate = found.others.pop(0), found.rates.pop(0) if found.rates else 1.0
        told = {"kernel": "TheKernel", "rates": [rate * 1e9] * len(ROWS), "others": others}
        if command[2] != IN_VLLM:
            dense = tuple(DenseRate(16, tokens, rate * 1e9) for tokens in ROWS)
            told = CPU.model_copy(update={"dense": dense, "disk": rate * 1e9, "others": others}).model_dump()
        return subprocess.CompletedProcess(command, 0, f"a line\n{json.dumps(told)}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    return found


def weights_of(machine, fmt=""):
    return {rate.weights for rate in machine.dense if rate.format == fmt}


def test_where_others_disturb_it_is_measured_again_and_the_best_counts(tmp_path, probe, runs):
    runs.others, runs.rates = [BUSY, QUIET, QUIET, QUIET], [0.1, 2.0, 3.0, 0.5]
    found = machine_here(probe, tmp_path / "machines.json")
    assert runs.others == [], "each run has both ways to wait"
    assert weights_of(found) == {3e9}
    assert found.disk == 3e9
    assert not found.disturbed
    again = machine_here(probe, tmp_path / "machines.json")
    assert again == found.model_copy(update={"host_memory": again.host_memory}), "kept, and not measured"


def test_rates_that_others_disturbed_to_the_end_are_used_and_not_kept(tmp_path, probe, runs):
    for _ in range(2):
        runs.others, runs.rates = [QUIET, BUSY] * 3, [1.0, 1.0, 0.1, 2.0, 1.0, 1.0]
        found = machine_here(probe, tmp_path / "machines.json")
        assert runs.others == [], "three times, and at the next start again"
        assert weights_of(found) == {2e9}
        assert (found.disturbed, found.others) == (True, BUSY)


@pytest.mark.parametrize(("others", "disturbed"), [([BUSY, BUSY, QUIET], False), ([BUSY] * 3, True)])
def test_a_checkpoints_own_layers_are_measured_again_too(tmp_path, probe, runs, others, disturbed):
    probe = replace(probe, held=1 << 16, bits=4.5, held_format="f")
    runs.others, runs.rates = [QUIET, QUIET, *others], [1.0, 1.0, 0.1, 3.0, 2.0]
    found = machine_here(probe, tmp_path / "machines.json")
    assert runs.others == []
    assert weights_of(found, "f") == {3e9}
    assert found.disturbed == disturbed
    assert (tmp_path / "machines.json").exists() != disturbed


def test_folders_that_cannot_be_made_leave_the_disk_out(tmp_path, probe, runs):
    (tmp_path / "file").touch()
    runs.others = [QUIET, QUIET]
    machine_here(replace(probe, folder=str(tmp_path / "file/store")), tmp_path / "file/cache/machines.json")
    assert plan_machine._disk_rate(tmp_path / "file/store") is None


@pytest.mark.parametrize(("binding", "heeded"), [(None, False), ("auto", False), ("0-3", False), ("nobind", True)])
def test_threads_are_a_servers(tmp_path, probe, runs, monkeypatch, binding, heeded):
    """vLLM's workers heed OMP_NUM_THREADS only if vLLM does not bind their threads."""
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if binding is not None:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    keys = set()
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        runs.others = [QUIET, QUIET]
        machine_here(probe, tmp_path / "machines.json", retune=True)
        assert runs.environments[-1].get("OMP_NUM_THREADS") == (threads if heeded else None)
        keys.add(probe.key)
    assert len(keys) == 1 + heeded


def test_threads_keep_to_a_containers_limit(probe, monkeypatch):
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(plan_machine, "threads_within_quota", lambda threads: threads - 1)
    monkeypatch.setattr(plan_machine, "rates", lambda: seen.append(torch.get_num_threads()) or 1 / 0)
    torch._C.set_num_threads(3)
    try:
        with pytest.raises(ZeroDivisionError):
            measure(probe)
    finally:
        torch._C.set_num_threads(before)
    assert seen == [2]
