"""What does the policy dymoe cost in perplexity, and what should become of the weights of skipped experts?

    python benchmarks/quality/precision.py

The shipped model reads its held-out texts, with transformers for everything but the experts, which the plugin's
runtime computes: once as prompts (each window one step), and once as a decode step for each token. Every budget holds
all experts and no version is reused, so each row is what its policy planned. Takes about four minutes of one core;
writes precision.json and the tables of README.md.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vllm_dymoe.config import Options
from vllm_dymoe.experts.layout import ExpertFormat, ModelExperts, Projection
from vllm_dymoe.experts.store import MemoryStore
from vllm_dymoe.policy import PromptTokens
from vllm_dymoe.policy.importance import attention_mass, heavy_hitters
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.experts import ExpertPacker, MemorySink
from vllm_dymoe.runtime import MoERuntime

HERE = Path(__file__).resolve().parent
MODEL = Path(str(resources.files("vllm_dymoe.data") / "tiny_moe"))
DOMAINS = ("docs", "code", "arithmetic")
WINDOW = 512
GROUP_SIZE = 64
RETENTIONS = (0.9, 0.75, 0.5)
Heavy = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # queries, keys, scale -> bool [tokens]


def by_attention(share: float, window: int) -> Heavy:
    """The heavy hitters of Eq. 1, from the last ``window`` queries."""
    return lambda query, key, scale: heavy_hitters(attention_mass(query, key, scale, window), share)


def by_load(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """What stands in where attention is not known: every token counts."""
    return torch.ones(query.shape[0], dtype=torch.bool)


def at_random(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """As many tokens as heavy hitters, any of them."""
    generator = torch.Generator().manual_seed(query.shape[0])
    return heavy_hitters(torch.rand(query.shape[0], generator=generator), 0.2)


class RuntimeExperts(torch.nn.Module):
    """A layer's experts, computed by the runtime: a prompt in one step, or each token in its own."""

    def __init__(self, bench: "Bench", position: int) -> None:
        super().__init__()
        self._bench, self._position = bench, position

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        bench, weights = self._bench, weights.float()
        if bench.decode:
            rows = zip(x.split(1), weights.split(1), ids.split(1), strict=True)
            return torch.cat([bench.runtime.forward(self._position, *row) for row in rows])
        everything = torch.ones(x.shape[0], dtype=torch.bool)
        prompt = PromptTokens(everything, bench.heavy, mixed=False)
        return bench.runtime.forward(self._position, x, weights, ids, prompt=prompt)


class Bench:
    """The model with our experts in it, and its held-out windows."""

    def __init__(self, windows: int) -> None:
        AttentionInterface.register("tapped", self._attend)
        AttentionMaskInterface.register("tapped", sdpa_mask)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, attn_implementation="tapped")
        self.windows = self._read(windows)
        self.store = self._pack()
        for position, layer in enumerate(self.model.model.layers):
            layer.mlp.experts = RuntimeExperts(self, position)
        self.decode, self.heavy, self.choose = False, torch.empty(0), by_attention(0.2, 32)
        self.runtime: MoERuntime

    def _attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        """Attention as ever, after a look at the queries and keys: [1, heads, tokens, dim]."""
        if not self.decode:
            self.heavy = self.choose(query[0].transpose(0, 1), key[0].transpose(0, 1), module.scaling)
        return sdpa_attention_forward(module, query, key, *rest, **options)

    def _read(self, windows: int) -> list[torch.Tensor]:
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        found = []
        for domain in DOMAINS:
            ids = tokenizer((MODEL / "heldout" / f"{domain}.txt").read_text(), verbose=False)["input_ids"]
            found += [torch.tensor([ids[at * WINDOW : (at + 1) * WINDOW]]) for at in range(windows)]
        return found

    def _pack(self) -> MemoryStore:
        config = self.model.config
        formats = {
            bits: ExpertFormat(config.hidden_size, config.moe_intermediate_size, bits, GROUP_SIZE, torch.bfloat16)
            for bits in (16, 4, 2)
        }
        layers = tuple(range(config.num_hidden_layers))
        experts = ModelExperts(layers, config.num_experts, config.num_experts_per_tok, formats)
        packer = ExpertPacker(experts, make_quantizer("rtn"), MemorySink(experts, pin=False))
        for layer, block in enumerate(self.model.model.layers):
            for expert in range(config.num_experts):
                gate, up = block.mlp.experts.gate_up_proj[expert].detach().chunk(2)
                down = block.mlp.experts.down_proj[expert].detach()
                for projection, weight in zip(Projection, (gate, up, down), strict=True):
                    packer.put(layer, expert, projection, weight.contiguous())
        return packer.finish()

    @torch.no_grad()
    def measure(self, *, decode: bool, heavy: Heavy | None = None, **options: Any) -> dict[str, float]:
        """Perplexity over all windows, and bytes of experts for each token."""
        self.decode, self.choose = decode, heavy or by_attention(0.2, 32)
        chosen = Options(expert_budget="100%", reuse_high=False, group_size=GROUP_SIZE, io_threads=0, **options)
        self.runtime = MoERuntime(self.store, chosen, torch.device("cpu"))
        nats = tokens = 0.0
        for ids in self.windows:
            logits = self.model(ids, use_cache=False).logits[0, :-1].float()
            nats += functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            tokens += ids.shape[1] - 1
        planned, formats = self.runtime.stats().planned, self.store.experts.formats
        nbytes = planned["hi"] * formats[chosen.hi].nbytes
        nbytes += planned["lo"] * formats[chosen.lo].nbytes if chosen.lo else 0
        steps = sum(ids.shape[1] for ids in self.windows) if decode else len(self.windows)
        return {"perplexity": round(math.exp(nats / tokens), 4), "bytes_per_step": round(nbytes / steps)}


def dymoe(retention: float, lo: int, **options: Any) -> dict[str, Any]:
    """Options of the policy at 4/lo bits."""
    rounding = options.pop("rounding", "up")
    parameters = {"retention": retention, "rounding": rounding}
    return {"hi": 4, "lo": lo, "policy": "dymoe", "policy_options": parameters, **options}


def tiers(bench: Bench) -> list[dict[str, Any]]:
    """Uniform bits, 4/2, and 4/0 with both rules, at each retention and in both phases."""
    rows: list[tuple[str, dict[str, Any]]] = [
        ("uniform 16", {"hi": 16}),
        ("uniform 4", {"hi": 4}),
        ("uniform 2", {"hi": 2}),
    ]
    for retention in RETENTIONS:
        rows.append((f"4/2, r = {retention}", dymoe(retention, 2)))
        for rule in ("renormalize", "keep"):
            rows.append((f"4/0, r = {retention}, {rule}", dymoe(retention, 0, skipped_weights=rule)))
    rows.append(("4/2, r = 0.75, nearest", dymoe(0.75, 2, rounding="nearest")))
    rows.append(("4/0, r = 0.75, nearest, renormalize", dymoe(0.75, 0, rounding="nearest")))
    rows.append(("4/0, r = 0.75, nearest, keep", dymoe(0.75, 0, rounding="nearest", skipped_weights="keep")))
    table = []
    for name, options in rows:
        row: dict[str, Any] = {"experts": name}
        for phase in ("decode", "prompt"):
            found = bench.measure(decode=phase == "decode", **options)
            row[f"{phase}: perplexity"] = found["perplexity"]
            row[f"{phase}: KiB of experts a step"] = round(found["bytes_per_step"] / 1024)
        print(json.dumps(row), flush=True)
        table.append(row)
    return table


def importance(bench: Bench) -> list[dict[str, Any]]:
    """Which tokens of a prompt say which experts matter, at r = 0.5 where it matters most."""
    choices: Mapping[str, Heavy] = {
        "heavy hitters: the top 20 %, by the last 32 queries": by_attention(0.2, 32),
        "the top 20 %, by all queries (Eq. 1)": by_attention(0.2, WINDOW),
        "the top 10 %, by the last 32 queries": by_attention(0.1, 32),
        "the top 40 %, by the last 32 queries": by_attention(0.4, 32),
        "every token (the stand-in)": by_load,
        "20 %, at random": at_random,
    }
    table = []
    for name, heavy in choices.items():
        row: dict[str, Any] = {"tokens that count": name}
        for lo in (2, 0):
            found = bench.measure(decode=False, heavy=heavy, **dymoe(0.5, lo))
            row[f"4/{lo}: perplexity"] = found["perplexity"]
        print(json.dumps(row), flush=True)
        table.append(row)
    return table


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(str(value) for value in row.values()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2, help="of 512 tokens, from each of the three texts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    bench = Bench(arguments.windows)
    stated = {"uniform 16": bench.measure(decode=False, hi=16)["perplexity"]}
    if not 1 < stated["uniform 16"] < 100:
        raise SystemExit(
            f"the model's own perplexity is {stated['uniform 16']}: the outputs are wrong, nothing reported"
        )
    record = {
        "tokens": sum(ids.shape[1] for ids in bench.windows),
        "tiers": tiers(bench),
        "importance": importance(bench),
        "seconds": round(time.perf_counter() - begin),
    }
    (HERE / "precision.json").write_text(json.dumps(record, indent=1) + "\n")
    page = HERE / "README.md"
    text = page.read_text()
    for name in ("tiers", "importance"):
        begin_mark, end_mark = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin_mark)
        text = f"{before}{begin_mark}\n{markdown(record[name])}\n{end_mark}{rest.split(end_mark)[1]}"
    page.write_text(text)
    print(json.dumps({"seconds": record["seconds"], "tokens": record["tokens"]}))


if __name__ == "__main__":
    main()
