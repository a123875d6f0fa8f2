"""Measures requests in one engine.

This is the child process of ``vllm-dymoe bench``, run with ``python -m`` and a job. With data parallelism each engine
is a process of its own with requests of its own; the first one writes rows for all.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm import LLM, SamplingParams
from vllm.utils.network_utils import get_open_port

from vllm_dymoe.bench.cases import ENGINES, FULL
from vllm_dymoe.bench.prompts import random_tokens
from vllm_dymoe.bench.rows import append_row
from vllm_dymoe.bench.summary import Answers, peak_bytes, side_by_side, summarise
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.server.expert_server import ExpertServer
from vllm_dymoe.server.stats import total

Request = tuple[list[int], int]  # token ids of a prompt, and the number of tokens of its answer
_Value = TypeVar("_Value")
_ROUNDS = 8  # most rounds of warm-up: a policy that tunes itself is measured when it has settled


def run(job: Mapping[str, Any]) -> None:
    llm = start(job)
    out = Path(job["out"])
    for case in job["cases"]:
        workload = case["workload"]
        prompts = token_ids(llm, job, workload)
        if job["options"] is not None:
            llm.collective_rpc("dymoe_resize", args=(case["budget"],))
            if case["budget"] == FULL:
                llm.collective_rpc(_fill_worker)
        measured = measure(llm, prompts, case["batch"], workload, case["key"], ours=job["options"] is not None)
        if llm.llm_engine.vllm_config.parallel_config.data_parallel_rank == 0:
            append_row(out, {**case, "measured": measured})


def run_one_of(rank: int, job: Mapping[str, Any], engines: int, port: int) -> None:
    """Run one engine of several.

    They find each other through vLLM's environment variables.
    """
    os.environ |= {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(engines)}
    os.environ |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    run(job)


def start(job: Mapping[str, Any]) -> LLM:
    options = job["options"]
    settings: dict[str, Any] = {
        "max_num_seqs": max(case["batch"] for case in job["cases"]),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": job["random_length"] is not None,
        "disable_log_stats": True,
    }
    if options is not None:
        options = {**options, "expert_budget": job["cases"][0]["budget"]}
        settings |= {"quantization": "dymoe", "additional_config": {"dymoe": options}}
    engine = {name: value for name, value in job["engine"].items() if name != ENGINES}
    return LLM(model=job["model"], **(settings | engine))


def token_ids(llm: LLM, job: Mapping[str, Any], workload: Mapping[str, Any]) -> list[Request]:
    """Return prompts as token ids, with the lengths of their answers.

    Raises:
        SystemExit: too few prompts fit into the model.
    """
    config = llm.llm_engine.vllm_config.model_config
    wanted = workload["requests"] + workload["warm_up"]
    if workload["random"]:
        drawn = random_tokens(config.get_vocab_size(), job["random_length"], wanted)
        return [(ids, workload["max_tokens"]) for ids in drawn]
    tokenizer, found = llm.get_tokenizer(), []
    for text, tokens in job["prompts"]:
        ids, tokens = tokenizer.encode(text), tokens or workload["max_tokens"]
        if len(ids) + tokens <= config.max_model_len:
            found.append((ids, tokens))
        if len(found) == wanted:
            return found
    raise SystemExit(
        f"{len(found)} of {len(job['prompts'])} prompts fit with their answers into {config.max_model_len} tokens, "
        f"but {wanted} are needed; raise max_model_len, or lower --requests or --max-tokens."
    )


def measure(
    llm: LLM, prompts: Sequence[Request], batch: int, workload: Mapping[str, Any], label: str, *, ours: bool
) -> dict[str, Any]:
    """Measure one case.

    Warm up with the first prompts, then answer the others, ``batch`` at a time in each engine.
    """
    parallel = llm.llm_engine.vllm_config.parallel_config
    rank, engines = parallel.data_parallel_rank, parallel.data_parallel_size
    cold, warm = (
        some[: len(some) // engines * engines][rank::engines]
        for some in (prompts[: workload["warm_up"]], prompts[workload["warm_up"] :])
    )
    for number in range(_ROUNDS):
        if number and all(_of_engines(llm, not ours or all(llm.collective_rpc(_settled)))):
            break
        for place, together in enumerate(_chunks([*cold, *warm] if number else cold, batch)):
            answer(llm, together, f"{label}-warm-{number}-{place}", ours=False)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    answers, peak = list[Answers](), peak_bytes()
    for number, together in enumerate(_chunks(warm, batch)):
        answers.append(answer(llm, together, f"{label}-{number}", ours=ours))
        peak = max(peak, peak_bytes())
    if ours:
        llm.collective_rpc("dymoe_check_integrity")
    of_all = side_by_side(_of_engines(llm, answers))
    most = max(_of_engines(llm, peak))
    return summarise(of_all) | {"peak_device_bytes": most, "warm_up_requests": len(cold) * engines}


def _of_engines(llm: LLM, value: _Value) -> list[_Value]:
    """Return a value of each data-parallel engine, in their order.

    All engines must call this.
    """
    group = getattr(llm.llm_engine, "dp_group", None)
    if group is None:
        return [value]
    found = [value] * group.size()
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def answer(llm: LLM, requests: Sequence[Request], label: str, *, ours: bool) -> Answers:
    """Answer requests that arrive together, and return their times and tokens.

    The plugin's counters start at 0 when every request has its first token, so they cover decode only. So does the
    number of decoded tokens: of a batch whose prompts take several steps, some requests decode before.
    """
    engine, found = llm.llm_engine, Answers()
    begin = time.perf_counter()
    for number, (prompt, length) in enumerate(requests):
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.add_request(f"{label}-{number}", {"prompt_token_ids": prompt}, sampling)
    tokens_of: dict[str, list[int]] = {f"{label}-{number}": [] for number in range(len(requests))}
    last: dict[str, float] = {}
    paused, decoding = 0.0, False
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - begin - paused
        for output in outputs:
            name, tokens = output.request_id, list(output.outputs[0].token_ids)
            if output.outputs[0].finish_reason == "error":
                raise SystemExit(str(output.outputs[0].stop_reason))
            if len(tokens) == len(tokens_of[name]):
                continue
            (found.between if name in last else found.first).append(now - last.get(name, 0.0))
            found.decoded += (len(tokens) - len(tokens_of[name])) * decoding
            last[name], tokens_of[name] = now, tokens
        if decoding or len(last) < len(requests):
            continue
        decoding, found.since = True, now
        if ours:
            pause = time.perf_counter()
            llm.collective_rpc("dymoe_reset_stats")
            paused = time.perf_counter() - pause
    found.seconds = time.perf_counter() - begin - paused
    found.lengths = [len(tokens) for tokens in tokens_of.values()]
    found.outputs = [hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12] for tokens in tokens_of.values()]
    if ours:
        found.decode = total(llm.collective_rpc("dymoe_stats"))
    return found


def _settled(worker: Any) -> bool:
    predictor = worker.vllm_config.quant_config.loaded_model().server.predictor
    return predictor is None or bool(predictor.predictor.settled)


def _fill_worker(worker: Any) -> None:
    fill(worker.vllm_config.quant_config.loaded_model().server)


def fill(server: ExpertServer) -> None:
    """Fetch every expert into a slot of a CPU, to measure full residency.

    Otherwise experts that no prompt used would be fetched during the measurement. A device's slots for all experts are
    filled at start.
    """
    if server.small_batches is not None or not server.policy.residency.keeps:
        return
    if Precision.HIGH not in server.policy.precision.precisions:
        return
    experts, top_k = server.experts, server.experts.top_k
    fmt = next(iter(experts.formats.values()))
    x = torch.zeros(experts.num_experts, fmt.hidden, dtype=fmt.dtype, device=server.device)
    ids = (torch.arange(experts.num_experts)[:, None] + torch.arange(top_k)) % experts.num_experts
    weights = torch.full(ids.shape, 1 / top_k, dtype=torch.float32, device=server.device)
    with server.host_planned.unobserved():
        for layer in range(len(experts.layers)):
            server.host_planned.forward(Routing(layer, len(experts.layers), x, ids.int().to(server.device), weights))


def _chunks(requests: Sequence[Request], batch: int) -> Iterator[Sequence[Request]]:
    """Return groups of ``batch`` requests.

    A remainder is dropped, because a smaller batch is another measurement; fewer requests than ``batch`` are one
    group.
    """
    ends = range(batch, len(requests) + 1, batch)
    return (requests[end - batch : end] for end in ends) if len(requests) >= batch else iter([requests])


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    if (number := asked["engine"].get(ENGINES, 1)) > 1:
        torch.multiprocessing.spawn(run_one_of, (asked, number, get_open_port()), nprocs=number)
    else:
        run(asked)
