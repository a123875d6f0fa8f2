"""Experts on disk, in device-planned steps.

A thread reads what a plan asks for, and the device waits. A plan posts its misses to a queue in memory that both map
(``kernels.cpu_queue``). The thread answers with addresses in pinned memory, which stay valid until the device posts
again: by then it has read what it was given. So a captured step waits for a disk as it waits for CPU execution, and
the host that launches it does not wait.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import ExitStack

import torch
from torch import Tensor

from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.pages import map_bytes
from vllm_dymoe.cache.store import HostStore, StoreError
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.kernels.cpu_queue import Ask, QueueMemory, QueueShape, native_library
from vllm_dymoe.planner.rule import HIGH, LOW

_DEPTH = 4  # a step waits for each answer before it posts again


class DiskQueue:
    """Reads what device-planned steps miss from a store that is not all in memory.

    Args:
        store: files, or host memory over them that has no room for everything. Slots that it keeps are lent; everything
            else is read into this object's own memory, which has room for a layer's experts.
        timeout: seconds that the reads of a layer may take; None for no limit.
        device: of the plans.
        pin: pins memory for the device; returns the reason why that failed, or None.

    Attributes:
        turn: int64 [3] on the device: the last number posted, the running layer's number or 0, and the queue's address.
        bits: of the slices that LOW and HIGH name; set by :meth:`serve`.

    Raises:
        OSError: the memory cannot be allocated or pinned.
        ValueError: there is no native library.
    """

    def __init__(
        self, store: HostStore, timeout: float | None, device: torch.device, pin: Callable[[Tensor], str | None]
    ) -> None:
        self._store, self._timeout, experts = store, timeout, store.experts
        shape = QueueShape(_DEPTH, experts.num_experts, 1, experts.num_experts, 4, torch.bfloat16)
        memory = map_bytes(shape.nbytes)
        memory.zero_()
        each = -(-max(fmt.nbytes for fmt in experts.all_formats) // 4096) * 4096
        count = experts.num_experts * max(len(fmt.slices) for fmt in experts.all_formats)
        self._memory = memory, map_bytes(count * each)
        self._landing = list(self._memory[1][: count * each].view(count, each))  # free places of the largest slice
        for some in self._memory:
            if (reason := pin(some)) is not None:
                raise OSError(f"{some.numel()} bytes for reading from disk cannot be pinned for the device ({reason})")
        self.queue, self._library = QueueMemory(shape, memory), native_library()
        self.turn = torch.tensor([0, 0, self.queue.address], device=device)
        self.bits: dict[int, int] = {}
        self._lent, self._lock = ExitStack(), threading.Lock()
        self._why: dict[int, str] = {}
        self._reads = ThreadPoolExecutor(max(1, store.depth), "dymoe reads")
        self._thread = threading.Thread(target=self._answer, name="dymoe brings", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.turn.nbytes

    def serve(self, bits: dict[int, int]) -> None:
        """Bring these slices from the next step on: their bits, by LOW and HIGH."""
        self.bits = dict(bits)

    def why(self, layer: int) -> str:
        """Return why the last failed read of one of a layer's experts failed."""
        return self._why.get(layer, "an expert could not be read")

    def release(self) -> None:
        """Give back the host memory that the last layer was lent.

        Called between two steps, once the device has finished.
        """
        with self._lock:
            self._lent.close()

    def close(self) -> None:
        """Stop the threads; no step may be running."""
        self.queue.control.stop = 1
        self._thread.join()
        self.release()
        self._reads.shutdown(wait=False)

    def _answer(self) -> None:
        address, number = self.queue.address, 1
        while self._library.wait_posted(address, number):
            entry = self.queue.entry(number)
            layer, count = int(entry.header[1]), int(entry.header[3])
            with self._lock:
                self._lent.close()  # the device has read it
                try:
                    self._bring(layer, entry.calls[:count])
                except Exception as error:  # a thread that ends would leave the device waiting
                    entry.calls[:count, Ask.ADDRESS :] = 0
                    self._why[layer] = f"reading experts from {self._store.description} failed: {error!r}"
            self._library.answered(address, number)
            number += 1

    def _bring(self, layer: int, calls: Tensor) -> None:
        """Write the addresses of what calls ask for; 0 for what cannot be read.

        Args:
            calls: int64 [experts, 8]; the columns from ``Ask.ADDRESS`` on are written.
        """
        listed = enumerate(calls.tolist())
        asked = [(number, part, key) for number, call in listed for part, key in self._keys(layer, call)]
        calls[:, Ask.ADDRESS :] = 0
        if isinstance(self._store, HostCache):
            self._store.expect(layer, [key for _, _, key in asked])
        until = None if self._timeout is None else time.monotonic() + self._timeout
        reads = [self._read(key, until) for _, _, key in asked]
        for (number, part, _), read in zip(asked, reads, strict=True):
            try:
                calls[number, Ask.ADDRESS + part] = read()
            except (StoreError, TransferError) as error:
                self._why[layer] = str(error)
            except LateError:
                late = f"has not ended within {self._timeout:g} seconds (transfer_timeout_s)"
                self._why[layer] = f"a read from {self._store.description} {late}; check the disk"

    def _keys(self, layer: int, call: list[int]) -> Iterator[tuple[int, SliceKey]]:
        """Yield the slices that a call asks for, each with its number."""
        nested = any(fmt.nested for fmt in self._store.experts.all_formats)
        for part in range(2):
            if call[Ask.NEEDS + part]:
                code = (LOW, HIGH)[part] if nested else call[Ask.CODE]
                yield part, SliceKey(layer, call[Ask.EXPERT], self.bits[code])

    def _read(self, key: SliceKey, until: float | None) -> Callable[[], int]:
        """Begin to read a slice; return a function that waits for its address.

        The function raises the error of a read that failed.
        """
        store = self._store
        if isinstance(store, HostCache) and store.keeps(key):  # what passes through has to make room at once
            return lambda: self._lent.enter_context(store.hold(key)).packed.data_ptr()
        if not self._landing:
            refused: Future[int] = Future()
            refused.set_exception(StoreError("reads that were given up have not ended; check the disk"))
            return refused.result
        place = self._landing.pop()
        packed = place[: store.experts.format(key).nbytes]
        future = self._reads.submit(store.read_into, key, packed)

        def wait() -> int:
            try:
                future.result(None if until is None else max(0.0, until - time.monotonic()))
            finally:
                # A place that is still written stays out of use until that ends.
                self._lent.callback(lambda: future.add_done_callback(lambda _: self._landing.append(place)))
            return packed.data_ptr()

        return wait
