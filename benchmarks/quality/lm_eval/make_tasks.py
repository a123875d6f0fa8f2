"""Two small tasks for lm-eval from the shipped model's held-out texts, so that its vLLM back end can be tried offline.

    python benchmarks/quality/lm_eval/make_tasks.py

Writes continuations.jsonl, which of four pieces goes on with a text (scored as MMLU and CMMLU are, by the
log-probability of each), and problems.jsonl, arithmetic with a worked answer (generated, as GSM8K is).
"""

import json
import random
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TEXTS = HERE.parents[1] / "tiny_moe" / "model" / "heldout"
END = "<|endoftext|>"
CONTEXT, CONTINUATION, QUESTIONS = 40, 10, 75  # words, words, of each domain


def documents(domain: str) -> list[str]:
    """The held-out documents of a domain."""
    return [text.strip("\n") for text in (TEXTS / f"{domain}.txt").read_text().split(f"\n{END}\n")]


def continuations() -> list[dict[str, Any]]:
    """Questions with one right answer and three from elsewhere in the same domain."""
    rows, chosen = [], random.Random(0)
    for domain in ("docs", "code"):
        pieces = []
        for text in documents(domain):
            words = re.findall(r"\s*\S+", text)
            for at in range(0, len(words) - CONTEXT - CONTINUATION, CONTEXT + CONTINUATION):
                context, following = words[at : at + CONTEXT], words[at + CONTEXT : at + CONTEXT + CONTINUATION]
                pieces.append(("".join(context).lstrip(), "".join(following)))
        for number, (context, right) in enumerate(chosen.sample(pieces, QUESTIONS)):
            label = number % 4
            choices = [piece for _, piece in chosen.sample(pieces, 4) if piece != right][:3]
            choices.insert(label, right)
            rows.append({"domain": domain, "context": context, "choices": choices, "label": label})
    return rows


def problems() -> list[dict[str, Any]]:
    """Word problems and the number that is right."""
    rows = []
    for text in documents("arithmetic")[:QUESTIONS]:
        question, worked = text.split("\nAnswer:")
        rows.append({"question": question.removeprefix("Question: "), "answer": worked.split("#### ")[1].strip()})
    return rows


def main() -> None:
    """Write both files."""
    for name, rows in (("continuations", continuations()), ("problems", problems())):
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(name, len(rows))


if __name__ == "__main__":
    main()
