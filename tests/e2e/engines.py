"""Real vLLM engines in this process, one at a time, and helpers that query them."""

import atexit
import contextlib
import gc
import itertools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import forked
from tests.support.instead import Instead

# vLLM reads this when it is imported: it keeps the engine core in this process, so that tests can inspect the server.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# A test run packs stores into a folder of its own, which is removed at the end.
_STORES = tempfile.mkdtemp(prefix="dymoe-test-stores-")
atexit.register(shutil.rmtree, _STORES, ignore_errors=True)
os.environ["DYMOE_STORE_DIR"] = _STORES

MODEL = Path(__file__).resolve().parents[2] / "benchmarks" / "tiny_moe" / "model"
VOCABULARY = 512  # size for the small random models


def prompts() -> list[str]:
    return [entry["prompt"] for entry in json.loads((MODEL / "prompts.json").read_text())][:16]


def random_prompts(lengths: Iterable[int] = (5, 33, 12, 20), seed: int = 0) -> list[dict[str, list[int]]]:
    """Return random tokens, for the random models, which have no tokenizer.

    The lengths are the same for every seed.
    """
    chosen = random.Random(seed)
    return [{"prompt_token_ids": chosen.choices(range(2, VOCABULARY), k=length)} for length in lengths]


@contextlib.contextmanager
def engine(model: Path | str = MODEL, dymoe: dict[str, Any] | None = None, **settings: Any) -> Iterator[Any]:
    """Start an engine with the plugin's options, or without the plugin if None."""
    from vllm import LLM, envs
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.support.preloaded import freeze

    freeze()
    envs.disable_envs_cache()  # an earlier engine has cached the environment for good
    if dymoe is not None:
        settings = {"quantization": "dymoe", "additional_config": {"dymoe": dymoe}} | settings
    defaults = {
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
        "max_logprobs": 10,
        "kv_cache_memory_bytes": 128 << 20,
    }
    with mock.patch.dict(os.environ), forked.instead_of_spawn():
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would take precedence
        llm = LLM(model=str(model), **(defaults | settings))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def small_engine(model: Path, dymoe: dict[str, Any] | None = None, **settings: Any) -> Any:
    return engine(model, dymoe, **({"skip_tokenizer_init": True, "max_num_seqs": 8, "max_model_len": 128} | settings))


def in_own_process(function: Callable[..., Any], *arguments: Any, timeout: float = 500) -> Any:
    """Return the result of a function that runs in a process of its own.

    For engines that leave something behind which breaks vLLM's next engine in the same process.
    """
    with ProcessPoolExecutor(1, mp_context=forked.FORKED) as pool:
        return pool.submit(function, *arguments).result(timeout)


CORES = sorted(os.sched_getaffinity(0))[:2]
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two ranks need two cores")


def prepare_rank(log: Path) -> None:
    """Set up a rank's own process: one core, and all output in a file."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, CORES))


def server_of(llm: Any) -> Any:
    server = llm.llm_engine.vllm_config.quant_config.loaded_model().server
    assert server is not None
    return server


@dataclass
class Answer:
    """Greedy tokens of one prompt, and the top log-probabilities at each position."""

    tokens: list[int]
    logprobs: list[dict[int, float]]

    @classmethod
    def of(cls, completion: Any) -> "Answer":
        tops = [{t: entry.logprob for t, entry in position.items()} for position in completion.logprobs or []]
        return cls(list(completion.token_ids), tops)


def answer(llm: Any, texts: list[Any], max_tokens: int = 32, logprobs: int | None = 5) -> list[Answer]:
    """Return greedy answers to prompts that are submitted together.

    A prompt is a text, or {"prompt_token_ids": [...]}.
    """
    from vllm import SamplingParams

    words = isinstance(texts[0], str)
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, detokenize=words
    )
    return [Answer.of(output.outputs[0]) for output in llm.generate(texts, sampling, use_tqdm=False)]


def python_steps() -> Any:
    """Context in which Python sees every layer.

    Otherwise torch's operator runs a CPU's layers alone.
    """
    from vllm_dymoe.executor.host_planned import HostPlannedLayers

    return mock.patch.object(HostPlannedLayers, "needs_python", True)


@contextlib.contextmanager
def recorded_layers(server: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the layers' outputs, whether the host or the device plans."""
    outputs: list[torch.Tensor] = []

    def recorded(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = original(*args, **kwargs)
            outputs.append(out.clone())
            return out

        return forward

    ways = [(server.host_planned, "forward")]
    if server.small_batches is not None:
        ways += [(server.small_batches, "forward"), (server.small_batches, "forward_large")]
    for owner, name in ways:
        setattr(owner, name, recorded(getattr(owner, name)))
    try:
        with python_steps():
            yield outputs
    finally:
        for owner, name in ways:
            delattr(owner, name)


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def resize(llm: Any, budget: str) -> None:
    server = server_of(llm)
    server.resize(server.minimum_budget if budget == "minimum" else budget)


def answers_at_budgets(llm: Any, budgets: Iterable[str], ask: Callable[[], Any]) -> Any:
    """Return what ``ask`` returns, checked to be the same at every budget.

    The outputs of all layers have to be the same bits, too. On a CPU the answers of steps without Python are compared
    as well.
    """
    server, want, want_layers = server_of(llm), None, []
    for budget in budgets:
        resize(llm, budget)
        llm.reset_prefix_cache()
        with recorded_layers(server) as layers:
            got = ask()
        server.check_integrity()
        slots = sum(pool.nbytes for pool in server.cache.pools.values())
        assert slots + server.kernel.workspace_bytes <= server.budget.limit
        assert server.budget.reserved <= server.budget.limit
        if want is None:
            want, want_layers = got, layers
        assert got == want, budget
        assert same_bits(layers, want_layers), budget
    llm.reset_prefix_cache()
    assert ask() == want, "without Python"
    return want


class WatchedPolicy:
    """A policy that records its calls and its answers."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.precision = Instead(policy.precision, select=self._select, planned=False)
        self.seen: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def _select(self, routing: Any) -> Any:
        plan = self._policy.precision.select(routing)
        self.seen.append((routing, plan))
        return plan


def watch(server: Any) -> WatchedPolicy:
    """Watch the server's policy from now on; return the record."""
    watched = WatchedPolicy(server.policy)
    server.serve(server.options, watched)
    return watched


@contextlib.contextmanager
def gates_compared(llm: Any, change: Callable[[Any], Any] = lambda gate: gate) -> Iterator[list[float]]:
    """Collect how well gates reproduce vLLM's choices, per MoE layer and step.

    Args:
        llm: the engine.
        change: returns the gate to compare in place of the layer's own one.
    """
    from vllm_dymoe.vllm_plugin.gates import NEAR_TIE

    model = llm.llm_engine.vllm_config.quant_config.loaded_model()
    shares: list[float] = []
    original = model.server.host_planned.forward

    def forward(routing: Any, activation: Any) -> torch.Tensor:
        gate = change(model.predictor_observer.gates[routing.layer])
        shares.append(gate.agreement(routing.x, routing.ids, NEAR_TIE))
        return original(routing, activation)

    model.server.host_planned.forward = forward
    try:
        with python_steps():
            yield shares
    finally:
        del model.server.host_planned.forward


def equal_share(ours: list[Answer], theirs: list[Answer]) -> float:
    """Share of equal tokens up to each prompt's first difference.

    After the first difference the two continue different texts, and equal positions mean nothing.
    """
    compared = equal = 0
    for a, b in zip(ours, theirs, strict=True):
        same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.tokens, b.tokens, strict=True)))
        equal += len(same)
        compared += min(len(same) + 1, len(a.tokens))
    return equal / compared


def share_of_likeliest(model: Any, prompts: Iterable[list[int]], answers: Iterable[list[int]]) -> float:
    """Share of the answers' tokens that a transformers model finds likeliest.

    It is asked at each position, after the same text.
    """
    found = []
    for read, said in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([read + said])).logits[0, len(read) - 1 : -1]
        found.append(logits.argmax(1) == torch.tensor(said))
    return float(torch.cat(found).float().mean())


def check_logprobs_close(ours: list[Answer], theirs: list[Answer]) -> None:
    """Check vLLM's own criterion for two sets of answers.

    At the first difference, each token has to be among the other's top log-probabilities.
    """
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for position, (token_a, token_b) in enumerate(zip(a.tokens, b.tokens, strict=True)):
            if token_a != token_b:
                where = f"prompt {number}, token {position}"
                assert token_a in b.logprobs[position], f"{where}: {token_a} is not among the other's likely tokens"
                assert token_b in a.logprobs[position], f"{where}: {token_b} is not among the other's likely tokens"
                break


def check_first_logprobs_close(ours: list[Answer], theirs: list[Answer], bound: float = 0.1) -> None:
    """Check that the first tokens' log-probabilities agree.

    They follow from the same text, whatever comes later. Measured: at most 0.05, from rounding to bfloat16; a compiled
    and an eager model differ as much.
    """
    for a, b in zip(ours, theirs, strict=True):
        first, want = a.logprobs[0], b.logprobs[0]
        assert all(abs(first[token] - want[token]) < bound for token in first.keys() & want.keys()), (first, want)


def next_gate_accuracy(trace):
    """Share of the next layer's choices that its gate predicts one layer early.

    It is given this layer's input. Shape [layers - 1].
    """
    return (trace.experts[:, 1:, :, None] == trace.next_gate[..., None, :]).any(-1).double().mean((0, 2))
