"""Batches that are filled up as for a captured graph, in an engine that captures none."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu import model_runner as second_runner

from tests.e2e.engines import answer, check_logprobs_close, prompts, recorded_layers, runtime_of
from vllm_dymoe.vllm_adapter.running import Running

MULTIPLE = 8


def _filled_up(descriptor: Any) -> Any:
    """A graph of the next size that is larger."""
    return replace(descriptor, num_tokens=(descriptor.num_tokens // MULTIPLE + 1) * MULTIPLE)


@contextlib.contextmanager
def padded_batches(llm: Any, *, to_none: bool) -> Iterator[list[int]]:
    """Fill up every batch; collects how many rows of each layer are padding.

    Args:
        llm: an engine in this process, with either of vLLM's model runners.
        to_none: route those rows to expert -1, as the routers of a GPU do from vLLM 0.32 on; those of a CPU, and of
            older versions, choose experts for them.
    """
    padding: list[int] = []
    run = Running.forward

    def watched(self: Any, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        filled = get_forward_context().is_padding
        padding.append(int(filled.sum()))
        out = run(self, layer, x, weights, ids.masked_fill(filled[:, None], -1) if to_none else ids)
        assert not out[filled].any()
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Running, "forward", watched)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        if isinstance(runner, second_runner.GPUModelRunner):
            dispatch = second_runner.dispatch_cg_and_sync_dp

            def dispatched(*arguments: Any, **others: Any) -> Any:
                descriptor, *rest = dispatch(*arguments, **others)
                return _filled_up(descriptor), *rest

            patch.setattr(second_runner, "dispatch_cg_and_sync_dp", dispatched)
        else:
            determine = runner._determine_batch_execution_and_padding

            def determined(*arguments: Any, **others: Any) -> Any:
                mode, descriptor, *rest = determine(*arguments, **others)
                return mode, _filled_up(descriptor), *rest

            patch.setattr(runner, "_determine_batch_execution_and_padding", determined)
        yield padding


def check_padding(llm: Any, max_tokens: int) -> None:
    """Whatever padding is routed to: the same tokens, bits of every layer, and counts.

    They are compared with each other, since vLLM's own layers may round otherwise for another number of rows, and so
    may without padding; there the layers have to see as many rows.
    """
    runtime = runtime_of(llm)

    def served() -> Any:
        runtime.memory.clear()
        llm.reset_prefix_cache()
        runtime.reset_stats()
        with recorded_layers(runtime) as layers:
            answers = answer(llm, prompts()[:2], max_tokens=max_tokens)
        runtime.check_integrity()
        stats = runtime.stats()
        return answers, layers, (stats.planned, stats.hits, stats.misses, stats.evictions)

    answers, layers, _ = served()
    seen = []
    for to_none in (True, False):
        with padded_batches(llm, to_none=to_none) as padding:
            seen.append(served())
        assert len(padding) == len(layers)
        assert min(padding) > 0
    (nones, nones_layers, nones_counts), (tokens, tokens_layers, tokens_counts) = seen
    assert nones_counts == tokens_counts
    assert [len(layer) for layer in nones_layers] == [len(layer) for layer in layers]
    assert [a.tokens for a in nones] == [a.tokens for a in tokens]
    assert all(torch.equal(a, b) for a, b in zip(nones_layers, tokens_layers, strict=True))
    check_logprobs_close(nones, answers)
