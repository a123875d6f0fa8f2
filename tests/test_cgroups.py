"""How many threads a container may keep busy; it bounds thread pools and torch."""

import os

import pytest
import torch

from vllm_dymoe import cgroups
from vllm_dymoe.vllm_plugin.threads import keep_to_quota


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "1000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu.max": "?"}, 8),
        ({"own/cpu.max": "200000 100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_threads_follow_what_a_container_may_use(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path)
    monkeypatch.setattr(cgroups, "_OWN_CGROUPS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/own\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cgroups.usable_cores() == cores


@pytest.fixture
def quota(tmp_path, monkeypatch):
    """A machine with four cores, and a container limited to two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path)
    monkeypatch.setattr(cgroups, "_OWN_CGROUPS", tmp_path / "none")
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    before = torch.get_num_threads()
    torch._C.set_num_threads(4)
    yield
    torch._C.set_num_threads(before)


@pytest.mark.parametrize(
    ("environment", "device", "ranks", "threads"),
    [
        ({}, "cpu", 1, 2),
        ({}, "cpu", 2, 1),
        ({}, "cuda", 1, 4),
        ({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, "cpu", 1, 2),
        ({"OMP_NUM_THREADS": "4"}, "cpu", 1, 2),  # as vLLM sets it: a thread for each core
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, "cpu", 1, 4),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, "cpu", 1, 2),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "4"}, "cpu", 1, 4),
    ],
)
def test_torch_has_no_more_threads_unless_the_user_says_so(quota, monkeypatch, environment, device, ranks, threads):
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    keep_to_quota(device, ranks)
    assert torch.get_num_threads() == threads
