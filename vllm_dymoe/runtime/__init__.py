"""One MoE layer's forward: tiers, rule, compute, combine."""

from vllm_dymoe.runtime.moe import MoERuntime, Parts, precision_of
from vllm_dymoe.runtime.sizing import SlotPlan, minimum_budget, plan_slots
