"""A synthetic model: random experts in a store, random gates, and its steps."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from layers import DTYPE, Model
from torch import Tensor

from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import FileStore, HostStore, Manifest, whole_host_cache
from vllm_dymoe.cache.store.pinning import CudaPinner
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.kernels import Activation, Decode, Grouped, expert_reference
from vllm_dymoe.options import Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies import Policy
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.prefetch import Gate, RoutedModel
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.server import ExpertServer

DEVICE = torch.device("cuda")
PREFETCH: Mapping[str, Policy] = {"none": Exact(look_ahead=0), "next-gate": Exact()}
"""Policies by their predictors."""
MIXED = {
    name: Dymoe(retention=0.7, high_by="depth", reuse_high=False, look_ahead=int(name != "none")) for name in PREFETCH
}
"""The same with two precisions, chosen by a step's routing alone, so that no budget changes them."""


def pinned_store(model: Model, bits: Sequence[int], seed: int = 0) -> HostStore:
    """Return a store in pinned memory, filled from files as at a start."""
    with tempfile.TemporaryDirectory() as folder:
        files = file_store(model, bits, Path(folder) / "store", seed)
        host_cache = HostCache(files, whole_host_cache(files.experts), CudaPinner(DEVICE))
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
        decode: Decode = Decode.PLAIN,
        grouped: Grouped = Grouped.PLAIN,
        **options: Any,
    ) -> ExpertServer:
        """Return a server at a budget, which can also be "minimum"."""
        gates = [Gate(lambda x, layer=layer: x @ self._gates[layer].T) for layer in range(self.model.layers)]
        m = self.model
        routed = RoutedModel(m.layers, m.experts, m.top_k, gates, hidden=m.hidden, device=DEVICE)
        chosen = Options(high=high, low=low, group_size=m.group, expert_budget="100%", **options)
        prefetching = PREFETCH[prefetch]
        if policy is None:
            policy = MIXED[prefetch] if low else prefetching
        predictor = prefetching.prefetch and prefetching.prefetch.make(routed)
        ways: dict[str, Any] = {"decode": decode, "grouped": grouped}
        server = ExpertServer(store, chosen, DEVICE, policy=policy, predictor=predictor, **ways)
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

    def step(self, server: ExpertServer, x: Tensor, before: Callable[[], None] = lambda: None) -> list[Seen]:
        """Run all layers in sequence; the host does not wait for the card.

        Args:
            before: called before each layer is launched.
        """
        path, seen = server.small_batches, list[Seen]()
        assert path is not None
        large = len(x) > path.most_rows
        path.begin_step(len(x), large=large)
        run = path.forward_large if large else path.forward
        for layer in range(self.model.layers):
            weights, ids = self.route(layer, x)
            before()
            out = run(layer, x, weights, ids, Activation.SILU)
            seen.append(Seen(layer, x, weights, ids, out))
            x = normalized(x + out)
        return seen

    def versions(self, seen: Seen, high: int, low: int) -> dict[int, int]:
        """Return the bits of each expert of a layer's step."""
        if not low:
            return dict.fromkeys(range(self.model.experts), high)
        given = (tensor.cpu() for tensor in (seen.x, seen.ids, seen.weights))
        chosen = MIXED["none"].precision.select(Routing(seen.layer, self.model.layers, *given))
        return {expert: high if precision is Precision.HIGH else low for expert, precision in chosen.items()}

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
