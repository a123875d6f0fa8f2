"""Functions for users of ``LLM()``.

They make a calibration, a trace of prompts, and a summary.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.model_config import read_config
from vllm_dymoe.quantize.recording import MANIFEST, CalibrationError, Recording, check_space
from vllm_dymoe.server.stats import ServerStats
from vllm_dymoe.vllm_plugin.announcements import Summary
from vllm_dymoe.vllm_plugin.model_files import local_folder

PART_TOKENS = 8192  # what a killed run has to compute again


def summary(llm: Any) -> Summary:
    """Return what an ``LLM`` did since its first request or the last reset.

    Print the summary, or call its ``to_dict()``.
    """
    return Summary(tuple(ServerStats(**answer) for answer in llm.collective_rpc("dymoe_stats")))


def record_trace(
    model: str,
    prompts: Sequence[str],
    folder: Path,
    *,
    max_tokens: int = 128,
    limit: str = "256MiB",  # maximum size of the folder
    inputs: bool = False,  # record the routers' inputs as well
    options: Mapping[str, Any] | None = None,  # of the plugin
    engine: Mapping[str, Any] | None = None,  # arguments of ``LLM``
) -> dict[str, Any]:
    """Answer prompts greedily and record routing; return what ``dymoe_trace`` returns."""
    trace = {"folder": str(folder), "limit": limit, "inputs": inputs}
    # Tokens found in the prefix cache are not computed, so they would not be recorded.
    settings = {"enable_prefix_caching": False, **(engine or {})}
    llm = LLM(model=model, quantization="dymoe", additional_config={"dymoe": {**(options or {}), "trace": trace}},
              **settings)  # fmt: skip
    llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=max_tokens))
    answers: list[dict[str, Any] | None] = llm.collective_rpc("dymoe_trace")
    return next(answer for answer in answers if answer is not None)


def calibrate(
    model: Any,  # an ``LLM`` with quantization ``dymoe``, or a folder, for which one is started at 16 bits
    texts: Iterable[str],  # each is cut into pieces of ``length`` tokens
    out: str | Path,
    *,
    tokens: int = 131072,  # surplus pieces are left out evenly
    length: int = 2048,
    # Called with tokens done and in total, after each part.
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,  # of the plugin, for a model that is started here
) -> Recording:
    """Record the inputs of a model's experts while it reads texts.

    The calibration is for ``vllm-dymoe quantize --calibration``. After an interruption it resumes with the first
    incomplete part.

    Raises:
        CalibrationError: the folder holds another calibration or cannot be written, or the model failed.
    """
    llm = _start(str(model), length, options) if isinstance(model, str | Path) else model
    config = llm.llm_engine.vllm_config
    length = min(length, config.model_config.max_model_len - 1)
    pieces = _pieces(llm.get_tokenizer(), [texts] if isinstance(texts, str) else texts, tokens, length)
    # Equal texts always give equal parts.
    ends = zip(pieces, itertools.accumulate(map(len, pieces)), strict=True)
    groups = itertools.groupby(ends, key=lambda piece: (piece[1] - 1) // PART_TOKENS)
    parts = [[piece for piece, _ in group] for _, group in groups]
    recording = _describe(llm, Checkpoint.open(local_folder(config)), parts)
    out = Path(out).absolute()
    _open(out, recording)
    missing, total = recording.missing(out), sum(recording.parts)
    done = total - sum(recording.parts[number] for number in missing)
    progress(done, total)
    for number in missing:
        _record_part(llm, parts[number], recording.part(out, number))
        done += recording.parts[number]
        progress(done, total)
    return recording


def _start(model: str, length: int, options: Mapping[str, Any]) -> LLM:
    config = read_config(Path(model))
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    return LLM(
        model=model,
        quantization="dymoe",
        additional_config={"dymoe": {"high": 16, **options}},
        max_model_len=None if longest is not None and longest <= length else length + 1,
        max_num_batched_tokens=max(PART_TOKENS, length + 1),
        enforce_eager=True,
        enable_prefix_caching=False,
    )


def _pieces(tokenizer: Any, texts: Iterable[str], tokens: int, length: int) -> list[list[int]]:
    """Return the texts as token ids in pieces of at most ``length``.

    There are as many pieces, evenly spread, as ``tokens`` allows.
    """
    encoded = (tokenizer.encode(text) for text in texts)
    pieces: list[list[int]] = [ids[begin : begin + length] for ids in encoded for begin in range(0, len(ids), length)]
    if not pieces:
        raise CalibrationError("there is no text to calibrate with.")
    wanted = min(len(pieces), max(1, tokens * len(pieces) // sum(map(len, pieces))))
    return [pieces[place * len(pieces) // wanted] for place in range(wanted)]


def _describe(llm: LLM, checkpoint: Checkpoint, parts: list[list[list[int]]]) -> Recording:
    answers = [answer for answer in llm.collective_rpc("dymoe_recordable") if answer is not None]
    if len(answers) != 1:
        raise CalibrationError(
            "a stage of a pipeline sees only its own layers; calibrate without --pipeline-parallel-size."
        )
    (seen,) = answers
    if tuple(seen["layers"]) != checkpoint.layers:
        raise CalibrationError(
            f"{checkpoint.folder} has experts in the layers {list(checkpoint.layers)}, "
            f"but vLLM computes them in {seen['layers']}."
        )
    activations = seen["activation"]
    return Recording(
        model=checkpoint.fingerprint(),
        texts=hashlib.sha256(repr(parts).encode()).hexdigest()[:16],
        parts=tuple(sum(map(len, part)) for part in parts),
        layers=checkpoint.layers,
        num_experts=checkpoint.config.num_experts,
        top_k=seen["top_k"],
        hidden_size=seen["hidden_size"],
        dtype=seen["dtype"],
        activation=activations[0] if len(set(activations)) == 1 else tuple(activations),
    )


def _open(out: Path, recording: Recording) -> None:
    if (out / MANIFEST).is_file() and Recording.read(out) != recording:
        raise CalibrationError(
            f"{out} holds a calibration with another model, other texts or other options; "
            "continue with those, or name another folder."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_space(recording, out)
        recording.write(out)
    except OSError as error:
        raise CalibrationError(f"{out} cannot be written ({error.strerror}); name another folder.") from error


def _record_part(llm: LLM, pieces: list[list[int]], file: Path) -> None:
    if llm.llm_engine.has_unfinished_requests():
        raise CalibrationError(
            "the LLM has unfinished requests, whose tokens would be recorded, too; finish them, or make a new LLM."
        )
    _ask(llm, "dymoe_record", str(file), sum(map(len, pieces)))
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=True)
    prompts: Any = [{"prompt_token_ids": piece} for piece in pieces]
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    failed = next((answer for answer in answers if answer.outputs[0].finish_reason == "error"), None)
    try:
        _ask(llm, "dymoe_record_end")
    except CalibrationError:
        if failed is None:  # otherwise tokens are missing because of the failure
            raise
    if failed is not None:
        file.unlink(missing_ok=True)
        raise CalibrationError(str(failed.outputs[0].stop_reason))


def _ask(llm: LLM, method: str, *arguments: Any) -> None:
    for problem in llm.collective_rpc(method, args=arguments):
        if problem is not None:
            raise CalibrationError(problem)
