"""Recording a trace of prompts: an engine of its own, with the recorder on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_dymoe.vllm_adapter.trace_tap import DOMAIN


def record_prompts(
    model: str,
    prompts: Sequence[tuple[str, str]],
    folder: Path,
    max_tokens: int,
    limit: str,
    inputs: bool,
    options: Mapping[str, Any],
    engine: Mapping[str, Any],
) -> dict[str, Any]:
    """Answer prompts greedily, and record what routers choose.

    Args:
        model: as for ``vllm serve``.
        prompts: texts, each with its domain, which may be empty.
        folder: where the trace goes.
        max_tokens: of each answer.
        limit: bytes that the folder may have.
        inputs: whether the routers' inputs are recorded as well.
        options: the plugin's.
        engine: arguments of ``LLM``.

    Returns:
        What ``dymoe_trace`` says.
    """
    from vllm import LLM, SamplingParams

    # Tokens that the prefix cache has are not computed, and what is not computed is not recorded.
    settings = {"enable_prefix_caching": False, **engine}
    llm = LLM(
        model=model,
        quantization="dymoe",
        additional_config={"dymoe": {**options, "trace": {"folder": str(folder), "limit": limit, "inputs": inputs}}},
        **settings,
    )
    sampling = [
        SamplingParams(temperature=0, max_tokens=max_tokens, extra_args={DOMAIN: domain} if domain else None)
        for _, domain in prompts
    ]
    llm.generate([text for text, _ in prompts], sampling)
    answers: list[dict[str, Any] | None] = llm.collective_rpc("dymoe_trace")
    return next(answer for answer in answers if answer is not None)
