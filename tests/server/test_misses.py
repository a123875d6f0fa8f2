"""How misses are served on an emulated card: chosen by measuring steps, then kept."""

import itertools

import pytest
import torch

from tests.executor.device_planned import check_device_planned, decode, rates_of
from tests.executor.steps import CPU, random_step
from tests.small_model import make_experts, make_store
from vllm_dymoe.kernels import Activation, native
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.planner.constants import Cost
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.server.misses import choose_misses

pytestmark = pytest.mark.skipif(native.load() is None, reason="only the native library answers a device")

STORE = make_store(make_experts(layers=3, num_experts=16))
EXPERT_MS = STORE.experts.formats[4].nbytes / 1e-3 / 1e9  # link_gbps at which an expert takes 1 ms


class Card:
    """Creates servers and keeps the log lines.

    On its clock, a step takes the time that the test sets for each way to serve misses.
    """

    def __init__(self, seconds=None, budget="25%", link=EXPERT_MS):
        self.made, self.said, self._seconds = [], [], seconds
        self.options = Options(group_size=32, low=2, expert_budget=budget, link_gbps=link)
        self._calls = itertools.count()

    def make(self, options):
        assert not self.made or self.made[-1].closed, "two servers at a time"

        class Server(ExpertServer):
            closed = False

            def close(self, **how):
                self.closed = True
                super().close(**how)

        with rates_of(3):
            server = Server(STORE, options, CPU)
        self.made.append(server)
        return server

    def clock(self):
        return next(self._calls) * self._seconds[self.made[-1].options.misses]

    def choose(self, kept=None):
        how = {} if self._seconds is None else {"clock": self.clock}
        server = choose_misses(self.make, self.options, Activation.SILU, kept, self.said.append, **how)
        assert server is self.made[-1]
        return server

    def close(self, server):
        check_device_planned(server)
        server.close(keep_store=True)


@pytest.mark.parametrize(
    ("seconds", "faster"), [({"share": 1, "fetch": 2}, "share"), ({"share": 2, "fetch": 1}, "fetch")]
)
def test_the_faster_way_is_taken_and_kept(seconds, faster, tmp_path):
    card, file = Card(seconds), tmp_path / "misses.json"
    server = card.choose(file)
    assert server.options.misses == faster
    assert bool(server.cpu_execution.cpu_queue) == (faster == "share")
    costs = server.small_batches.table.cpu_costs
    assert bool(costs[2, Cost.FIRST_ROW]) == (faster == "share")
    assert ("shared" in card.said[0]) == (faster == "share")
    assert "measured now" in card.said[0]
    card.close(server)

    again = Card({"share": 5, "fetch": 5})
    server = again.choose(file)
    assert server.options.misses == faster
    assert [server.options.misses for server in again.made] == [faster], "neither measured nor made twice"
    assert "earlier" in again.said[0]
    again.close(server)

    for other in (Card(seconds, budget="50%"), Card(seconds, link=2 * EXPERT_MS)):
        server = other.choose(file)
        assert "measured now" in other.said[0], "another budget or link is another question"
        other.close(server)


def test_an_earlier_start_of_another_question_is_only_where_this_one_begins(tmp_path):
    file = tmp_path / "misses.json"
    card = Card({"share": 1, "fetch": 2})
    card.close(card.choose(file))
    other = Card({"share": 2, "fetch": 1}, budget="50%")
    server = other.choose(file)
    assert [server.options.misses for server in other.made] == ["share", "fetch"]
    assert server.options.misses == "fetch"
    other.close(server)
    resident = Card(budget="100%")
    card.close(Card({"share": 1, "fetch": 2}).choose(file))
    server = resident.choose(file)
    assert (server.options.misses, resident.said) == ("fetch", [])
    resident.close(server)


def test_measured_steps_leave_nothing_behind():
    card, x = Card({"share": 1, "fetch": 2}), random_step(0, 1, STORE.experts)
    server = card.choose()
    assert not server.cache.device_table.table.score.any()
    assert server.stats().misses == server.stats().hits == 0
    assert torch.equal(decode(server, 0, *x), decode(card_of_fetch(), 0, *x))
    card.close(server)


def card_of_fetch():
    return ExpertServer(STORE, Card().options.model_copy(update={"misses": "fetch"}), CPU)


def test_a_slow_link_is_shared_as_measured():
    """With the real clock, and a link on which an expert takes 20 ms."""
    card = Card(link=EXPERT_MS / 20)
    server = card.choose()
    assert server.options.misses == "share"
    card.close(server)


def test_where_all_is_resident_nothing_is_measured():
    card = Card(budget="100%")
    server = card.choose()
    assert (len(card.made), card.said) == (1, [])
    card.close(server)


def test_what_cannot_be_shared_is_fetched_and_said():
    class Unpinned(Card):
        def make(self, options):
            if options.misses == "share":
                raise ConfigError("memory for answers cannot be pinned", option="misses")
            return super().make(options)

    card = Unpinned({"fetch": 1})
    server = card.choose()
    assert server.options.misses == "fetch"
    assert "cannot be pinned" in card.said[0]
    card.close(server)
