"""What steps ask of a host cache: slices that are in use, that are needed now, and predictions."""

import contextlib
import threading
from collections.abc import Iterable, Iterator

from vllm_dymoe.cache.store import StoreError
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.host_slots import Held, HostSlots
from vllm_dymoe.cache.transfer.ticket import Reason, State, TransferError
from vllm_dymoe.experts.format import SliceKey

_POLL_SECONDS = 1e-3  # where more slices are asked for at once than there are slots


class HostReads:
    """Reads into the slots of a level; ``changed`` is the lock of all that concerns them."""

    def __init__(self, slots: HostSlots, engine: TransferEngine) -> None:
        self._slots, self._engine = slots, engine
        self.changed = threading.Condition()
        self._expected: set[SliceKey] = set()  # of the layer that computes: the rule knows

    @contextlib.contextmanager
    def hold(self, key: SliceKey, projections: range, wait: bool) -> Iterator[Held]:
        held = self._arrive(key, wait, first=projections.start == 0)
        try:
            yield held
        finally:
            self._leave(held)

    def _arrive(self, key: SliceKey, wait: bool, first: bool) -> Held:
        while True:
            held = self._use(key, wait, first)
            first = False
            ticket = held.ticket
            if ticket is None:
                return held
            try:
                if not wait and not self._engine.arrived(ticket):
                    raise BlockingIOError("a disk has to be waited for")
                self._engine.wait(ticket)
            except BaseException as error:
                self._leave(held)
                if not isinstance(error, TransferError):
                    raise
                if ticket.state is not State.CANCELLED:  # a prediction that was dropped just now is asked for again
                    raise StoreError(str(error)) from error
            else:
                return held

    def _leave(self, held: Held) -> None:
        with self.changed:
            held.users -= 1
            self._slots.collect()
            if held.dropped and not held.users:
                self._slots.free(held)
            self.changed.notify_all()

    def _use(self, key: SliceKey, wait: bool, first: bool) -> Held:
        with self.changed:
            self._slots.collect()
            if first and key not in self._expected:
                self._slots.expect(key.layer, [key])
            while key not in self._slots.held and not self._slots.begin(key, Reason.DEMAND):
                if not wait:
                    raise BlockingIOError("every slot is in use")
                in_use = any(one.users for one in (*self._slots.held.values(), *self._slots.orphans))
                if not self._slots.coming and not in_use:
                    raise StoreError("every slot of host memory belongs to a read that has not ended; check the disk.")
                self.changed.wait(_POLL_SECONDS)
                self._slots.collect()
            held = self._slots.held[key]
            held.users += 1
            if key in self._slots.passing:
                self._slots.passing.move_to_end(key)
            return held

    def expect(self, layer: int, keys: list[SliceKey]) -> None:
        """What a layer's step needs and the device lacks: decide what stays, and begin all reads at once."""
        with self.changed:
            self._slots.collect()
            for held in self._slots.passing.values():
                held.prediction &= held.key is not None and held.key.layer != layer
            self._expected = set(keys)
            self._slots.expect(layer, keys)

    def prefetch(self, keys: Iterable[SliceKey]) -> None:
        """Predictions about later layers, the best first: read them into slots that are idle, when nothing is in
        demand."""
        with self.changed:
            self._slots.collect()
            for key in keys:
                if key not in self._slots.held and not self._slots.begin(key, Reason.PREFETCH):
                    return

    def has(self, key: SliceKey) -> bool:
        """Whether a slice is there, so that nothing waits for a disk."""
        with self.changed:
            self._slots.collect()
            held = self._slots.held.get(key)
            return held is not None and held.ticket is None
