"""Fates that were recorded, in place of those that are decided: an answer that depends on them comes again."""

from types import SimpleNamespace

from vllm_dymoe.residency.constants import LOW_VERSION, Fate
from vllm_dymoe.residency.rule import THERE
from vllm_dymoe.residency.tier import Tier


def replay(runtime, fates):
    """Let a runtime's steps of the same tokens in the same order, uint8 [tokens, layers, top_k], do as these say; what
    was fetched is now fetched or there already."""
    serving, done, decide = runtime.serving, [0] * fates.shape[1], runtime.serving._decide
    fates, residency = fates.numpy(), serving.system.residency
    runtime.memory.table.reuse_high[:] = False  # fates say where a better version served

    def decided(routing):
        layer, ids = routing.layer, routing.host_ids
        told = fates[done[layer] :, layer][: len(ids)]
        done[layer] += len(ids)
        found = dict(zip(ids[ids >= 0].tolist(), told[ids >= 0].tolist(), strict=True))
        tiers = {expert: Tier.LO if fate & LOW_VERSION else Tier.HI for expert, fate in found.items()}
        tiers |= {expert: Tier.SKIP for expert, fate in found.items() if fate == Fate.SKIP}
        precision = SimpleNamespace(select=lambda routing: tiers, renormalizes=False)
        serving.system, serving.computes_there = SimpleNamespace(precision=precision, residency=residency), False
        wanted, skipped, places = decide(routing)
        serving.computes_there = True
        places[:, [found[expert] % LOW_VERSION == Fate.THERE for expert in wanted]] = THERE
        return wanted, skipped, places

    serving._decide = decided
