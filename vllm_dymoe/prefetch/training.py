"""Training a predictor on a trace, by binary cross-entropy (DuoServe-MoE Eq. 6) or least squares, and a fair test.

Tokens of one request resemble each other, so requests are held out and never tokens.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from vllm_dymoe.prefetch.expert_mlp import Architecture, ExpertMLP, States, chosen
from vllm_dymoe.prefetch.folded import FoldedMLP, fold
from vllm_dymoe.prefetch.gate import FAR
from vllm_dymoe.prefetch.linear import hits, train_on
from vllm_dymoe.trace.statistics import affinity, popularity
from vllm_dymoe.trace.trace import Trace

FEWEST_REQUESTS = 8  # of which one at least is held out


class TrainingError(ValueError):
    """Data that no predictor can be trained on; the message is one sentence for the user."""


@dataclass(frozen=True)
class Recipe:
    """How it is trained; least squares have neither epochs nor batches."""

    epochs: int = 20  # at most
    patience: int = 3  # epochs without a better held-out loss before it ends
    batch: int = 256  # tokens
    learning_rate: float = 3e-3  # of AdamW, where it begins; it falls to zero as a cosine
    held_out: float = 0.1  # share of the requests
    seed: int = 0  # of the split, the first weights, and the order of tokens
    look_ahead: int = FAR  # layers ahead that least squares are solved for; other networks know the next one


def hit_rates(scores: torch.Tensor, experts: torch.Tensor) -> dict[str, float]:
    """How right the best of scores [samples, num_experts] are for what was chosen [samples, top_k], as many of them.

    ``all_k`` is the share of samples where all were named (Table 3, "Top-2"), ``at_least_one`` where one was (Table 3),
    ``accuracy`` the share of chosen experts that were (FIRM-MoE Eq. 7).
    """
    right, whole = hits(scores, experts.long())
    found = {"all_k": whole, "at_least_one": right > 0, "accuracy": right / experts.shape[1]}
    return {name: values.float().mean().item() for name, values in found.items()}


@dataclass(frozen=True)
class Trained:
    """The outcome."""

    network: FoldedMLP  # as it runs
    epochs: int  # that were run
    metrics: Mapping[str, Mapping[str, float]]
    """Hit rates on the held-out requests, of the model and, to compare, of popularity and affinity alone, and of the
    next layer's gate where the trace has what it says."""
    tokens: tuple[int, int]  # that were trained on, and that were held out
    requests: tuple[int, int]  # likewise
    model: ExpertMLP | None = None  # of the epoch with the lowest held-out loss; None for least squares


def split_by_request(trace: Trace, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens to train on and to hold out, as masks; no request has some of each. TrainingError for too few requests."""
    requests = trace.request.unique()
    if len(requests) < FEWEST_REQUESTS:
        raise TrainingError(
            f"the trace holds {len(requests)} requests with answers, but {FEWEST_REQUESTS} are the fewest of which "
            "some can be held out to see what a predictor is worth; record more."
        )
    order = requests[torch.randperm(len(requests), generator=torch.Generator().manual_seed(seed))]
    held_out = torch.isin(trace.request, order[: max(1, round(share * len(requests)))])
    return ~held_out, held_out


def train(
    trace: Trace,
    architecture: Architecture,
    recipe: Recipe | None = None,
    progress: Callable[[int, float, float], None] = lambda epoch, loss, held_out_loss: None,
    device: str = "cpu",
    held_out: torch.Tensor | None = None,
) -> Trained:
    """Train on most requests, and stop when the others are predicted no better; TrainingError if there is too little.

    ``held_out`` are the tokens to hold out, bool [tokens of answers in order]; whole requests by chance if None.
    Only tokens of answers count: a predictor is asked in decode (5.3), and a prompt's tokens are routed otherwise.
    """
    recipe = recipe or Recipe()
    if trace.header.num_layers < 2:
        raise TrainingError("the model has one MoE layer, and there is no layer before it to predict it from.")
    if architecture.router_input and trace.router_inputs is None:
        raise TrainingError(
            "the trace has no router inputs, which this architecture sees; record them, or choose another architecture."
        )
    trace = trace.select(trace.in_order())  # a token that was computed twice is one
    trace = trace.select(~trace.prefill)
    if held_out is None:
        held_out = split_by_request(trace, recipe.held_out, recipe.seed)[1]
    seen, unseen = trace.select(~held_out), trace.select(held_out)
    if seen.num_tokens < 2:
        raise TrainingError("one token is left to train on; record more, or hold out fewer requests.")
    shares, related = popularity(seen).float(), affinity(seen).float()
    model, epochs = None, 1
    if architecture.by_least_squares:
        network = _solve(seen, shares, recipe.look_ahead)
    else:
        # The first weights, dropout and the order follow from the seed, and other random numbers do not follow from
        # this.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            states = States(trace.header, architecture, shares, related)
            model, epochs = _descend(ExpertMLP(states).to(device), seen, unseen, recipe, progress)
        model = model.to("cpu")
        network = fold(model)
    metrics = {
        "trained": _hit_rates(unseen, lambda layer: _scores(network, layer, unseen)),
        "affinity": _hit_rates(unseen, lambda layer: related[layer - 1][unseen.experts[:, layer - 1].long()].sum(1)),
        "popularity": _hit_rates(unseen, lambda layer: shares[layer].expand(unseen.num_tokens, -1)),
    }
    if (gate := unseen.next_gate) is not None:
        metrics["next gate"] = _hit_rates(unseen, lambda layer: chosen(gate[:, layer - 1], trace.header.num_experts))
    requests = len(seen.request.unique()), len(unseen.request.unique())
    return Trained(network, epochs, metrics, (seen.num_tokens, unseen.num_tokens), requests, model)


def _solve(seen: Trace, shares: torch.Tensor, look_ahead: int) -> FoldedMLP:
    if seen.gates is None:
        raise TrainingError(
            "the trace has no gates, from which linear+input starts: they were not found, or chose otherwise than the "
            "routers; choose another architecture."
        )
    assert seen.router_inputs is not None
    return train_on(seen.gates, seen.header, seen.experts, seen.router_inputs, shares, look_ahead)


def _scores(network: FoldedMLP, layer: int, trace: Trace) -> torch.Tensor:
    """Of a layer's experts, as the network runs: float32 [tokens, num_experts]."""
    rows = None
    for before in range(layer):
        rows = network.remember(trace.experts[:, before].long(), rows)
    assert rows is not None
    return network.logits(layer, rows, None if trace.router_inputs is None else trace.router_inputs[:, layer - 1])


def _descend(
    model: ExpertMLP, seen: Trace, unseen: Trace, recipe: Recipe, progress: Callable[[int, float, float], None]
) -> tuple[ExpertMLP, int]:
    batches = max(1, seen.num_tokens // recipe.batch)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * batches)
    best, best_loss, stale = model, float("inf"), 0
    for number in range(1, recipe.epochs + 1):
        model.train()
        total = 0.0
        # What is left over goes into another batch of the next epoch: batch normalisation needs more than one token.
        for tokens in torch.randperm(seen.num_tokens)[: batches * recipe.batch].tensor_split(batches):
            loss = _loss(model, seen.select(tokens))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            parts = torch.arange(unseen.num_tokens).split(4 * recipe.batch)
            losses = (_loss(model, unseen.select(part)).item() * len(part) for part in parts)
            held_out_loss = sum(losses) / unseen.num_tokens
        stale += 1
        if held_out_loss < best_loss:
            best, best_loss, stale = copy.deepcopy(model), held_out_loss, 0
        progress(number, total / batches, held_out_loss)
        if stale >= recipe.patience:
            break
    return best.eval(), number


def _loss(model: ExpertMLP, batch: Trace) -> torch.Tensor:
    """Eq. 6, its mean over tokens, layers and experts."""
    layers = range(1, batch.header.num_layers)
    experts = batch.experts.to(model.states.popularity.device)
    wanted = [chosen(experts[:, layer], batch.header.num_experts) for layer in layers]
    if model.states.architecture.shared:  # normalised over all layers together, since it runs for any of them
        states = torch.cat([_states(model, layer, batch) for layer in layers])
        return nn.functional.binary_cross_entropy_with_logits(model.network(1)(states), torch.cat(wanted))
    losses = [
        nn.functional.binary_cross_entropy_with_logits(_logits(model, layer, batch), target)
        for layer, target in zip(layers, wanted, strict=True)
    ]
    return torch.stack(losses).mean()


def _states(model: ExpertMLP, layer: int, batch: Trace) -> torch.Tensor:
    device = model.states.popularity.device
    inputs = None if batch.router_inputs is None else batch.router_inputs[:, layer - 1].to(device)
    return model.states(layer, batch.experts.to(device), inputs)


def _logits(model: ExpertMLP, layer: int, batch: Trace) -> torch.Tensor:
    return model.network(layer)(_states(model, layer, batch))


@torch.no_grad()
def _hit_rates(trace: Trace, scores: Callable[[int], torch.Tensor]) -> dict[str, float]:
    """Mean over layers."""
    rates = [hit_rates(scores(layer), trace.experts[:, layer]) for layer in range(1, trace.header.num_layers)]
    return {name: sum(rate[name] for rate in rates) / len(rates) for name in rates[0]}
