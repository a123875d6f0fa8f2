"""Tokens per second inside vLLM, with Qwen3-30B-A3B's configuration.

The configuration is real; the weights are not, so answers mean nothing. Routers choose experts by Zipf's law, which
makes hit rates meaningful. This is the third part of fifteen minutes on a card. Engines run one after the other, the
most important first, each in a process of its own; an engine's numbers are kept as soon as it has answered.
"""

import importlib.util
import json
import math
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from record import Recorder

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
    "attention_dropout": 0.0, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936, "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
"""config.json of Qwen/Qwen3-30B-A3B."""
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True, "lm_head": False}
PROMPT, ANSWER, LONG = 256, 128, 4096  # tokens
REQUESTS = 1, 16
SPREAD = 0.8
"""Exponent of Zipf's law."""
SETTINGS: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 16, "gpu_memory_utilization": 0.85}
EXPERT_BYTES = 48 * 128 * 3 * 2048 * 768  # at one byte a weight
LIMIT = 75.0
"""Seconds that an engine may take, its start included."""


def ours(budget: str, misses: str = "auto") -> dict[str, Any]:
    """Return the settings of an engine with the plugin.

    Args:
        budget: share of the experts' bytes.
    """
    options = {"high": 4, "group_size": 64, "expert_budget": budget, "host_store": "pinned", "misses": misses}
    return {"quantization": "dymoe", "additional_config": {"dymoe": options}}


ENGINES: dict[str, dict[str, Any]] = {
    "vllm-dymoe at 50%, misses shared with the CPU": ours("50%", "share"),
    "vLLM, experts offloaded, equal device bytes": {
        "cpu_offload_gb": math.ceil(2 * EXPERT_BYTES * 0.875 / 1e9), "dtype": "bfloat16"
    },
    "vLLM, int4, everything resident": {"hf_overrides": {"quantization_config": INT4}},
    "vllm-dymoe at 100%": ours("100%"),
    "vllm-dymoe at 25%": ours("25%"),
}  # fmt: skip
"""In the order of what they are worth. At 16 bits an eighth of the experts takes what half of them takes at 4 bits."""


def run(record: Recorder) -> None:
    """Measure each engine in turn.

    An engine that does not start or takes too long leaves a sentence.
    """
    if importlib.util.find_spec("vllm") is None:
        record.say("Left out: vLLM is not installed here; name a Python that has it, as in make gpu PYTHON=python3.12.")
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for name, settings in ENGINES.items():
            with record.check(f"{name} could be measured") as wrong:
                pool = ProcessPoolExecutor(1, get_context("spawn"))
                try:
                    found = pool.submit(measure, folder, settings).result(timeout=LIMIT)
                except Exception as error:  # whatever an engine raises, the next one is tried
                    record.say(f"{name}: {type(error).__name__} {str(error)[:400]}")
                    for process in list((pool._processes or {}).values()):
                        process.kill()
                    continue
                finally:
                    pool.shutdown(wait=False, cancel_futures=True)
                for what, (rate, remark) in found.items():
                    record.speed(f"{name}, {what}", "tokens/s", rate, 0.0, 0.0, remark)
                if not all(rate > 0 for rate, _ in found.values()):
                    wrong.append("it gave no token")


def measure(folder: str, settings: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """Start an engine and measure each kind of load.

    Returns:
        tokens per second, and a remark, by load.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    stores = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=stores) as store:
        os.environ["DYMOE_STORE_DIR"] = store
        from vllm import LLM, SamplingParams

        if "quantization" in settings:
            import vllm_dymoe

            vllm_dymoe.register()
        begin = time.perf_counter()
        llm = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
            **{**SETTINGS, **settings},
        )  # fmt: skip
        started = time.perf_counter() - begin
        llm.collective_rpc(skew_routers)
        found: dict[str, tuple[float, str]] = {}

        def generate(requests: int, prompt: int, answer: int) -> float:
            prompts: Any = [
                {"prompt_token_ids": [(7 * n + 31 * at) % 1000 for at in range(prompt)]} for n in range(requests)
            ]
            sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
            before = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            return time.perf_counter() - before

        generate(REQUESTS[0], PROMPT, ANSWER // 4)  # compiles what is compiled at first use
        for requests in REQUESTS:
            took = generate(requests, PROMPT, ANSWER)
            found[f"{requests} of {PROMPT}/{ANSWER}"] = requests * ANSWER / took, _remark(llm, settings)
        took = generate(1, LONG, 1)
        found[f"a prompt of {LONG}"] = LONG / took, f"started in {started:.0f} s"
        llm.llm_engine.engine_core.shutdown()
        return found


def _remark(llm: Any, settings: dict[str, Any]) -> str:
    if "additional_config" not in settings:
        return ""
    stats = llm.collective_rpc("dymoe_stats")[0]
    llm.collective_rpc("dymoe_reset_stats")
    needed = stats.get("hits", 0) + stats.get("misses", 0)
    return f"{stats.get('hits', 0) / needed:.0%} hits" if needed else ""


def skew_routers(worker: Any) -> int:
    """Give every router of an engine's worker the weights of `router_weights`.

    Returns:
        the number of routers.
    """
    import torch

    generator, count = torch.Generator().manual_seed(0), 0
    for name, module in worker.model_runner.get_model().named_modules():
        weight = getattr(module, "weight", None)
        if name.endswith("mlp.gate") and weight is not None and weight.dim() == 2:
            weight.data.copy_(router_weights(*weight.shape, CONFIG["num_experts_per_tok"], generator))
            count += 1
    return count


def router_weights(experts: int, hidden: int, top_k: int, generator: Any) -> Any:
    """Return a router's random weights, [experts, hidden].

    With them, normalized inputs choose experts by Zipf's law, in a random order. An expert is among the `top_k` about
    as often as its logit exceeds 1; the length of its row is the logit's standard deviation.
    """
    import torch

    shares = (1.0 + torch.arange(experts)).pow(-SPREAD)
    shares = (top_k * shares / shares.sum()).clamp(max=0.45)
    lengths = 1 / torch.special.ndtri(1 - shares)
    rows = torch.randn(experts, hidden, generator=generator) * hidden**-0.5
    return rows * lengths[torch.randperm(experts, generator=generator), None]
