"""Runtimes whose device decides, played by a CPU."""

from dataclasses import replace
from unittest import mock

import torch

from tests.runtime.steps import make_runtime, random_step
from tests.small_model import make_experts
from tests.support.memory_writer import MemoryWriter
from vllm_dymoe.kernels import Activation, Curve
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.residency.code import CODEBOOKS, E8_NESTED
from vllm_dymoe.residency.format import BlobKey
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime import host_side
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.runtime.rates import Rates

KINDS = ("mxfp4", "nvfp4", "fp8", "without a gate", "e8")


def store_of(kind, **sizes):
    activation, experts = Activation.SILU, make_experts(bits=(8, 2) if kind == "fp8" else (4, 2), **sizes)
    high = next(iter(experts.formats))
    if kind == "without a gate":
        activation = Activation(Curve.RELU2, has_gate=False)
        formats = {bits: replace(fmt, has_gate=False) for bits, fmt in experts.formats.items()}
    elif kind == "e8":
        fine = replace(experts.formats[high], code=E8_NESTED)
        formats = {high: fine, min(experts.formats): fine.base}
    else:
        formats = experts.formats | {high: replace(experts.formats[high], code=CODEBOOKS[kind])}
    experts = replace(experts, formats=formats)
    return random_store(experts, MemoryWriter(experts), seed=3), activation


def decided_runtime(store, budget="50%", system=None, **options):
    """As ``make_runtime``, with steps that need no host; the system is one, or its name."""
    runtime = make_runtime(store, "100%", system, decisions="device", **options)
    runtime.resize(runtime.minimum_budget if budget == "minimum" else budget)
    return runtime


def decode(runtime, layer, x, weights, ids, activation=Activation.SILU, rows=None):
    runtime.decode.tell(len(x) if rows is None else rows)
    out = runtime.decode.forward(layer, x, weights, ids, activation)
    runtime.decode.tell(0)
    return out


def decode_wide(runtime, layer, x, weights, ids, activation=Activation.SILU, rows=None, **told):
    runtime.decode.tell(len(x) if rows is None else rows)
    out = runtime.decode.forward_wide(layer, x, weights, ids, activation, **told)
    runtime.decode.tell(0)
    return out


def run_decided(runtime, steps, activation=Activation.SILU):
    outputs = []
    for seed, layer, tokens in steps:
        run = decode if tokens <= DECODE_ROWS else decode_wide
        outputs.append(run(runtime, layer, *random_step(seed, tokens, runtime.experts), activation))
        check_decided(runtime)
    return outputs


def check_decided(runtime):
    """Every row names complete bytes, in a slot of its own."""
    runtime.check_integrity()
    for tier, pool in runtime.memory.pools.items():
        for layer, expert in runtime.memory.table.residents(tier):
            nested = runtime.memory.nested and tier is Tier.HI
            slot = pool.slots[runtime.memory.table.slot[int(nested), layer, expert]]
            assert torch.equal(slot.blob, runtime.store.blob(BlobKey(layer, expert, runtime.memory.bits[tier])))


def rates_of(ratio):
    """Measured rates of which the host's is so many times the link's."""

    def measured(store, engine, device, worker, measured_for):
        formats = store.experts.formats.values()
        first = {fmt.code.tag: fmt.whole_nbytes / ratio * 1e-6 for fmt in formats}
        return Rates(1e6, first, {tag: s / 8 for tag, s in first.items()}, 0.0, worker.threads, measured_for)

    return mock.patch.object(host_side, "measure", measured)
