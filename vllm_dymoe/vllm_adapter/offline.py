"""What users of ``LLM()`` can do with it: calibrate a model, record a trace of prompts, and record a timeline."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.model_config import read_config
from vllm_dymoe.quantize.recording import MANIFEST, CalibrationError, Recording, check_space
from vllm_dymoe.vllm_adapter.checkpoint import local_folder
from vllm_dymoe.vllm_adapter.observers import DOMAIN

PART_TOKENS = 8192
"""Of one part, or of its only text: what a run that is killed has to compute again."""

Progress = Callable[[int, int], None]
"""(tokens that are recorded, tokens in all)."""


def start(model: str, length: int, options: Mapping[str, Any]) -> LLM:
    """An engine that reads a part in one step where it can.

    Args:
        model: the checkpoint.
        length: tokens of a text.
        options: of the plugin.
    """
    config = read_config(Path(model))
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    return LLM(
        model=model,
        quantization="dymoe",
        additional_config={"dymoe": {"hi": 16, "decisions": "host", **options}},
        max_model_len=None if longest is not None and longest <= length else length + 1,
        max_num_batched_tokens=max(PART_TOKENS, length + 1),
        enforce_eager=True,
        enable_prefix_caching=False,
    )


def calibrate(
    model: Any,
    texts: Iterable[str],
    out: str | Path,
    *,
    tokens: int,
    length: int,
    progress: Progress,
    options: Mapping[str, Any],
) -> Recording:
    """Record what the experts of a model read while it reads texts, or go on where an earlier run was ended.

    Args:
        model: an ``LLM`` with the quantization ``dymoe``, or a folder, for which one is started.
        texts: each is cut into pieces of ``length`` tokens.
        out: folder of the calibration.
        tokens: how many to record; pieces that are left over are left out evenly.
        length: most tokens of a piece.
        progress: called when a part is complete, and at the start.
        options: of the plugin, for a model that is started here.

    Raises:
        CalibrationError: the folder has another calibration or cannot be written, or the model failed.
    """
    llm = start(str(model), length, options) if isinstance(model, str | Path) else model
    config = llm.llm_engine.vllm_config
    length = min(length, config.model_config.max_model_len - 1)
    pieces = _pieces(llm.get_tokenizer(), [texts] if isinstance(texts, str) else texts, tokens, length)
    parts = _parts(pieces)
    recording = _describe(llm, Checkpoint(local_folder(config)), parts)
    out = Path(out).absolute()
    _open(out, recording)
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=True)
    done = sum(recording.parts)
    missing = recording.missing(out)
    done -= sum(recording.parts[number] for number in missing)
    progress(done, sum(recording.parts))
    for number in missing:
        if llm.llm_engine.has_unfinished_requests():
            raise CalibrationError("the model still has requests, whose tokens would be recorded too; start it again.")
        _ask(llm, "dymoe_record", str(recording.part(out, number)), recording.parts[number])
        prompts: Any = [{"prompt_token_ids": piece} for piece in parts[number]]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        failed = next((answer for answer in answers if answer.outputs[0].finish_reason == "error"), None)
        try:
            _ask(llm, "dymoe_record_end")
        except CalibrationError:
            if failed is None:  # otherwise tokens are missing because of it
                raise
        if failed is not None:
            recording.part(out, number).unlink(missing_ok=True)
            raise CalibrationError(str(failed.outputs[0].stop_reason))
        done += recording.parts[number]
        progress(done, sum(recording.parts))
    return recording


def _pieces(tokenizer: Any, texts: Iterable[str], tokens: int, length: int) -> list[list[int]]:
    """Token numbers of the texts in pieces of at most ``length``; as many, evenly spread, as ``tokens`` allow."""
    pieces: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text)
        pieces += [ids[begin : begin + length] for begin in range(0, len(ids), length)]
    if not pieces:
        raise CalibrationError("there is no text to calibrate with.")
    total = sum(map(len, pieces))
    wanted = min(len(pieces), max(1, tokens * len(pieces) // total))
    return [pieces[place * len(pieces) // wanted] for place in range(wanted)]


def _activation(layers: Sequence[str]) -> str | tuple[str, ...]:
    """One name where all layers have it."""
    return layers[0] if len(set(layers)) == 1 else tuple(layers)


def _parts(pieces: Sequence[list[int]]) -> list[list[list[int]]]:
    """Pieces in groups of about PART_TOKENS; the same texts always give the same groups."""
    ends = itertools.accumulate(map(len, pieces))
    grouped = itertools.groupby(zip(pieces, ends, strict=True), key=lambda piece: (piece[1] - 1) // PART_TOKENS)
    return [[piece for piece, _ in group] for _, group in grouped]


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
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    lengths = tuple(sum(map(len, part)) for part in parts)
    return Recording(
        model=checkpoint.fingerprint(),
        texts=digest,
        parts=lengths,
        layers=checkpoint.layers,
        num_experts=checkpoint.num_experts,
        top_k=seen["top_k"],
        hidden_size=seen["hidden_size"],
        dtype=seen["dtype"],
        activation=_activation(seen["activation"]),
    )


def _open(out: Path, recording: Recording) -> None:
    """Write the manifest, or see that what is there is the same calibration.

    Raises:
        CalibrationError: it is another one, or the folder cannot hold it.
    """
    if (out / MANIFEST).is_file() and Recording.read(out) != recording:
        raise CalibrationError(
            f"{out} holds a calibration with another model, other texts or other options; "
            "go on with those, or name another folder."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_space(recording, out)
        recording.write(out)
    except OSError as error:
        raise CalibrationError(f"{out} cannot be written ({error.strerror}); name another folder.") from error


def _ask(llm: LLM, method: str, *arguments: Any) -> None:
    """Call a method of every worker, which returns what went wrong.

    Raises:
        CalibrationError: something did.
    """
    for problem in llm.collective_rpc(method, args=arguments):
        if problem is not None:
            raise CalibrationError(problem)


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


@contextmanager
def timeline(llm: Any, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record every rank's computation, transfers and waits, and write them when the block ends, however it ends.

    Args:
        llm: an ``LLM`` or ``LLMEngine`` with this plugin.
        path: of the JSON file, which https://ui.perfetto.dev opens and ``vllm-dymoe timeline`` draws.

    Raises:
        OSError: the file cannot be written; found out before anything is recorded.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.touch()
    try:
        llm.collective_rpc("dymoe_start_timeline")
        try:
            yield
        finally:
            ranks = llm.collective_rpc("dymoe_stop_timeline")
            trace = {"traceEvents": [event for events in ranks for event in events], "displayTimeUnit": "ms"}
            partial.write_text(json.dumps(trace))
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
