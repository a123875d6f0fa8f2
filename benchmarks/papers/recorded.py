"""What is replayed: a trace of the shipped model on texts of three domains; and DuoServe-MoE's network, of others.

Prompts are windows of the model's held-out texts. Their lengths are spread as those of chats are, from a line to a
page; answers have ANSWER tokens. Both files are made where they are not there from an earlier run.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from vllm_dymoe.trace.trace import Trace

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
DOMAINS = ("docs", "code", "arithmetic")
LENGTHS = (32, 96, 208, 400)  # tokens of a domain's prompts
ANSWER = 48
_END = "<|endoftext|>"
_TRAINING = 12  # windows of each domain that the network is trained on, of _WINDOW tokens
_WINDOW = 320
ARCHITECTURE = "paper-shared"


def recorded(work: Path) -> tuple[Trace, Path]:
    """The trace that is replayed, whose requests are domain by domain, and the network's file."""
    replayed, network = work / "replayed", work / "predictor.safetensors"
    asked, others = _prompts()
    if not replayed.exists():
        _record(work, "replayed", asked, ANSWER)
    if not network.exists():
        _record(work, "others", others, ANSWER)
        # Often, for so few tokens.
        _command("train", work / "others", "--out", network, "--architecture", ARCHITECTURE, "--epochs", 60)
    return Trace.load(replayed), network


def domain_of(request: int) -> str:
    return DOMAINS[request // len(LENGTHS)]


def _prompts() -> tuple[list[str], list[str]]:
    """Prompts that are replayed, and those of training: other parts of the same files."""
    tokenizer, asked, others = AutoTokenizer.from_pretrained(MODEL), list[str](), list[str]()
    for domain in DOMAINS:
        documents = (MODEL / "heldout" / f"{domain}.txt").read_text().split(f"\n{_END}\n")
        ids = [token for text in documents for token in tokenizer.encode(text.strip("\n"))]
        needed = sum(LENGTHS) + _TRAINING * _WINDOW
        spare = (len(ids) - needed) // (len(LENGTHS) + _TRAINING)
        assert spare >= 0, f"{domain} has {len(ids)} tokens, fewer than {needed}"
        at = 0
        for lengths, into in ((LENGTHS, asked), ((_WINDOW,) * _TRAINING, others)):
            for length in lengths:
                into.append(tokenizer.decode(ids[at : at + length]))
                at += length + spare
    return asked, others


def _record(work: Path, name: str, texts: list[str], answer: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    prompts = work / f"{name}.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    _command("trace", MODEL, "--prompts", prompts, "--out", work / name, "--inputs", "--max-tokens", answer)


def _command(*words: object) -> None:
    subprocess.run([str(Path(sys.executable).with_name("vllm-dymoe")), *map(str, words)], check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    recorded(Path(sys.argv[1]).resolve())
