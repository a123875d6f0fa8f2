"""The one engine: a priority queue of tickets, served by threads and by whoever waits.

A ticket that nobody has begun is run by the thread that waits for it, as far as
the bytes are in memory. A miss on the critical path therefore costs a copy and no
hand-over between threads, while threads fetch ahead whatever computation leaves
them time for.

Prefetch and migration move one projection at a time, and between two of them their
ticket is back in the queue: a demand transfer overtakes there, and there a ticket is
taken back. Where copies are asynchronous, each of these has ended before the next
begins, and none begins while a demand transfer is under way.

A disk may never answer, and a thread inside a read cannot be called back. So what
has to wait for a disk is handed over to a thread that does nothing else, and waited
for with a limit. A read that outlasts it keeps its slot until it ends, and its
thread is replaced.

While a CUDA graph is captured no other thread may ask anything of the device: then
the engine is paused, and threads move nothing but what somebody waits for.
"""

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from vllm_dymoe.experts.layout import EVERY_PROJECTION, BlobKey, Projection
from vllm_dymoe.observe.timeline import Lane, Timeline
from vllm_dymoe.transfer.engine import TransferStats
from vllm_dymoe.transfer.ticket import Reason, State, Ticket, TransferError

_ALL = len(EVERY_PROJECTION)
_SECONDS_TO_CLOSE = 5.0
# After a failure the reads of its step that still run are waited for this long; then they count as late.
_SECONDS_TO_SETTLE = 1.0


class Delivery(Protocol):
    """How bytes get from the store into a slot on one kind of device.

    Attributes:
        timed: whether asynchronous copies take note of when they begin and end.
    """

    timed: bool

    @property
    def occupies_cores(self) -> bool:
        """Whether moving bytes takes the cores that compute."""
        ...

    def demanded_at_once(self, key: BlobKey) -> int:
        """How many projections of a blob a demand transfer moves in one piece; computation begins with the first piece.

        All others move one at a time.
        """
        ...

    def deliver(self, ticket: Ticket, projections: range, *, wait: bool = True) -> Any:
        """Move the bytes. Returns the copy's fence, or None if they are there on return.

        Raises:
            BlockingIOError: without ``wait``, a disk would have to be waited for.
        """
        ...

    def span(self, ticket: Ticket, projections: range) -> slice:
        """Bytes of the slot that projections take."""
        ...

    def name(self, key: BlobKey) -> str:
        """A blob, for people."""
        ...

    def receive(self, fence: Any) -> None:
        """Order computation issued from now on behind ``fence``."""
        ...

    def drain(self, fence: Any) -> None:
        """Block the host until the copy behind ``fence`` has written its last byte."""
        ...

    def happened(self, fence: Any) -> bool:
        """Whether ``drain`` would not block."""
        ...

    def fence(self) -> Any:
        """A fence behind the computation issued so far, or None where computation is synchronous."""
        ...

    def moments(self, fence: Any) -> tuple[Any, Any] | None:
        """When the copy behind ``fence`` began and ended, as marks of the device's clock; None if nobody noted it.

        For a delivery without fences: the last one, or None if that was while ``deliver`` ran.
        """
        ...


class _Turn(NamedTuple):
    """What a running ticket moves before it is pending again.

    Attributes:
        reason: why; the ticket's may change meanwhile.
        projections: which.
    """

    reason: Reason
    projections: range


class QueuedEngine:
    """A :class:`~vllm_dymoe.transfer.engine.TransferEngine` over one delivery.

    Args:
        delivery: the device's way of moving bytes.
        threads: threads that serve the queue; with 0 whoever waits does.
        eager: deliver demand transfers inside ``submit``, for devices where that only enqueues.
        timeout: seconds that a transfer is waited for; None for ever.
        waiters_move: whether whoever waits moves bytes too; not where they share a link whose order matters.
        concurrency: has Lock, Condition and Thread; others than Python's own record or decide what happens when.
    """

    def __init__(
        self,
        delivery: Delivery,
        threads: int,
        *,
        eager: bool = False,
        timeout: float | None = None,
        waiters_move: bool = True,
        concurrency: Any = threading,
    ) -> None:
        self.stats = TransferStats()
        self._timeline: Timeline | None = None
        self._delivery = delivery
        self._eager = eager
        self._queue: list[tuple[Reason, int, Ticket]] = []
        self._order = itertools.count()
        self._concurrency = concurrency
        self._lock = concurrency.Lock()
        self._work = concurrency.Condition(self._lock)  # something is queued
        self._moved = concurrency.Condition(self._lock)  # a ticket is not running any more
        self._left = concurrency.Condition(self._lock)  # something is handed over
        self._closed = False
        self._served = threads > 0  # a queue that nobody serves would only grow
        self._timeout = timeout
        self._waiters_move = waiters_move
        self._demands = 0  # demand transfers that run
        self._busy = 0  # turns that threads of the engine run, or are to run at once
        self._pauses = 0  # how many hold the background up
        self._last_demand: Any = None  # fence of the last one
        self._handed_over: deque[tuple[Ticket, _Turn]] = deque()
        self._threads: set[threading.Thread] = set()
        for _ in range(threads):
            self._start(self._serve)
        if timeout is not None:
            self._start(self._serve_handed_over)

    @property
    def occupies_cores(self) -> bool:
        """Whether transfers take the cores that compute."""
        return self._delivery.occupies_cores

    @property
    def timeline(self) -> Timeline | None:
        """Takes note of transfers and waits; None while nobody wants to know."""
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._timeline, self._delivery.timed = timeline, timeline is not None

    def submit(
        self, key: BlobKey, destination: torch.Tensor, reason: Reason, after: Any = None, projections: int = _ALL
    ) -> Ticket:
        """Queue a transfer; see :class:`~vllm_dymoe.transfer.engine.TransferEngine`.

        Raises:
            RuntimeError: the engine is closed.
        """
        ticket = Ticket(key, destination, reason, after, projections, next(self._order), time.perf_counter())
        with self._lock:
            if self._closed:
                raise RuntimeError("the transfer engine is closed")
            turn = self._enqueue(ticket)
        if turn is not None:
            self._run(ticket, turn)
        return ticket

    def demand(self, ticket: Ticket) -> None:
        """What has not arrived becomes a demand transfer."""
        if ticket.reason is Reason.DEMAND:
            return
        turn = None
        with self._lock:
            ticket.reason, ticket.wanted = Reason.DEMAND, _ALL
            if ticket.state in (State.RESTING, State.FAILED):  # what failed as a guess is tried again
                ticket.state, ticket.ready = State.PENDING, time.perf_counter()
            if ticket.state is State.PENDING:
                turn = self._enqueue(ticket)
        if turn is not None:
            self._run(ticket, turn)

    def wait(self, ticket: Ticket, projections: int = _ALL) -> None:
        """Wait for projections, moving them here if nobody does; may be called again."""
        begin = time.perf_counter()
        try:
            self._wait(ticket, projections)
        finally:
            end, timeline = time.perf_counter(), self._timeline
            self.stats.exposed_wait_seconds += end - begin
            if timeline is not None:
                timeline.add(Lane.HOST, f"wait for {_place(ticket)}", "wait", begin, end)

    def _wait(self, ticket: Ticket, projections: int) -> None:
        self.demand(ticket)
        while True:
            with self._lock:
                if ticket.arrived >= projections or ticket.ended:
                    break
                mine = self._waiters_move and ticket.state is State.PENDING
                turn = self._begin(ticket) if mine else None
            if turn is not None:
                if self._run(ticket, turn, wait=self._timeout is None):
                    continue
                self._hand_over(ticket, turn)
            if not self._block(ticket, projections, self._timeout):
                self._give_up(ticket)
        if ticket.state is State.FAILED:
            raise TransferError(str(ticket.error)) from ticket.error
        if ticket.state is State.CANCELLED:
            raise TransferError(f"the transfer of {ticket.key} was cancelled")
        self._follow(ticket, projections)

    def _follow(self, ticket: Ticket, projections: int) -> None:
        """Order computation behind the copies of the first projections, and of no others: they may still be running."""
        while ticket.followed < len(ticket.fences):
            first, fence = ticket.fences[ticket.followed]
            if first >= projections:
                return
            self._delivery.receive(fence)
            ticket.followed += 1

    def arrived(self, ticket: Ticket) -> bool:
        """Whether the whole blob is there."""
        return ticket.state is State.DONE and all(self._delivery.happened(fence) for _, fence in ticket.fences)

    def settle(self, ticket: Ticket) -> bool:
        """Whether nothing writes the slot any more, after waiting for it once."""
        if not self.cancel(ticket) and not ticket.ended:
            patience = None if self._timeout is None else min(self._timeout, _SECONDS_TO_SETTLE)
            patience = 0 if ticket.late else patience
            if not self._block(ticket, _ALL, patience) and not self._abandon(ticket):
                return False
        for _, fence in ticket.fences:
            self._delivery.drain(fence)
        return True

    def cancel(self, ticket: Ticket) -> bool:
        """Take back a transfer, or what is left of it."""
        with self._lock:
            if ticket.state is State.RUNNING:
                ticket.wanted = 0
            elif not ticket.ended:
                ticket.state = State.CANCELLED
                self._moved.notify_all()
            return ticket.state is State.CANCELLED

    def fence(self) -> Any:
        """A fence behind the computation issued so far."""
        return self._delivery.fence()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, threads move nothing but demand, and only until whoever waits for it has it.

        What they move is waited for on entry. What is queued in the background stays there, and goes on afterwards.

        Raises:
            TransferError: on entry, a read has not ended for as long as the engine waits.
        """
        with self._lock:
            self._pauses += 1
            quiet = self._moved.wait_for(lambda: not self._busy, self._timeout)
        try:
            if not quiet:
                raise TransferError(
                    f"a read has not ended for {self._timeout:g} seconds, which is transfer_timeout_s, and CUDA graphs "
                    "cannot be captured beside it; check the disk."
                )
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._work.notify_all()

    def close(self) -> None:
        """Cancel what waits, finish what runs, end the threads."""
        with self._lock:
            self._closed = True
            waiting = [ticket for _, _, ticket in self._queue]
            self._work.notify_all()
            self._left.notify_all()
            threads = list(self._threads)
        for ticket in waiting:
            self.cancel(ticket)
        # A thread whose read does not end dies with the process.
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- one ticket, from turn to turn; those with "locked" in their docstring are called with the lock held --------

    def _enqueue(self, ticket: Ticket) -> _Turn | None:
        """Locked: let a pending ticket wait for its turn. Returns the turn if the caller is to run it at once."""
        if self._eager and ticket.reason is Reason.DEMAND:
            return self._begin(ticket)
        if self._served:
            heapq.heappush(self._queue, (ticket.reason, ticket.order, ticket))
            self._work.notify()
        return None

    def _begin(self, ticket: Ticket) -> _Turn:
        """Locked: a pending ticket runs."""
        ticket.state, ticket.handed_over = State.RUNNING, False
        demanded = ticket.reason is Reason.DEMAND
        self._demands += demanded
        piece = self._delivery.demanded_at_once(ticket.key) if demanded else 1
        stop = min(ticket.wanted, piece * (ticket.arrived // piece + 1))
        return _Turn(ticket.reason, range(ticket.arrived, stop))

    def _run(self, ticket: Ticket, turn: _Turn | None, *, wait: bool = True) -> bool:
        """Run a ticket as long as it is this thread's; False if a disk is needed and ``wait`` is not set."""
        while turn is not None:
            fence: Any = None
            error: Exception | None = None
            try:
                fence = self._deliver(ticket, turn, wait)
            except BlockingIOError as blocked:
                if not wait:
                    return False
                error = blocked
            except Exception as failure:  # whatever went wrong belongs to whoever waits, not to this thread
                error = failure
            turn = self._end(ticket, turn, fence, error)
        return True

    def _deliver(self, ticket: Ticket, turn: _Turn, wait: bool) -> Any:
        """Move what the turn is for."""
        background = turn.reason is not Reason.DEMAND
        if background and self._last_demand is not None:
            self._delivery.drain(self._last_demand)
        ticket.began = time.perf_counter()
        fence = self._delivery.deliver(ticket, turn.projections, wait=wait)
        if fence is not None:
            if background:
                self._delivery.drain(fence)
            else:
                self._last_demand = fence
        end = time.perf_counter()
        ticket.moved_seconds += end - ticket.began
        timeline = self._timeline
        if timeline is not None:
            moments = self._delivery.moments(fence)
            if fence is None and moments is None:
                moments = ticket.began, end
            if moments is not None:
                what, reason = f"{_place(ticket)}, {_parts(turn.projections)}", turn.reason.name.lower()
                timeline.add(Lane.LINK, what, reason, *moments, bits=ticket.key.bits)
        return fence

    def _end(self, ticket: Ticket, turn: _Turn, fence: Any, error: BaseException | None) -> _Turn | None:
        """A turn has ended, one way or another. Returns the ticket's next one if the caller is to go on with it."""
        with self._lock:
            self._demands -= turn.reason is Reason.DEMAND
            if self._queue and self._demands == 0:
                self._work.notify()
            if error is None:
                self._count(ticket, turn, fence)
            if ticket.arrived == _ALL:
                ticket.state = State.DONE
            elif ticket.wanted == 0 or ticket.late:
                ticket.state = State.CANCELLED
            elif error is not None and turn.reason is ticket.reason:
                ticket.state, ticket.error = State.FAILED, error
            else:  # more of it, or once more what failed as a guess and is in demand by now
                ticket.state = State.PENDING if ticket.arrived < ticket.wanted else State.RESTING
            if error is not None:
                self.stats.failed += 1
            self._moved.notify_all()
            return self._enqueue(ticket) if ticket.state is State.PENDING else None

    def _count(self, ticket: Ticket, turn: _Turn, fence: Any) -> None:
        """Locked: projections have arrived."""
        ticket.arrived = turn.projections.stop
        if fence is not None:
            ticket.fences.append((turn.projections.start, fence))
        span = self._delivery.span(ticket, turn.projections)
        self.stats.bytes_moved[turn.reason] += span.stop - span.start
        self.stats.transfers[ticket.reason] += ticket.arrived == _ALL

    # -- waiting, and giving up --------------------------------------------------------------------

    def _block(self, ticket: Ticket, projections: int, timeout: float | None) -> bool:
        """Wait until projections have arrived, or the ticket is the caller's to move; False if that takes too long."""

        def far_enough() -> bool:
            mine = self._waiters_move and ticket.state is State.PENDING
            return mine or ticket.ended or ticket.arrived >= projections

        with self._lock:
            return self._moved.wait_for(far_enough, timeout)

    def _give_up(self, ticket: Ticket) -> None:
        """Nobody waits any longer for a ticket.

        Raises:
            TransferError: unless it has just ended.
        """
        if self.cancel(ticket) or not self._abandon(ticket):
            self.stats.failed += 1
            raise TransferError(
                f"reading {self._delivery.name(ticket.key)} took longer than transfer_timeout_s, which is "
                f"{self._timeout:g} seconds; check the disk, or raise transfer_timeout_s."
            )

    def _abandon(self, ticket: Ticket) -> bool:
        """Let a running ticket end when it will, with another thread in the place of its own; True if it has ended."""
        with self._lock:
            if ticket.state is not State.RUNNING:
                return True
            if not ticket.late:
                ticket.late = True
                if not self._closed:
                    self._start(self._serve_handed_over if ticket.handed_over else self._serve)
            return False

    # -- threads ------------------------------------------------------------------------------------

    def _start(self, serve: Callable[[], None]) -> None:
        thread = self._concurrency.Thread(target=serve, name="dymoe-transfer", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        # A method of its own, so that no ticket, and with it no slot, is held while there is nothing to do.
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Run the most urgent ticket for a turn; False if this thread has to end."""
        with self._lock:
            while not self._closed and not self._due():
                self._work.wait()
            if self._closed:
                return False
            ticket = heapq.heappop(self._queue)[2]
            if ticket.state is not State.PENDING:  # cancelled, or somebody else runs it
                return True
            turn = self._begin(ticket)
            self._busy += 1
        return self._run_on_thread(ticket, turn)

    def _due(self) -> bool:
        """Locked: whether a ticket may begin. The link is demand's as long as it has any."""
        idle = self._demands == 0 and self._pauses == 0
        return bool(self._queue) and (self._queue[0][0] is Reason.DEMAND or idle)

    def _serve_handed_over(self) -> None:
        while self._serve_one_handed_over():
            pass

    def _serve_one_handed_over(self) -> bool:
        """Run what somebody has left; False if this thread has to end."""
        with self._lock:
            while not self._handed_over and not self._closed:
                self._left.wait()
            if not self._handed_over:
                return False
            ticket, turn = self._handed_over.popleft()
        return self._run_on_thread(ticket, turn)

    def _hand_over(self, ticket: Ticket, turn: _Turn) -> None:
        with self._lock:
            ticket.handed_over = True
            self._busy += 1
            self._handed_over.append((ticket, turn))
            self._left.notify()

    def _run_on_thread(self, ticket: Ticket, turn: _Turn) -> bool:
        """Run a turn; False if this thread has to end, because another one has come in its place meanwhile."""
        self._run(ticket, turn)
        with self._lock:
            self._busy -= 1
            if self._pauses:
                self._moved.notify_all()
            if ticket.late:
                self._threads.discard(threading.current_thread())
            return not ticket.late


def _place(ticket: Ticket) -> str:
    return f"layer {ticket.key.layer}, expert {ticket.key.expert}"


def _parts(projections: range) -> str:
    return "all of it" if len(projections) == _ALL else ", ".join(Projection(i).name.lower() for i in projections)
