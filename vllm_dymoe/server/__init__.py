"""The server of one rank's experts.

It holds budget, cache, policy, executors and statistics.
"""

from vllm_dymoe.cache.budget import SlotPlan, minimum_budget, plan_slots
from vllm_dymoe.server.expert_server import ExpertServer, Parts, precision_of
