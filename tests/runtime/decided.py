"""Runtimes whose device decides, played by a CPU."""

import torch

from tests.runtime.steps import CPU, forward, make_runtime, random_step
from vllm_dymoe.config import Options
from vllm_dymoe.experts.layout import BlobKey
from vllm_dymoe.kernels import Activation
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.runtime.decode_path import DECODE_ROWS


def decided_runtime(store, budget="50%", system=None, **options):
    """As ``make_runtime``, with steps that need no host; the system is one, or its name."""
    if isinstance(system, str):
        options = Options(
            group_size=32, system=system, decisions="device", **({"hi": 4, "lo": 2, "expert_budget": "100%"} | options)
        )
        runtime = MoERuntime(store, options, CPU)
    else:
        runtime = make_runtime(store, "100%", system, decisions="device", **options)
    runtime.resize(runtime.minimum_budget if budget == "minimum" else budget)
    return runtime


def decode(runtime, layer, x, weights, ids, activation=Activation.SILU, rows=None):
    """One layer of a step without the host, of so many real rows."""
    runtime.enter_decode()
    runtime.decode.tell(len(x) if rows is None else rows)
    out = runtime.decode.forward(layer, x, weights, ids, activation)
    runtime.decode.tell(0)
    return out


def run_decided(runtime, steps, activation=Activation.SILU):
    """Run (seed, layer, tokens), those of few tokens without the host, and return the outputs."""
    outputs = []
    for seed, layer, tokens in steps:
        run = decode if tokens <= DECODE_ROWS else forward
        outputs.append(run(runtime, layer, *random_step(seed, tokens, runtime.experts), activation))
        check_decided(runtime)
    return outputs


def check_decided(runtime):
    """Every row names complete bytes, in a slot of its own."""
    runtime.check_integrity()
    for tier, pool in runtime.memory.pools.items():
        for layer, expert in runtime.memory.table.residents(tier):
            slot = pool.slots[runtime.memory.table.slot[layer, expert]]
            assert torch.equal(slot.blob, runtime.store.blob(BlobKey(layer, expert, runtime.memory.bits[tier])))
