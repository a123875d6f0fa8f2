"""Host memory: how much there is, and mappings that take what was asked for and give it back."""

import ctypes
import errno
import gc
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_dymoe import host_memory
from vllm_dymoe.host_memory import drop_pages, map_bytes, prefer_node, several_nodes, whole_pages

PAGE = mmap.PAGESIZE
MIB = 2**20


def resident(memory):
    """Bytes of a mapping that are there, by the kernel's own account of each page."""
    first = memory.data_ptr() // PAGE
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("the system does not tell which pages are there")
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(first * 8)
        entries = pagemap.read(whole_pages(memory.numel()) // PAGE * 8)
    return PAGE * sum(entries[7::8][page] >> 7 for page in range(len(entries) // 8))


def mapped(address):
    """Whether any of the process's mappings holds an address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 324 * MIB // 16 + 12345])
def test_a_mapping_takes_its_bytes_and_the_rest_of_a_page(nbytes):
    memory = map_bytes(nbytes)
    assert (memory.numel(), memory.dtype) == (nbytes, torch.uint8)
    assert memory.data_ptr() % PAGE == 0
    memory.fill_(0xEE)
    assert nbytes <= resident(memory) < nbytes + PAGE


def test_no_bytes_need_no_mapping():
    assert map_bytes(0).numel() == 0


def test_memory_goes_with_the_last_tensor_over_it():
    memory = map_bytes(40 * MIB)
    address, part = memory.data_ptr() + 30 * MIB, memory[30 * MIB :]
    memory.fill_(1)
    del memory
    gc.collect()
    assert part.sum() == 10 * MIB
    assert mapped(address)
    del part
    gc.collect()
    assert not mapped(address)


def test_pages_can_go_before_the_tensors_do():
    memory = map_bytes(9 * MIB + 5)
    memory.fill_(1)
    drop_pages(memory)
    assert resident(memory) == 0
    assert not memory.any()
    drop_pages(map_bytes(0))


def test_too_much_is_an_error_and_no_crash():
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        map_bytes(2**60)


def test_pages_come_from_the_node_that_was_named():
    memory = map_bytes(4 * MIB)
    reason = prefer_node(memory, 0)
    if reason is not None:
        assert reason in (os.strerror(errno.EPERM), os.strerror(errno.ENOSYS))
        pytest.skip(f"may not bind memory here: {reason}")
    policy, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    get_mempolicy, by_address = {"x86_64": 239, "aarch64": 236}[os.uname().machine], ctypes.c_ulong(2)
    for offset in (0, memory.numel() - 1):
        place = ctypes.c_void_p(memory.data_ptr() + offset)
        libc = ctypes.CDLL(None, use_errno=True)
        bits = ctypes.c_ulong(1024)
        assert libc.syscall(ctypes.c_long(get_mempolicy), ctypes.byref(policy), mask, bits, place, by_address) == 0
        assert (policy.value, mask[0]) == (1, 1), "preferred, node 0"


def test_a_node_that_does_not_exist_is_a_reason_and_no_error():
    assert prefer_node(map_bytes(PAGE), 999)


def test_an_unknown_processor_is_a_reason(monkeypatch):
    monkeypatch.setattr(host_memory, "_MBIND", {})
    assert "unknown" in prefer_node(map_bytes(PAGE), 0)


@pytest.mark.parametrize(("text", "several"), [("0\n", False), ("0-1\n", True), ("0,2\n", True), (None, False)])
def test_one_node_is_not_several(tmp_path, monkeypatch, text, several):
    if text is not None:
        (tmp_path / "online").write_text(text)
    monkeypatch.setattr(host_memory, "_NODES", tmp_path / "online")
    assert several_nodes() is several


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    return tmp_path


def test_without_a_container_it_is_the_machines(machine):
    assert host_memory.available_host_memory() == 1000


def test_no_limit_is_no_limit(machine):
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("300\n")
    assert host_memory.available_host_memory() == 1000


@pytest.mark.parametrize(("limit", "used", "left"), [(500, 300, 200), (500, 600, 0), (5000, 300, 1000)])
def test_a_containers_limit_counts(machine, limit, used, left):
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text(f"{used}\n")
    assert host_memory.available_host_memory() == left


def test_the_page_cache_is_no_use(machine):
    (machine / "memory.max").write_text("500")
    (machine / "memory.current").write_text("450")
    (machine / "memory.stat").write_text("anon 100\ninactive_file 200\nactive_file 50\n")
    assert host_memory.available_host_memory() == 300


def test_the_first_version_of_control_groups(machine):
    (machine / "memory").mkdir()
    (machine / "memory" / "memory.limit_in_bytes").write_text("700")
    (machine / "memory" / "memory.usage_in_bytes").write_text("100")
    assert host_memory.available_host_memory() == 600
