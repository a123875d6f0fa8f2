"""How much device memory an automatic expert budget takes.

vLLM sizes its KV cache from what is left, and refuses to start if the longest request does not fit. So the KV cache of
one such request, or of as many as the budget says, comes first, then the activations of a step, which are estimated
here, then experts.
"""

from dataclasses import dataclass

from vllm_dymoe.options import ConfigError
from vllm_dymoe.units import size

# Share of what is left after activations. The rest is KV cache: with more than one longest request's, more requests run
# at once.
_MOST_FOR_EXPERTS = 0.8
# Workspaces of attention and matrix libraries, which are allocated at their first call.
_LIBRARIES = 512 << 20
# Bytes per logit of sampling with top-k and top-p: two float32 copies, sorted values and their places, two sums, a
# mask.
_SAMPLING = 32
# Driver memory for one captured graph of about ten kernels, as measured by others.
_GRAPH = 128 << 10


@dataclass(frozen=True)
class StepShape:
    """The sizes that determine the memory of activations on one rank."""

    tokens: int  # of the largest step
    sequences: int  # requests whose next token is sampled at once
    hidden: int  # model width
    attention: int  # width of queries, keys and values together
    intermediate: int  # expert width
    top_k: int  # experts per token
    vocabulary: int  # logits per request
    itemsize: int = 2  # bytes of an activation
    graph_tokens: int = 0  # of the largest captured step; 0 without graphs
    graphs: int = 0  # number of captured graphs

    @property
    def nbytes(self) -> int:
        """Upper estimate of the bytes that a step needs.

        Weights and KV cache come in addition.
        """
        # A dense layer's input, residual, norm, output and the next input; an expert's input, output and hidden state.
        token = 10 * self.hidden + 2 * self.attention + self.top_k * (2 * self.hidden + 3 * self.intermediate)
        sampling = self.sequences * self.vocabulary * _SAMPLING
        step = max(self.tokens * token * self.itemsize, sampling)  # they do not overlap in time
        return step + self.graph_tokens * token * self.itemsize + self.graphs * _GRAPH + _LIBRARIES


def automatic_share(
    free: int, kv_cache: int, activations: int, least: int, max_model_len: int, *, fixed: bool = True,
    requests: int = 1,
) -> int:  # fmt: skip
    """Return the bytes for experts.

    Args:
        free: bytes that vLLM may use of the device after the dense weights are loaded.
        kv_cache: bytes for the requests, or what the user reserved.
        activations: bytes that a step needs.
        least: the smallest feasible budget.
        fixed: whether ``max_model_len`` is required; otherwise vLLM shortens it to what fits.
        requests: number of requests of ``max_model_len`` tokens.

    Raises:
        ConfigError: no room is left for the requests.
    """
    spare = free - activations
    if not fixed:
        kv_cache = max(0, min(kv_cache, spare // 2))
    if spare - kv_cache >= least:
        return max(least, min(int(spare * _MOST_FOR_EXPERTS), spare - kv_cache))
    fits = max(0, spare - least) * max_model_len // max(1, kv_cache)
    shorter = f"set --max-model-len to at most {fits}, or " if 0 < fits < max_model_len else ""
    so_many, takes = ("one request", "takes") if requests == 1 else (f"{requests} requests", "take")
    raise ConfigError(
        f"vllm-dymoe: of {size(max(0, free))} of device memory left after the dense weights, {so_many} of "
        f"{max_model_len} tokens {takes} {size(kv_cache)} in the KV cache, activations about {size(activations)} and "
        f"the fewest experts {size(least)}; {shorter}raise --gpu-memory-utilization, lower --max-num-batched-tokens or "
        "--max-num-seqs, or set expert_budget yourself.",
        option="expert_budget",
        least=least,
    )
