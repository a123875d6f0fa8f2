"""One MoE layer's forward: plan, acquire, compute, combine."""

from vllm_dymoe.runtime.moe import MoERuntime
from vllm_dymoe.runtime.sizing import SlotPlan, minimum_budget, plan_slots

__all__ = ["MoERuntime", "SlotPlan", "minimum_budget", "plan_slots"]
