"""Measures how far answers are from those of the same model at 16 bits."""

import math
from dataclasses import dataclass, field

import torch


@dataclass
class Scores:
    """Predictions for every token of the texts."""

    logprobs: list[torch.Tensor] = field(default_factory=list)
    """For each text float32 [tokens - 1, vocabulary], after each token but the last."""
    moved: int = 0  # bytes of experts that were fetched to the device
    hit_rate: float = 0.0  # share of hits among needed experts
    steps: int = 0  # of the engine
    planned: dict[str, int] = field(default_factory=dict)  # experts that the policy wanted in each precision


def losses(scores: Scores, reference: Scores, texts: list[list[int]]) -> dict[str, float]:
    """Return the distance of scores from those at 16 bits.

    Perplexity; loss, relative to the reference's; agreement, the share of tokens with the same likeliest successor; KL
    divergence from the reference in nats. Errors are standard errors of the mean over tokens, where each token is
    compared with itself at 16 bits.
    """
    nats, more, kl, same = [], [], [], []
    for ours, theirs, text in zip(scores.logprobs, reference.logprobs, texts, strict=True):
        following = torch.tensor(text[1:]).unsqueeze(1)
        nats.append(-ours.gather(1, following).squeeze(1))
        more.append(nats[-1] + theirs.gather(1, following).squeeze(1))
        kl.append((theirs.exp() * (theirs - ours)).sum(1))
        same.append((ours.argmax(1) == theirs.argmax(1)).float())
    difference, divergence = torch.cat(more).double(), torch.cat(kl).double()
    loss, root = math.expm1(difference.mean()), math.sqrt(len(difference))
    return {
        "perplexity": math.exp(torch.cat(nats).double().mean()),
        "loss": loss,
        "loss_error": (1 + loss) * float(difference.std()) / root,
        "agreement": float(torch.cat(same).mean()),
        "kl_nats": float(divergence.mean()),
        "kl_error": float(divergence.std()) / root,
    }
