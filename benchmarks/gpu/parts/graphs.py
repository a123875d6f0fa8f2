"""Checks that device-planned steps in a graph compute what the host's do."""

from layers import Model
from record import Recorder

from parts.decided import DevicePlannedSteps, server_of
from parts.stack import Stack, pinned_store, same_bits
from vllm_dymoe.cache.store import HostStore

MODEL = Model(layers=4, experts=16, top_k=4, hidden=520, intermediate=328, group=32)
BITS = 4, 2
BATCH, LARGE = 4, 40
STEPS = 12


def run(record: Recorder) -> None:
    """Check small-batch steps, then large ones, launched and as a graph."""
    store = pinned_store(MODEL, BITS)
    for budget in ("100%", "50%", "minimum"):
        name = f"decode steps that the device plans at {budget}"
        with record.check(f"{name}: one graph, replayed, the bits of the host's steps at 100%") as wrong:
            wrong += _check_decided(store, budget)
    for budget in ("100%", "50%", "minimum"):
        for launched in (False, True):
            form = "launched, copies ahead" if launched else "one graph"
            with record.check(f"large-batch steps decided on the device at {budget}: {form}, the host's bits") as wrong:
                wrong += _check_decided(store, budget, tokens=LARGE, launched=launched)
    store.close()


def _check_decided(store: HostStore, budget: str, tokens: int = 0, launched: bool = False) -> list[str]:
    """Check small-batch steps as one graph, or large ones in the given form.

    Args:
        tokens: of a large step; 0 for small ones.
        launched: launch each step, instead of replaying a graph.
    """
    stack = Stack(MODEL, exact=True)
    host, device = stack.server(store, BITS[0]), server_of(stack, store, BITS[0], budget)
    replayed, wrong = DevicePlannedSteps(stack, device, tokens or BATCH, launched=launched, large=tokens > 0), []
    for seed in range(STEPS):
        x = stack.inputs(tokens or BATCH, seed)
        for got, want in zip(replayed.step(x), stack.step(host, x), strict=True):
            if not same_bits(got.out, want.out):
                wrong.append(f"step {seed}, layer {got.layer}: other bits than the host's step gives")
    device.check_integrity()
    stats = device.stats()
    if stats.misses == 0 and budget != "100%":
        wrong.append("nothing was fetched")
    for server in (host, device):
        server.engine.close()
    return wrong
