"""Training of a predictor on a trace, and a fair test.

The method is binary cross-entropy (DuoServe-MoE Eq. 6) or least squares. Tokens of one request resemble each other, so
whole requests are held out, never single tokens.
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

FEWEST_REQUESTS = 8  # at least one of them is held out


class TrainingError(ValueError):
    """No predictor can be trained on this data.

    The message is one sentence for the user.
    """


@dataclass(frozen=True)
class Recipe:
    """How to train; least squares have neither epochs nor batches."""

    epochs: int = 20  # maximum number
    patience: int = 3  # epochs without a better held-out loss before training ends
    batch: int = 256  # number of tokens
    learning_rate: float = 3e-3  # initial rate of AdamW; it falls to zero as a cosine
    held_out: float = 0.1  # share of the requests
    seed: int = 0  # of the split, the initial weights, and the order of tokens
    look_ahead: int = FAR  # layers ahead for which least squares are solved; other networks predict the next one


def hit_rates(scores: torch.Tensor, experts: torch.Tensor) -> dict[str, float]:
    """Return the accuracy of scores for the chosen experts.

    ``scores`` is [samples, num_experts], ``experts`` [samples, top_k]. The best scores, as many as were chosen, count
    as predicted. ``all_k`` is the share of samples with all predicted (Table 3, "Top-2"), ``at_least_one`` with at
    least one (Table 3), ``accuracy`` the share of chosen experts that were predicted (FIRM-MoE Eq. 7).
    """
    right, whole = hits(scores, experts.long())
    found = {"all_k": whole, "at_least_one": right > 0, "accuracy": right / experts.shape[1]}
    return {name: values.float().mean().item() for name, values in found.items()}


@dataclass(frozen=True)
class Trained:
    """The result of training."""

    network: FoldedMLP  # for inference
    epochs: int  # number of epochs
    metrics: Mapping[str, Mapping[str, float]]
    """Hit rates on the held-out requests: of the model, of popularity and affinity alone, and of the next layer's
    gate if the trace contains its predictions.
    """
    tokens: tuple[int, int]  # number of training tokens and of held-out tokens
    requests: tuple[int, int]  # number of training requests and of held-out requests
    model: ExpertMLP | None = None  # of the epoch with the lowest held-out loss; None for least squares


def split_by_request(trace: Trace, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks of the tokens to train on and to hold out.

    Requests are held out as a whole. Raises TrainingError for too few requests.
    """
    requests = trace.request.unique()
    if len(requests) < FEWEST_REQUESTS:
        raise TrainingError(
            f"the trace holds {len(requests)} requests with answers, but at least {FEWEST_REQUESTS} are needed so that "
            "some can be held out for the test; record more."
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
    """Train on most requests, and stop when the others are predicted no better.

    ``held_out`` marks the tokens to hold out, bool [tokens of answers in order]; random whole requests if None. Only
    tokens of answers count: a predictor is used in decode (5.3), and a prompt's tokens are routed differently. Raises
    TrainingError if there is too little data.
    """
    recipe = recipe or Recipe()
    if trace.header.num_layers < 2:
        raise TrainingError("the model has one MoE layer, so no earlier layer can predict it.")
    if architecture.router_input and trace.router_inputs is None:
        raise TrainingError(
            "the trace has no router inputs, which this architecture needs; record them, or choose another one."
        )
    trace = trace.select(trace.in_order())  # a token that was computed twice counts once
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
        # Initial weights, dropout and the order follow from the seed, and random numbers elsewhere are not affected.
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
            "the trace has no gates, from which linear+input starts: they were not found, or disagreed with the "
            "routers; choose another architecture."
        )
    assert seen.router_inputs is not None
    return train_on(seen.gates, seen.header, seen.experts, seen.router_inputs, shares, look_ahead)


def _scores(network: FoldedMLP, layer: int, trace: Trace) -> torch.Tensor:
    """Return scores of a layer's experts, as in inference.

    The result is float32 [tokens, num_experts].
    """
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
        # The remainder is part of another batch in the next epoch: batch normalisation needs more than one token.
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
    """Return Eq. 6, averaged over tokens, layers and experts."""
    layers = range(1, batch.header.num_layers)
    experts = batch.experts.to(model.states.popularity.device)
    wanted = [chosen(experts[:, layer], batch.header.num_experts) for layer in layers]
    if model.states.architecture.shared:  # normalised over all layers together, because it serves any of them
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
    """Return hit rates averaged over layers."""
    rates = [hit_rates(scores(layer), trace.experts[:, layer]) for layer in range(1, trace.header.num_layers)]
    return {name: sum(rate[name] for rate in rates) / len(rates) for name in rates[0]}
