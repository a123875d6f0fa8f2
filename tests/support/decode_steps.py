"""Tables with telling addresses, random steps, and plans made on a CPU."""

from dataclasses import replace

import numpy as np
import torch

from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import DownFormat, ExpertFormat, stored_formats
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.planner.small_batch import plan_small_batch
from vllm_dymoe.planner.table import Table, set_pools, set_precision
from vllm_dymoe.policies.dymoe import Dymoe

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 12, 3, 6
FORMATS = {
    HIGH: ExpertFormat(64, 32, encoding_of(4), 32, torch.bfloat16, down=DownFormat(encoding_of(8), 32)),
    LOW: ExpertFormat(64, 32, encoding_of(2), 32, torch.bfloat16),
}
_NESTED = stored_formats((4, 2), lambda bits: replace(FORMATS[LOW], encoding=encoding_of(bits)))
NESTED = {HIGH: _NESTED[4], LOW: _NESTED[2]}
COSTS = {
    "fetch": None,
    "compute": [[0] * 4, [1 << 40, 1, 0, 64], [1 << 40, 1, 0, 64]],
    "share": [[10, 0, 0, 0], [60, 20, 5, 64], [100, 33, 8, 64]],
    "ties": [[0] * 4, [2, 1, 1, 64], [4, 2, 1, 64]],
    "few rows of high": [[0] * 4, [60, 0, 0, 64], [100, 10, 8, 2]],
}
"""Costs of fetching an expert and of computing it on the host, see Table.cpu_costs."""
POOL, SOURCE = {LOW: 1 << 20, HIGH: 1 << 24}, {LOW: 1 << 30, HIGH: 1 << 34}


def numbers_of(all_experts, experts=EXPERTS, copies=0):
    """Return a rank's numbers of all experts, -1 for those of other ranks.

    Some of its experts may have two numbers there, as with load balancing.
    """
    numbers = torch.full((all_experts,), -1, dtype=torch.int32)
    numbers[torch.arange(experts + copies) * all_experts // (experts + copies)] = (
        torch.arange(experts + copies).int() % experts
    )
    return numbers


RANKS = {"alone": None, "with others": numbers_of(30), "with copies": numbers_of(30, copies=4)}


def own_ids(numbers, ids):
    """Return a rank's numbers of some choices; ids of no expert stay outside of its own."""
    inside = (ids >= 0) & (ids < len(numbers))
    return torch.where(inside, numbers[ids.clamp(0, len(numbers) - 1).long()], ids.clamp(-2, len(numbers)))


def make_table(
    quotas,
    *,
    policy=None,
    skip_low=False,
    staging=0,
    experts=EXPERTS,
    top_k=TOP_K,
    depth=2,
    tokens=TOKENS,
    nested=False,
    costs=None,
    all_experts=0,
):
    """Make a table whose addresses name the slot or the expert that they belong to."""
    sizes = {"rows": tokens, "top_k": top_k, "depth": depth, "nested": nested, "all_experts": all_experts}
    table = Table.allocate(LAYERS, experts, device="cpu", **sizes)
    if costs is not None:
        table.cpu_costs.copy_(torch.tensor(costs))
    formats = (NESTED if nested else FORMATS) | ({LOW: None} if skip_low else {})
    policy = policy or Dymoe(retention=0.5)
    precision = policy.precision
    critical = precision.critical_counts(LAYERS, all_experts or experts)
    set_precision(table, [formats] * LAYERS, critical, precision.thresholds)
    pools = {code: [(POOL[code], 1 << 12, sum(quotas[code]) + staging)] for code in (LOW, HIGH)}
    set_pools(table, pools, quotas)
    table.reuse_high.fill_(policy.precision.reuses_high)
    table.renormalizes.fill_(policy.precision.renormalizes)
    table.evicts.fill_(policy.residency.evicts)
    table.admits.fill_(policy.residency.migrating is None)
    for code, base in SOURCE.items():
        table.source[:, :, code] = base + (torch.arange(LAYERS * experts).view(LAYERS, experts) << 12)
    return table


def host_table(quotas, experts=EXPERTS, *, reuse_high=True, nested=False, costs=None):
    table = Table.allocate(len(quotas[HIGH]), experts, nested=nested)
    if costs is not None:
        table.cpu_costs[:] = costs
    table.reuse_high[:] = reuse_high
    set_pools(table, {code: [(0, 0, sum(quotas[code]))] for code in (LOW, HIGH)}, quotas)
    return table


def random_step(seed, tokens=TOKENS, top_k=TOP_K, experts=EXPERTS, absent=0.1):
    """Return random ids [tokens, top_k] and float32 weights of the same shape.

    No id occurs twice in a row, some are -1 (experts of another rank), and some weights are equal.
    """
    rng = np.random.default_rng(seed)
    popular = rng.permutation(experts)[: rng.integers(top_k, experts + 1)]
    ids = np.stack([rng.permutation(popular)[:top_k] for _ in range(tokens)])
    ids[rng.random(ids.shape) < absent] = -1
    weights = rng.choice([0.125, 0.25, 0.5, 1e-7, 0.3], ids.shape).astype(np.float32)
    return torch.from_numpy(ids), torch.from_numpy(weights)


def rows(count):
    return torch.tensor([count], dtype=torch.int32)


def decide(table, layer, ids, weights, real=None, **told):
    plan = LayerPlan.allocate(len(ids), ids.shape[1], table.experts, "cpu", slices=len(table.slot))
    plan_small_batch(table, layer, ids, weights, rows(len(ids) if real is None else real), plan, **told)
    return plan
