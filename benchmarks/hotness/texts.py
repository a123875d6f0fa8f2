"""Held-out text of the shipped model, by domain."""

from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
DOMAINS = ("docs", "code", "arithmetic")
_END = "<|endoftext|>"


def pieces(domain: str, tokenizer: Any, length: int) -> list[list[int]]:
    """Pieces of so many tokens, none twice."""
    documents = (MODEL / "heldout" / f"{domain}.txt").read_text().split(f"\n{_END}\n")
    ids = [token for text in documents for token in [*tokenizer(text.strip("\n"))["input_ids"], 0]]
    return [ids[first : first + length] for first in range(0, len(ids) - length + 1, length)]
