"""Host memory: how much is available, and mappings that reserve and release it."""

import ctypes
import errno
import gc
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_dymoe import cgroups
from vllm_dymoe.cache import pages
from vllm_dymoe.cache.pages import drop_pages, map_bytes, prefer_node, several_nodes, whole_pages

PAGE = mmap.PAGESIZE
MIB = 2**20


def resident(memory):
    """Return the resident bytes of a mapping, as the kernel counts its pages."""
    first = memory.data_ptr() // PAGE
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("the policy does not tell which pages are there")
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(first * 8)
        entries = pagemap.read(whole_pages(memory.numel()) // PAGE * 8)
    return PAGE * sum(entries[7::8][page] >> 7 for page in range(len(entries) // 8))


def mapped(address):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 324 * MIB // 16 + 12345])
def test_a_mapping_takes_its_bytes_and_the_rest_of_a_page(nbytes):
    memory = map_bytes(nbytes)
    assert (memory.numel(), memory.dtype) == (nbytes, torch.uint8)
    assert memory.data_ptr() % PAGE == 0
    memory.fill_(0xEE)
    assert nbytes <= resident(memory) < nbytes + PAGE


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
    drop_pages(map_bytes(0))  # an empty mapping has no pages


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


def test_what_cannot_be_bound_is_a_reason_and_no_error(monkeypatch):
    assert prefer_node(map_bytes(PAGE), 999)
    monkeypatch.setattr(pages, "_MBIND", {})
    assert "unknown" in prefer_node(map_bytes(PAGE), 0)


@pytest.mark.parametrize(("text", "several"), [("0\n", False), ("0-1\n", True), ("0,2\n", True), (None, False)])
def test_one_node_is_not_several(tmp_path, monkeypatch, text, several):
    if text is not None:
        (tmp_path / "online").write_text(text)
    monkeypatch.setattr(pages, "_NODES", tmp_path / "online")
    assert several_nodes() is several


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 1000),
        ({"memory.max": "max", "memory.current": 300}, 1000),
        ({"memory.max": 500, "memory.current": 300}, 200),
        ({"memory.max": 500, "memory.current": 600}, 0),
        ({"memory.max": 5000, "memory.current": 300}, 1000),
        # The page cache counts as used, but is dropped when memory is short.
        ({"memory.max": 500, "memory.current": 450, "memory.stat": "anon 100\ninactive_file 200\nactive_file 50"}, 300),
        # Control groups, version 1.
        ({"memory/memory.limit_in_bytes": 700, "memory/memory.usage_in_bytes": 100}, 600),
    ],
)
def test_a_containers_limit_counts_where_there_is_one(tmp_path, monkeypatch, files, available):
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path)
    monkeypatch.setattr(pages.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert pages.available_host_memory() == available


@pytest.mark.skipif(not Path("/sys/devices/system/node").is_dir(), reason="the kernel knows no nodes")
def test_nodes_are_asked_for_where_the_kernel_lists_them():
    assert pages._NODES.read_text().strip()
