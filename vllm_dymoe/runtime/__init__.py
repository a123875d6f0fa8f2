"""One MoE layer's forward: tiers, rule, compute, combine."""

from vllm_dymoe.runtime.moe import MoERuntime
from vllm_dymoe.runtime.sizing import SlotPlan, minimum_budget, plan_slots

__all__ = ["MoERuntime", "SlotPlan", "minimum_budget", "plan_slots"]
