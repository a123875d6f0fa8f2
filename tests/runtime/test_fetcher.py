"""Slots of copies that were given up."""

from tests.runtime.test_prefetch import make_ahead
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.transfer import Reason
from vllm_dymoe.transfer.ticket import State


def test_a_layer_fills_its_share_while_a_copy_that_was_given_up_still_moves():
    ahead = make_ahead(slots=6, staging=2)
    fetcher, (pool,) = ahead.fetcher, ahead.memory.pools.values()
    ahead.engine.settle = lambda ticket: ticket.state is not State.RUNNING
    ahead.memory.evict(0, 0)
    hangs = fetcher.start(0, 0, Tier.HI, Reason.DEMAND, kept=True)
    hangs.ticket.state = State.RUNNING
    fetcher.give_up([hangs], wait=True)
    assert list(fetcher.orphaned) == [hangs]
    ahead.check()

    again = fetcher.start(0, 0, Tier.HI, Reason.DEMAND, kept=True)
    passing = fetcher.start(0, 2, Tier.HI, Reason.DEMAND)
    assert again is not None, "the table says that the layer has room"
    assert passing is not None, "of two slots in no layer's share one is written by what hangs"
    assert fetcher.start(0, 3, Tier.HI, Reason.DEMAND) is None
    ahead.check(again, passing)

    ahead.give_back([again, passing])
    hangs.ticket.state = State.DONE
    assert fetcher.collect()
    ahead.check()
    assert (pool.free, pool.promised) == (2, 0)
