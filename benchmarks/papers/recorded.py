"""The replayed trace, and DuoServe-MoE's network.

The trace is that of the shipped model on texts of three domains; the network was trained on other texts.

Transformers' own model reads windows of the held-out texts. The inputs and choices of its routers are recorded, and the
attention that each token of a prompt gets from the last queries, as the plugin measures it (DyMoE Eq. 1). A request is
a window: its first tokens are the prompt, the rest is the answer, token by token, with the same routing as in decode.
Lengths of prompts are spread like those of chats, from a line to a page. Files of earlier runs are reused.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.prefetch.checkpoint import PredictorCard, save_predictor
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES
from vllm_dymoe.prefetch.folded import fold
from vllm_dymoe.prefetch.training import Recipe, train
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.trace.trace import Trace

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
DOMAINS = ("docs", "code", "arithmetic")
LENGTHS = (32, 96, 208, 400)  # tokens of a domain's prompts
ANSWER = 48
ARCHITECTURE = "paper-shared"
_END = "<|endoftext|>"
_QUERIES = 32  # as in vllm_plugin/step.py
_TRAINING, _WINDOW = 12, 320  # windows of each domain for training the network; the last ANSWER tokens decode
_EPOCHS = 4


class Recorded(NamedTuple):
    """The replayed trace, a trace of other texts, and the network's file.

    The replayed trace's requests are ordered by domain. Attention is float32 [tokens, layers].
    """

    trace: Trace
    attention: torch.Tensor
    others: Trace
    attention_of_others: torch.Tensor
    network: Path


def recorded(work: Path) -> Recorded:
    """Return everything recorded; record into the folder what is missing."""
    names = ("replayed.safetensors", "others.safetensors", "attention.safetensors", "network.safetensors")
    files = [work / name for name in names]
    if not all(file.exists() for file in files[:3]):
        work.mkdir(parents=True, exist_ok=True)
        replayed, others = _windows()
        trace, attention = _record(replayed, [length + ANSWER for _ in DOMAINS for length in LENGTHS])
        other, attention_of_others = _record(others, [_WINDOW] * len(others))
        trace.save(files[0])
        other.save(files[1])
        save_file({"replayed": attention, "others": attention_of_others}, files[2])
    if not files[3].exists():
        _train(Trace.load(files[1]), files[3])
    attentions = load_file(files[2])
    return Recorded(Trace.load(files[0]), attentions["replayed"], Trace.load(files[1]), attentions["others"], files[3])


def domain_of(request: int) -> str:
    return DOMAINS[request // len(LENGTHS)]


def _windows() -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of the replayed windows and of the training windows.

    They are different parts of the same files.
    """
    from transformers import AutoTokenizer

    tokenizer, replayed, others = AutoTokenizer.from_pretrained(MODEL), list[list[int]](), list[list[int]]()
    for domain in DOMAINS:
        documents = (MODEL / "heldout" / f"{domain}.txt").read_text().split(f"\n{_END}\n")
        ids = [token for text in documents for token in tokenizer.encode(text.strip("\n"))]
        lengths = [length + ANSWER for length in LENGTHS]
        spare = (len(ids) - sum(lengths) - _TRAINING * _WINDOW) // (len(lengths) + _TRAINING)
        assert spare >= 0, f"{domain} has {len(ids)} tokens, too few"
        at = 0
        for some, into in ((lengths, replayed), ([_WINDOW] * _TRAINING, others)):
            for length in some:
                into.append(ids[at : at + length])
                at += length + spare
    return replayed, others


def _record(windows: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[Trace, torch.Tensor]:
    """Read windows; return the routers' inputs and choices, and tokens' attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager").eval()
    config, seen = model.config, dict[int, torch.Tensor]()
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda module, given, number=number: seen.__setitem__(number, given[0].flatten(0, -2))
        )
    gates = [layer.mlp.gate.weight.float() for layer in model.model.layers]
    columns: dict[str, list[torch.Tensor]] = {"experts": [], "weights": [], "router_inputs": []}
    attention: list[torch.Tensor] = []
    with torch.inference_mode():
        for window in windows:
            read = model(input_ids=torch.tensor([window]), use_cache=False, output_attentions=True)
            attention.append(_attention(read.attentions, len(window) - ANSWER))
            xs = torch.stack([seen[number] for number in range(len(gates))], 1)
            scores = torch.stack([(xs[:, n] @ gate.T).softmax(-1) for n, gate in enumerate(gates)], 1)
            weights, experts = scores.topk(config.num_experts_per_tok)
            columns["experts"].append(experts.to(torch.uint8))
            columns["weights"].append((weights / weights.sum(-1, keepdim=True)).half())
            columns["router_inputs"].append(xs.half())
    told: dict[str, Any] = {name: torch.cat(parts).clone() for name, parts in columns.items()}
    trace = Trace(
        ModelIdentity(
            MODEL.name, Checkpoint.open(MODEL).fingerprint(), len(gates), config.num_experts,
            config.num_experts_per_tok, config.hidden_size,
        ),
        request=torch.cat([torch.full((n,), request, dtype=torch.int32) for request, n in enumerate(lengths)]),
        position=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
        prefill=torch.cat([torch.arange(n) < n - ANSWER for n in lengths]),
        **told,
    )  # fmt: skip
    return trace, torch.cat(attention)


def _attention(layers: Sequence[torch.Tensor], prompt: int) -> torch.Tensor:
    """Return the attention that a prompt's last queries pay to each token.

    float32 [tokens, layers]; 0 for tokens of an answer.
    """
    found = torch.zeros(layers[0].shape[-1], len(layers))
    for number, (heads,) in enumerate(layers):
        found[:prompt, number] = heads[:, max(0, prompt - _QUERIES) : prompt, :prompt].mean((0, 1))
    return found


def _train(read: Trace, out: Path) -> None:
    """Train the paper's network on every token of the texts, all routed as in decode."""
    every = Trace(**{**vars(read), "prefill": torch.zeros_like(read.prefill), "router_inputs": None})
    trained = train(every, ARCHITECTURES[ARCHITECTURE], Recipe(_EPOCHS))
    architecture = {"name": ARCHITECTURE, **asdict(ARCHITECTURES[ARCHITECTURE])}
    save_predictor(out, PredictorCard(read.header, architecture, metrics=trained.metrics), fold(trained.model))
    print(f"The network was trained on {trained.tokens[0]} tokens: {trained.metrics}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    recorded(Path(sys.argv[1]).resolve())
