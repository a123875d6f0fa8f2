"""Random gates for the tests of predictors."""

from functools import partial

import torch

from vllm_dymoe.prefetch import Gate


def random_gates(layers, experts, hidden, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(experts, hidden, generator=generator) for _ in range(layers)]
    return [Gate(partial(torch.nn.functional.linear, weight=weight), **options) for weight in weights], weights


def random_inputs(layers, tokens, hidden, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layers, tokens, hidden, generator=generator)
