"""Chooses at start how a GPU's misses are served.

All of them are fetched, or they are shared with the CPU. Rates from data sheets, or measured one by one, have led to
choices that were wrong by large factors. So the MoE layers of a few synthetic steps of one token run both ways on the
server as it will be, and the faster way is kept for the next start, with the identity of machine, card and storage.
CPU execution may change last bits of answers, so the choice does not change while serving. Prefetch changes no bits,
and needs the idle link time between layers, which MoE layers alone do not have: that is measured while serving
(``prefetch.pace.StepPace``).
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from vllm_dymoe.cache.pages import machine
from vllm_dymoe.durable import keep_beside, kept_beside
from vllm_dymoe.kernels import Activation, native
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.server.expert_server import ExpertServer

CHOICES = "misses.json"  # file name, next to a store
_LAST = "the last start"  # key of the last choice, with which a start begins, because it is likely to be made again
_WAYS: tuple[Literal["share", "fetch"], ...] = ("share", "fetch")
_WARM_UP, _STEPS = 4, 12
_REUSED = 0.5  # of a token's experts, as measured from token to token (benchmarks/tiny_moe)


@dataclass(frozen=True)
class MissesChoice:
    """What a start has measured."""

    misses: Literal["share", "fetch"]
    seconds: Mapping[str, float]  # of the MoE layers of a step, by option


def choose_misses(
    make: Callable[[Options], ExpertServer], options: Options, activation: Activation, kept: Path | None,
    say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter,
) -> ExpertServer:  # fmt: skip
    """Return a server with the faster of ``misses`` "share" and "fetch".

    Args:
        make: makes a server; one at a time exists.
        options: with ``misses`` "auto".
        activation: of the experts.
        kept: file that stores choices between starts; None to measure anew.
        say: called with a sentence for the log.
    """

    def made(way: str) -> ExpertServer:
        return make(options.model_copy(update={"misses": way}))

    server, first = None, None if kept is None else kept_beside(kept, _LAST, MissesChoice)
    with contextlib.suppress(ConfigError):  # what could be shared then may be impossible now
        server = None if first is None else made(first.misses)
    server = server or made("fetch")
    assert server.small_batches is not None
    if not server.small_batches.large.most_streamed or native.load() is None:
        if server.options.misses == "fetch":
            return server
        server.close(keep_store=True)
        return made("fetch")
    key = _identity(server)
    choice = None if kept is None else kept_beside(kept, key, MissesChoice)
    source = "as measured at an earlier start"
    if choice is None:
        way, source = server.options.misses, "as measured now"
        seconds: dict[str, float] = {way: step_seconds(server, activation, clock)}
        (other,) = (another for another in _WAYS if another != way)
        server.close(keep_store=True)
        try:
            server = made(other)
        except ConfigError as error:
            say(f"misses are fetched, because they cannot be shared: {error}")
            return made("fetch")
        seconds[other] = step_seconds(server, activation, clock)
        choice = MissesChoice(min(_WAYS, key=lambda way: seconds[way]), seconds)
    if kept is not None:
        for name in (key, _LAST):
            keep_beside(kept, name, choice)
    if server.options.misses != choice.misses:
        server.close(keep_store=True)
        server = made(choice.misses)
    shared, fetched = (1e3 * choice.seconds[way] for way in _WAYS)
    how = "shared between link and CPU" if choice.misses == "share" else "fetched"
    say(f"misses are {how}: a step's MoE layers take {shared:.2f} ms with CPU execution and {fetched:.2f} ms without, "
        f"{source}.")  # fmt: skip
    return server


def step_seconds(server: ExpertServer, activation: Activation, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the median seconds of the MoE layers of a step of one token.

    The server forgets the measured steps afterwards.
    """
    path, experts = server.small_batches, server.experts
    assert path is not None
    fmt, generator = next(iter(experts.formats.values())), torch.Generator("cpu").manual_seed(0)
    on_cpu: dict[str, Any] = {"generator": generator, "device": "cpu"}  # while vLLM loads, defaults are the model's
    x = torch.randn(1, fmt.hidden, dtype=torch.float32, **on_cpu).to(server.device, fmt.dtype)
    weights = torch.full((1, experts.top_k), 1 / experts.top_k, dtype=torch.float32, device=server.device)
    chosen = [torch.randperm(experts.num_experts, **on_cpu) for _ in experts.layers]
    times, fresh = list[float](), max(1, round((1 - _REUSED) * experts.top_k))
    path.tell(1)
    for _ in range(_WARM_UP + _STEPS):
        for layer, order in enumerate(chosen):  # some of the experts of the step before, and others
            rest = order[experts.top_k :][torch.randperm(experts.num_experts - experts.top_k, **on_cpu)]
            kept, left = order[fresh : experts.top_k], order[:fresh]
            chosen[layer] = torch.cat((kept, rest, left))
        ids = torch.stack([order[: experts.top_k] for order in chosen]).int().to(server.device)
        _finish(server)
        begun = clock()
        for layer in range(len(experts.layers)):
            of_layer = ids[layer : layer + 1]
            path.run(layer, x, weights, of_layer, activation, global_ids=of_layer)
        _finish(server)
        times.append(clock() - begun)
    path.tell(0)
    server.start_over()
    server.reset_stats()
    return median(times[_WARM_UP:])


def _finish(server: ExpertServer) -> None:
    if server.device.type == "cuda":
        torch.cuda.synchronize(server.device)


def _identity(server: ExpertServer) -> str:
    """Return what a choice depends on."""
    device, experts = server.device, server.experts
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "an emulated card"
    nbytes = {bits: fmt.whole_nbytes for bits, fmt in experts.formats.items()}
    slots = {precision.value: count for precision, count in server.slot_plan.slots.items()}
    link = server.options.link_gbps or "its own"
    return (
        f"{machine()}, {card}, link {link}, {server.store.description}, {len(experts.layers)} x {experts.num_experts} "
        f"experts of {nbytes} bytes, slots {slots}, policy {server.policy.name} {dict(server.options.policy_options)}, "
        f"activations of {server.options.activations} bits"
    )
