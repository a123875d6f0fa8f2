"""Repeat recorded actions, to reproduce an answer that depends on them."""

from types import SimpleNamespace

from vllm_dymoe.planner.constants import LOW_VERSION, Action
from vllm_dymoe.planner.precision import Precision


def replay(server, actions):
    """Let a server repeat recorded actions, uint8 [tokens, layers, top_k].

    It must see the same tokens in the same order. An expert that was fetched is fetched again or already resident.
    """
    serving, done, plan_layer = server.host_planned, [0] * actions.shape[1], server.host_planned._plan
    actions, residency = actions.numpy(), serving.policy.residency
    server.cache.table.reuse_high[:] = False  # the actions already say where a better version was used

    def device_planned(routing):
        layer, ids = routing.layer, routing.host_ids
        told = actions[done[layer] :, layer][: len(ids)]
        done[layer] += len(ids)
        found = dict(zip(ids[ids >= 0].tolist(), told[ids >= 0].tolist(), strict=True))
        precisions = {
            expert: Precision.LOW if action & LOW_VERSION else Precision.HIGH for expert, action in found.items()
        }
        precisions |= {expert: Precision.SKIPPED for expert, action in found.items() if action == Action.SKIP}
        precision = SimpleNamespace(select=lambda routing: precisions, renormalizes=False)
        serving.policy, serving.executes_on_cpu = SimpleNamespace(precision=precision, residency=residency), False
        plan = plan_layer(routing)
        serving.executes_on_cpu = True
        plan.action[:, [found[expert] % LOW_VERSION == Action.CPU for expert in plan.wanted]] = Action.CPU
        return plan

    serving._plan, serving.cpu = device_planned, None
