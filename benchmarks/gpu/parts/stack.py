"""A synthetic model: random experts in a store, random gates, and its steps."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from layers import DTYPE, Model
from torch import Tensor

from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import FileStore, HostStore, Manifest, whole_host_cache
from vllm_dymoe.cache.store.page_lock import CudaPageLock
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.cache.transfer import make_engine
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.kernels import Activation, Decode, Grouped, expert_reference
from vllm_dymoe.options import Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.policies import Policy
from vllm_dymoe.policies.base import PrecisionPolicy
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.prefetch import Gate, RoutedModel
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.server import ExpertServer

DEVICE = torch.device("cuda")
PREFETCH: Mapping[str, Policy] = {"none": Exact(look_ahead=0), "next-gate": Exact()}
"""Policies by their predictors."""


@dataclass(frozen=True)
class NumberPrecision(PrecisionPolicy):
    """Gives every third expert low precision."""

    before: Callable[[], None] = lambda: None
    """Called with each plan, after the host has read a layer's routing and before any transfer or launch for it."""

    def shares(self, num_layers: int, top_k: int) -> Mapping[Precision, Sequence[float]]:
        """Return two thirds for high precision, and one third for low."""
        return {Precision.HIGH: [2 / 3] * num_layers, Precision.LOW: [1 / 3] * num_layers}

    def select(self, routing: Routing) -> Mapping[int, Precision]:
        """Choose by number alone, so that no budget changes the precisions."""
        self.before()
        return {expert: Precision.LOW if expert % 3 == 0 else Precision.HIGH for expert in routing.active}


class ByNumber(Exact):
    """A policy that chooses an expert's precision by its number alone."""

    before: Callable[[], None] = lambda: None

    @cached_property
    def precision(self) -> PrecisionPolicy:
        """Both precisions."""
        return NumberPrecision(frozenset((Precision.HIGH, Precision.LOW)), before=self.before)


def pinned_store(model: Model, bits: Sequence[int], seed: int = 0) -> HostStore:
    """Return a store in pinned memory, filled from files as at a start."""
    with tempfile.TemporaryDirectory() as folder:
        files = file_store(model, bits, Path(folder) / "store", seed)
        host_cache = HostCache(files, whole_host_cache(files.experts), CudaPageLock(DEVICE))
        host_cache.fill()
    return host_cache


def file_store(model: Model, bits: Sequence[int], folder: Path, seed: int = 0) -> FileStore:
    """Return the same bytes in files."""
    experts = model.at(bits)
    store = random_store(experts, StoreWriter(folder, Manifest(experts, "random", "made up")), seed)
    assert isinstance(store, FileStore)
    return store


class Seen(NamedTuple):
    """One layer of one step."""

    layer: int
    x: Tensor  # [tokens, hidden]
    weights: Tensor  # [tokens, top_k] float32
    ids: Tensor  # [tokens, top_k] int32
    out: Tensor  # [tokens, hidden]


class Stack:
    """Gates on the card, and steps through them.

    Args:
        model: sizes of the layers.
        exact: route without torch.mm, whose libraries may sum in another order in a graph or with concurrent streams.
    """

    def __init__(self, model: Model, *, exact: bool) -> None:
        self.model = model
        self._exact = exact
        generator = torch.Generator().manual_seed(1)
        size = model.layers, model.experts, model.hidden
        # Adjacent gates are similar, as in real models, so that one predicts the next.
        common = torch.randn(size[1:], generator=generator)
        gates = (common + torch.randn(size, generator=generator)) * model.hidden**-0.5
        self._gates = gates.to(DTYPE).to(DEVICE)

    def server(
        self,
        store: HostStore,
        high: int,
        low: int = 0,
        budget: str = "100%",
        prefetch: str = "none",
        policy: Policy | None = None,
        threads: int | None = None,
        decode: Decode = Decode.PLAIN,
        grouped: Grouped = Grouped.PLAIN,
        **options: Any,
    ) -> ExpertServer:
        """Return a server at a budget, which can also be "minimum".

        With two precisions, an expert's number decides which one it gets.
        """
        gates = [Gate(lambda x, layer=layer: x @ self._gates[layer].T) for layer in range(self.model.layers)]
        m = self.model
        routed = RoutedModel(m.layers, m.experts, m.top_k, gates, hidden=m.hidden, device=DEVICE)
        chosen = Options(
            high=high, low=low, group_size=m.group, expert_budget="100%", **({"planning": "host"} | options)
        )
        prefetching = PREFETCH[prefetch]
        largest = max(fmt.nbytes for fmt in store.experts.formats.values())
        engine = None if threads is None else make_engine(store, DEVICE, largest, io_threads=threads)
        if policy is None:
            policy = ByNumber(look_ahead=prefetching.prefetch is not None) if low else prefetching
        predictor = prefetching.prefetch and prefetching.prefetch.make(routed)
        ways: dict[str, Any] = {"decode": decode, "grouped": grouped}
        server = ExpertServer(store, chosen, DEVICE, policy=policy, engine=engine, predictor=predictor, **ways)
        if budget != "100%":
            server.resize(server.minimum_budget if budget == "minimum" else budget)
        return server

    def route(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and experts of a layer's tokens."""
        gate = self._gates[layer]
        logits = (x.float().unsqueeze(1) * gate.float()).sum(-1) if self._exact else (x @ gate.T).float()
        scores = logits.softmax(-1)
        weights, ids = scores.topk(self.model.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids.int()

    def inputs(self, tokens: int, seed: int) -> Tensor:
        """Return inputs of the first layer: [tokens, hidden]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, self.model.hidden, generator=generator).to(DTYPE).to(DEVICE)

    def step(self, server: ExpertServer, x: Tensor) -> list[Seen]:
        """Run all layers in sequence; the host does not wait for the card."""
        phase = Phase.DECODE if len(x) < 16 else Phase.PREFILL
        seen = []
        for layer in range(self.model.layers):
            weights, ids = self.route(layer, x)
            out = server.host_planned.forward(Routing(layer, self.model.layers, x, ids, weights, phase))
            seen.append(Seen(layer, x, weights, ids, out))
            x = normalized(x + out)
        return seen

    def reference(self, store: HostStore, seen: Seen, bits: Mapping[int, int]) -> Tensor:
        """Return a layer's correct result, with experts of these bit-widths.

        It is computed in float64 on the host.
        """
        x, weights, ids = seen.x.cpu(), seen.weights.cpu().double(), seen.ids.cpu()
        total = torch.zeros(x.shape, dtype=torch.float64)
        for expert in ids.unique().tolist():
            fmt = store.experts.formats[bits[expert]]
            packed = torch.empty(fmt.nbytes, dtype=torch.uint8)
            store.read_into(SliceKey(seen.layer, expert, bits[expert]), packed)
            tokens, k = (ids == expert).nonzero(as_tuple=True)
            outputs = expert_reference(x[tokens], *fmt.view(packed), Activation.SILU)
            total.index_add_(0, tokens, weights[tokens, k].unsqueeze(1) * outputs)
        return total


def normalized(x: Tensor) -> Tensor:
    """Return the rows with the length that a model's normalisation gives them."""
    return (x.float() * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the difference's norm, relative to that of the correct result.

    It is infinite for NaN.
    """
    error = float((got.cpu().double() - want).norm() / want.norm())
    return error if math.isfinite(error) else math.inf


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal bit for bit, including NaNs."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))
