"""Servers with device planning, whose device is a CPU."""

from dataclasses import replace
from unittest import mock

import torch

from tests.executor.steps import make_server, random_step
from tests.small_model import make_experts
from tests.support.memory_writer import MemoryWriter
from vllm_dymoe.executor import cpu_execution
from vllm_dymoe.executor.rates import Rates
from vllm_dymoe.experts.encoding import CODEBOOKS, E8_NESTED
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.kernels import Activation, Curve
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.quantize.dummy import random_store

KINDS = ("mxfp4", "nvfp4", "fp8", "without a gate", "e8")


def store_of(kind, **sizes):
    activation, experts = Activation.SILU, make_experts(bits=(8, 2) if kind == "fp8" else (4, 2), **sizes)
    high = next(iter(experts.formats))
    if kind == "without a gate":
        activation = Activation(Curve.RELU2, has_gate=False)
        formats = {bits: replace(fmt, has_gate=False) for bits, fmt in experts.formats.items()}
    elif kind == "e8":
        residual = replace(experts.formats[high], encoding=E8_NESTED)
        formats = {high: residual, min(experts.formats): residual.base}
    else:
        formats = experts.formats | {high: replace(experts.formats[high], encoding=CODEBOOKS[kind])}
    experts = replace(experts, formats=formats)
    return random_store(experts, MemoryWriter(experts), seed=3), activation


def device_planned_server(store, budget="50%", policy=None, **options):
    """Make a server whose device plans; the policy is an object or a name."""
    server = make_server(store, "100%", policy, planning="device", **options)
    server.resize(server.minimum_budget if budget == "minimum" else budget)
    return server


def decode(server, layer, x, weights, ids, activation=Activation.SILU, rows=None, **told):
    server.small_batches.tell(len(x) if rows is None else rows)
    out = server.small_batches.forward(layer, x, weights, ids, activation, **told)
    server.small_batches.tell(0)
    return out


def run_large_batch(server, layer, x, weights, ids, activation=Activation.SILU, rows=None, **told):
    server.small_batches.tell(len(x) if rows is None else rows)
    out = server.small_batches.forward_large(layer, x, weights, ids, activation, **told)
    server.small_batches.tell(0)
    return out


def run_device_planned(server, steps, activation=Activation.SILU, **told):
    outputs = []
    for seed, layer, tokens in steps:
        run = decode if tokens <= SMALL_BATCH_ROWS else run_large_batch
        outputs.append(run(server, layer, *random_step(seed, tokens, server.experts), activation, **told))
        check_device_planned(server)
    return outputs


def check_device_planned(server):
    """Check that every table row points to complete bytes, in a slot of its own."""
    server.check_integrity()
    for precision, pool in server.cache.pools.items():
        for layer, expert in server.cache.table.residents(precision):
            nested = server.cache.nested and precision is Precision.HIGH
            slot = pool.slots[server.cache.table.slot[int(nested), layer, expert]]
            assert torch.equal(slot.packed, server.store.packed(SliceKey(layer, expert, server.cache.bits[precision])))


def rates_of(ratio):
    """Replace measured rates: the host's is ``ratio`` times the link's."""

    def measured(store, engine, device, worker, measured_for):
        formats = store.experts.formats.values()
        first = {fmt.encoding.tag: fmt.whole_nbytes / ratio * 1e-6 for fmt in formats}
        return Rates(1e6, first, {tag: s / 8 for tag, s in first.items()}, 0.0, worker.threads, measured_for)

    return mock.patch.object(cpu_execution, "measure", measured)
