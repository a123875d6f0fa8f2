"""How much memory there is: the machine's, or what a container may take."""

from types import SimpleNamespace

import pytest

from vllm_dymoe.experts import memory


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    return tmp_path


def test_without_a_container_it_is_the_machines(machine):
    assert memory.available_host_memory() == 1000


def test_no_limit_is_no_limit(machine):
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("300\n")
    assert memory.available_host_memory() == 1000


@pytest.mark.parametrize(("limit", "used", "left"), [(500, 300, 200), (500, 600, 0), (5000, 300, 1000)])
def test_a_containers_limit_counts(machine, limit, used, left):
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text(f"{used}\n")
    assert memory.available_host_memory() == left


def test_the_page_cache_is_no_use(machine):
    (machine / "memory.max").write_text("500")
    (machine / "memory.current").write_text("450")
    (machine / "memory.stat").write_text("anon 100\ninactive_file 200\nactive_file 50\n")
    assert memory.available_host_memory() == 300


def test_the_first_version_of_control_groups(machine):
    (machine / "memory").mkdir()
    (machine / "memory" / "memory.limit_in_bytes").write_text("700")
    (machine / "memory" / "memory.usage_in_bytes").write_text("100")
    assert memory.available_host_memory() == 600
