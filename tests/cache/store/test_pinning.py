"""Pinned memory: what is pinned, in which order, and by which calls to the device."""

import gc
from types import SimpleNamespace

import pytest
import torch

from tests.cache.store.pinners import RecordedPinner
from tests.cache.test_pages import mapped
from vllm_dymoe.cache import slots
from vllm_dymoe.cache.pages import whole_pages
from vllm_dymoe.cache.slots import Arena
from vllm_dymoe.cache.store import pinning
from vllm_dymoe.cache.store.pinning import CudaPinner, node_of


def test_whole_pages_are_pinned_and_unpinned_while_they_are_still_there():
    class Pinner(RecordedPinner):
        def unpin(self, address):
            assert mapped(address), "memory was unmapped while it was pinned"
            super().unpin(address)

    pinner = Pinner()
    arena = Arena(10_000, pinner)
    address = arena.memory.data_ptr()
    assert pinner.calls == [], "it is filled first"
    assert arena.pin() is None
    assert pinner.pinned == {address: whole_pages(10_000)}
    arena.close()
    arena.close()
    assert pinner.calls == [("pin", address), ("unpin", address)]
    gc.collect()
    assert not mapped(address)


def test_an_arena_that_was_not_closed_is_unpinned_when_it_goes():
    pinner = RecordedPinner(refuse=1)
    arenas = [Arena(10_000, pinner) for _ in range(2)]
    assert [arena.pin() for arena in arenas] == [None, "CUDA error 2: out of memory"]
    arenas.clear()
    gc.collect()
    assert not pinner.pinned


def test_an_arena_lies_near_its_device(monkeypatch):
    asked = []
    monkeypatch.setattr(slots, "prefer_node", lambda memory, node: asked.append(node) or "forbidden")
    assert Arena(1, RecordedPinner(node=1)).unbound == "forbidden"
    assert Arena(1, RecordedPinner(node=None)).unbound is None
    assert Arena(1, None).unbound is None
    assert asked == [1]


class Server:
    def __init__(self, code=0):
        self.code, self.calls = code, []

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        self.calls.append(("register", address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append(("unregister", address))
        return self.code

    def cudaGetErrorString(self, code):  # noqa: N802
        return f"error {code} in words"


class Cuda:
    """The part of ``torch.cuda`` that a pinner needs, without a device."""

    def __init__(self, monkeypatch, server):
        self.calls = server.calls
        properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: server)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "device", torch.device)  # also a context manager
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.calls.append(("synchronize",)))
        real = torch.ones
        monkeypatch.setattr(torch, "ones", lambda *shape, device, dtype: self.calls.append(("launch",)) or real(*shape))
        self.pinner = CudaPinner(torch.device("cpu"))


def test_the_device_is_told_and_waited_for_before_it_forgets(monkeypatch):
    asked = []
    monkeypatch.setattr(pinning, "node_of", asked.append)
    cuda = Cuda(monkeypatch, Server())
    assert asked == ["0000:3b:00.0"]
    assert cuda.pinner.pin(4096, 8192) is None
    cuda.pinner.unpin(4096)
    portable, mapped_for_kernels = 1, 2
    assert cuda.calls == [
        ("register", 4096, 8192, portable | mapped_for_kernels),
        ("synchronize",),
        ("unregister", 4096),
    ]


def test_an_error_of_the_device_is_a_reason_and_is_cleared(monkeypatch):
    """CUDA keeps its last error until the next launch, so a kernel is launched."""
    cuda = Cuda(monkeypatch, Server(code=2))
    assert cuda.pinner.pin(4096, 8192) == "CUDA error 2: error 2 in words"
    assert cuda.calls[-1] == ("launch",)


@pytest.mark.parametrize(
    ("several", "text", "node"), [(True, "1\n", 1), (True, "-1\n", None), (False, "1\n", None), (True, None, None)]
)
def test_the_node_of_a_device(tmp_path, monkeypatch, several, text, node):
    monkeypatch.setattr(pinning, "several_nodes", lambda: several)
    monkeypatch.setattr(pinning, "_PCI_DEVICES", tmp_path)
    if text is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "numa_node").write_text(text)
    assert node_of("0000:3b:00.0") == node
