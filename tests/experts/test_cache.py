"""The expert cache: its three precision rules, its pins, and its shares, against a naive model."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.experts.cache import ExpertCache, layer_quotas
from vllm_dymoe.experts.layout import ExpertFormat
from vllm_dymoe.experts.slots import SlotPool
from vllm_dymoe.experts.tier import Tier

CPU = torch.device("cpu")
EXPERTS_OF_A_LAYER = 32


def make_cache(hi=4, lo=0, layers=1, staging=1):
    counts = {Tier.HI: (hi, 4), Tier.LO: (lo, 2)}
    pools = {
        tier: SlotPool(ExpertFormat(64, 64, bits, 32, torch.bfloat16), count, CPU)
        for tier, (count, bits) in counts.items()
        if count
    }
    quotas = {tier: layer_quotas(pool.count, [1] * layers, staging, pool.count) for tier, pool in pools.items()}
    return ExpertCache(pools, quotas, EXPERTS_OF_A_LAYER)


def use(cache, expert, tier=Tier.HI, layer=0, stream=False):
    """A step that uses one expert: acquire, fill if need be, and release at once."""
    held, _missing = cache.acquire_held(layer, {expert: tier})
    version = held[0] if held else cache.acquire(layer, expert, tier, stream=stream)
    assert version is not None
    if not version.resident:
        cache.publish(version)
    cache.release(version)
    return version


def test_quotas_share_what_staging_leaves():
    assert layer_quotas(10, [1, 1, 1], 2, 8) == [3, 3, 2]
    assert layer_quotas(2, [1, 1, 1], 2, 8) == [0, 0, 0]
    assert layer_quotas(1, [1, 1, 1], 2, 8) == [0, 0, 0]


def test_quotas_follow_the_weights_up_to_what_a_layer_can_use():
    assert layer_quotas(11, [1, 0.75, 0.5, 0], 2, 8) == [4, 3, 2, 0]
    assert layer_quotas(12, [1, 0.5, 0.5], 0, 4) == [4, 4, 4]
    assert layer_quotas(40, [1, 0.5, 0], 2, 8) == [8, 8, 0]
    assert layer_quotas(6, [0, 0], 0, 8) == [0, 0]


def test_the_coldest_expert_of_the_layer_goes_and_not_the_one_that_was_used_longest_ago():
    cache = make_cache(hi=4)  # three kept, one for staging
    for expert in (0, 0, 0, 1, 2, 2):
        use(cache, expert)
    use(cache, 3)
    assert cache.handles.resolve(0, 1) is None
    assert all(cache.handles.resolve(0, expert) for expert in (0, 2, 3))
    assert (cache.stats.hits, cache.stats.misses, cache.stats.evictions) == (3, 4, 1)


def test_an_expert_colder_than_all_that_are_kept_passes_through():
    cache = make_cache(hi=3)  # two kept, one for staging
    for expert in (0, 0, 0, 1, 1, 1):
        use(cache, expert)
    use(cache, 2)
    assert cache.handles.get(0, 2) is None
    assert cache.handles.resolve(0, 0)
    assert cache.handles.resolve(0, 1)
    assert (cache.stats.misses, cache.stats.evictions) == (3, 0)
    use(cache, 2)  # a second use makes it hotter than expert 0, which was not used for four steps
    use(cache, 2)
    assert cache.handles.resolve(0, 2)
    assert cache.handles.resolve(0, 0) is None


def test_a_cleared_cache_begins_anew():
    cache = make_cache(hi=3)
    for expert in (0, 0, 0, 1):
        use(cache, expert)
    cache.clear()
    for expert in (0, 1, 2):  # all of them cold: the one that was used longest ago makes room
        use(cache, expert)
    assert cache.handles.resolve(0, 0) is None
    assert cache.handles.resolve(0, 2)


def test_without_a_staging_slot_a_cold_expert_is_kept_all_the_same():
    cache = make_cache(hi=3)
    for expert in (0, 0, 0, 1, 1, 1):
        use(cache, expert)
    assert cache.acquire_ahead(0, 5, Tier.HI), "takes the staging slot"
    cache.acquire_held(0, {2: Tier.HI})
    assert cache.acquire(0, 2, Tier.HI) is None
    assert cache.acquire(0, 2, Tier.HI, must_keep=True) is not None
    assert cache.handles.resolve(0, 0) is None


def test_a_layer_never_loses_an_expert_to_another_layer():
    cache = make_cache(hi=5, layers=2)
    use(cache, 0, layer=0)
    use(cache, 1, layer=0)
    for expert in range(20):
        use(cache, expert, layer=1)
    assert cache.handles.resolve(0, 0)
    assert cache.handles.resolve(0, 1)


def test_what_a_step_needs_is_not_evicted_by_the_same_step():
    cache = make_cache(hi=3)
    needed = [cache.acquire(0, expert, Tier.HI) for expert in range(3)]
    assert all(needed)
    for version in needed:
        cache.publish(version)
    assert cache.acquire(0, 3, Tier.HI) is None, "every slot is pinned, so there is none to be had"
    assert len({version.slot.index for version in needed}) == 3
    assert all(cache.handles.resolve(0, expert) is needed[expert] for expert in range(3))
    cache.release(needed[1])
    fourth = cache.acquire(0, 3, Tier.HI)
    assert fourth is not None
    assert fourth.slot is needed[1].slot
    assert cache.handles.resolve(0, 1) is None


def test_streaming_leaves_what_is_kept_alone():
    cache = make_cache(hi=5, staging=2)
    for expert in (0, 1, 2):
        use(cache, expert)
    for expert in range(3, 30):
        use(cache, expert, stream=True)
    assert all(cache.handles.resolve(0, expert) for expert in (0, 1, 2))
    assert cache.handles.get(0, 29) is None, "a streamed expert goes with its last pin"


def test_streaming_uses_no_more_than_the_staging_slots_at_once():
    cache = make_cache(hi=5, layers=3, staging=2)  # each layer keeps one
    use(cache, 0)
    first = cache.acquire(0, 1, Tier.HI, stream=True)
    second = cache.acquire(0, 2, Tier.HI, stream=True)
    assert first is not None
    assert second is not None
    assert cache.acquire(0, 3, Tier.HI, stream=True) is None, "the other layers' slots are not to be taken"
    use(cache, 0, layer=1)
    use(cache, 0, layer=2)


def test_what_is_fetched_ahead_takes_staging_slots_and_nothing_else():
    cache = make_cache(hi=5, layers=3, staging=2)  # each layer keeps one, none does yet
    first = cache.acquire_ahead(1, 4, Tier.HI)
    second = cache.acquire_ahead(1, 5, Tier.HI)
    assert first.transient
    assert second.transient
    assert cache.acquire_ahead(1, 4, Tier.HI) is None, "it is there already"
    assert cache.acquire_ahead(2, 0, Tier.HI) is None, "the layers' own slots are not to be taken"
    for layer in range(3):
        use(cache, 0, layer=layer)
    assert (cache.stats.misses, cache.stats.evictions) == (3, 0)
    cache.check_integrity()


def test_what_was_fetched_ahead_is_kept_as_after_a_miss():
    cache = make_cache(hi=4, layers=2, staging=2)
    use(cache, 0, layer=1)
    for expert, stream in ((1, True), (2, False)):
        version = cache.acquire_ahead(1, expert, Tier.HI)
        cache.publish(version)
        held, missing = cache.acquire_held(1, {expert: Tier.HI})
        assert (held, missing) == ([version], [])
        cache.adopt(version, stream=stream)
        cache.release(version)
        cache.release(version)
        cache.check_integrity()
    assert cache.handles.resolve(1, 0) is None, "the coldest made room"
    assert cache.handles.get(1, 1) is None, "it was passing through"
    assert cache.handles.resolve(1, 2)
    assert (cache.stats.hits, cache.stats.misses, cache.stats.evictions) == (2, 1, 1)


def test_what_is_still_on_its_way_when_it_is_needed_is_a_miss():
    cache = make_cache()
    cache.acquire_ahead(0, 4, Tier.HI)
    cache.acquire_held(0, {4: Tier.HI})
    assert (cache.stats.hits, cache.stats.misses) == (0, 1)


def test_promotion_is_a_miss_that_replaces_the_low_version():
    cache = make_cache(hi=3, lo=3)
    low = use(cache, 0, Tier.LO)
    high = use(cache, 0, Tier.HI)
    assert high.tier is Tier.HI
    assert cache.handles.resolve(0, 0) is high
    assert (cache.stats.misses, cache.stats.promotions) == (2, 1)
    assert cache.resident_experts(Tier.LO) == 0
    assert low.pins == 0
    cache.check_integrity()


def test_promotion_leaves_a_pinned_low_version_readable_until_its_release():
    cache = make_cache(hi=3, lo=1, staging=0)
    low = cache.acquire(0, 0, Tier.LO)
    cache.publish(low)
    high = cache.acquire(0, 0, Tier.HI)
    assert cache.acquire(0, 1, Tier.LO) is None, "the low slot is still being read"
    cache.check_integrity()
    cache.release(low)
    assert cache.acquire(0, 1, Tier.LO) is not None
    assert cache.handles.get(0, 0) is high


def test_conservative_reuse_takes_the_high_version_for_a_low_request():
    cache = make_cache(hi=3, lo=3)
    high = use(cache, 0, Tier.HI)
    assert use(cache, 0, Tier.LO) is high
    assert (cache.stats.hits, cache.stats.reuses, cache.stats.misses) == (1, 1, 1)


def test_without_reuse_a_low_request_replaces_the_high_version():
    cache = make_cache(hi=3, lo=3)
    cache._reuse_high = False
    high = use(cache, 0, Tier.HI)
    low = use(cache, 0, Tier.LO)
    assert low.tier is Tier.LO
    assert cache.handles.resolve(0, 0) is low
    assert high.pins == 0
    assert (cache.stats.hits, cache.stats.misses, cache.stats.promotions, cache.stats.reuses) == (0, 2, 0, 0)
    cache.check_integrity()


def test_an_abandoned_version_frees_its_slot_after_the_last_release():
    cache = make_cache(hi=1, staging=0)
    version = cache.acquire(0, 0, Tier.HI)
    cache.abandon(version)
    assert cache.handles.get(0, 0) is None
    assert cache.acquire(0, 1, Tier.HI) is None, "somebody may still be writing the slot"
    cache.release(version)
    assert cache.acquire(0, 1, Tier.HI) is not None


def test_releasing_twice_is_a_bug_that_is_noticed():
    cache = make_cache()
    version = use(cache, 0)
    with pytest.raises(AssertionError, match="released more than acquired"):
        cache.release(version)


def test_a_handle_resolves_only_to_complete_bytes():
    cache = make_cache()
    version = cache.acquire(0, 0, Tier.HI)
    assert cache.handles.resolve(0, 0) is None
    assert cache.handles.get(0, 0) is version
    cache.publish(version)
    assert cache.handles.resolve(0, 0) is version


def test_integrity_finds_a_lost_slot():
    cache = make_cache()
    use(cache, 0)
    cache._shelves[Tier.HI].pool._free.pop()
    with pytest.raises(AssertionError, match="lost or doubled"):
        cache.check_integrity()


LAYERS, EXPERTS = 2, 6
operations = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "acquire", "acquire", "publish", "release", "abandon"]),
        st.integers(0, LAYERS - 1),
        st.integers(0, EXPERTS - 1),
        st.sampled_from([Tier.HI, Tier.LO]),
        st.booleans(),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(operations, st.integers(1, 8), st.integers(1, 8), st.integers(0, 3))
def test_any_sequence_keeps_every_invariant(steps, hi, lo, staging):
    """A naive model knows who holds which slot, and what was written to it last.

    Every acquired version is stamped in its slot. Whatever happens in between, the
    stamp is still there at its release: no slot is given away while somebody holds it.
    """
    cache = make_cache(hi, lo, LAYERS, staging)
    held: list = []
    stamps = {}
    for number, (action, layer, expert, tier, stream) in enumerate(steps):
        if action == "acquire":
            before = cache.handles.get(layer, expert)
            version = cache.acquire(layer, expert, tier, stream=stream)
            if version is None:
                assert before is None or (before.tier is Tier.LO and tier is Tier.HI)
                continue
            assert version.tier is tier or version.tier is Tier.HI
            if version is not before:
                assert not version.resident
                version.slot.blob[:8].view(torch.int64).fill_(number)
                stamps[version] = number
            held.append(version)
        elif held:
            version = held[expert % len(held)]
            if action == "publish" and cache.handles.get(version.layer, version.expert) is version:
                cache.publish(version)
            elif action == "abandon" and not version.resident:
                cache.abandon(version)
            elif action == "release" and (version.resident or held.count(version) > 1 or version.transient):
                assert version.slot.blob[:8].view(torch.int64).item() == stamps[version]
                held.remove(version)
                if version.pins == 1 and not version.resident:
                    cache.abandon(version)
                cache.release(version)
        assert all(version.pins == count for version, count in Counter(held).items())
        cache.check_integrity()
    for version in held:
        assert version.slot.blob[:8].view(torch.int64).item() == stamps[version]
        if not version.resident:
            cache.abandon(version)
        cache.release(version)
    cache.check_integrity()
    cache.clear()
    assert all(shelf.pool.free == shelf.pool.count for shelf in cache._shelves.values())
