"""Make a small Qwen3-MoE like the one of this folder: text, tokenizer and training within a fixed time.

    pip install -e .[train] && python benchmarks/tiny_moe/train.py --work build/tiny_moe --minutes 75

Text is Python's and Debian's manuals (``apt-get download``, unpacked, never installed), the code of the standard
library and of some packages from PyPI, and arithmetic problems made here. Documents are split by the hash of their
names. The learning rate follows elapsed time, so that it anneals completely however fast the machine is.
"""

import argparse
import hashlib
import html
import json
import math
import random
import re
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

END, PAD, VOCABULARY = "<|endoftext|>", "<|pad|>", 3072
DOMAINS = {"docs": 0.45, "code": 0.40, "arithmetic": 0.15}
"""Shares of the sequences of a batch."""
MANUALS = ("postgresql-doc-15", "python3.11-doc", "sqlite3-doc", "rust-doc", "apache2-doc", "nodejs-doc")
PACKAGES = (
    "sympy",
    "networkx",
    "django",
    "scikit-learn",
    "pandas",
    "sqlalchemy",
    "mpmath",
    "flask",
    "rich",
    "pygments",
)
HELDOUT_SHARE, PROBLEMS = 0.02, 60_000
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Answer: ' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)


def manuals(work: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each page, without tags, scripts and navigation."""
    hidden = re.compile(r"<(script|style|nav|head|footer|form)\b.*?</\1>", re.DOTALL | re.IGNORECASE)
    for package in MANUALS:
        subprocess.run(["apt-get", "download", package], cwd=work, check=True)
        (archive,) = work.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", archive, work / package], check=True)
        for path in sorted((work / package).rglob("*.html")):
            page = hidden.sub("", path.read_text(errors="ignore"))
            paragraphs = re.split(r"</?(?:p|li|h\d|pre|dt|dd|tr|div|table)\b[^>]*>", page)
            lines = [" ".join(html.unescape(re.sub(r"<[^>]+>", "", part)).split()) for part in paragraphs]
            yield f"{package}:{path.relative_to(work)}", "\n\n".join(line for line in lines if line)


def sources(work: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each Python file that is no test."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not re.search(r"site-packages|/tests?/|idle_test|pydoc_data|encodings/", path.as_posix()):
            yield f"cpython:{path.relative_to(root)}", path.read_text(errors="ignore")
    for package in PACKAGES:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", work]
        subprocess.run([*pip, package], check=True)
        (wheel,) = work.glob(f"{package.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".py") and not re.search(r"/tests?/|/locale/|/migrations/|_mapping|unistring", name):
                    yield f"{package}:{name}", archive.read(name).decode(errors="ignore")


def problems(count: int) -> Iterator[tuple[str, str]]:
    """(name, text) of arithmetic problems with worked answers."""
    chosen = random.Random(1)
    for number in range(count):
        who = chosen.choice(("Ana", "Ben", "Emma", "Farid", "Ines", "Leo", "Maya", "Olga", "Rosa", "Wei"))
        thing = chosen.choice(("apples", "shells", "marbles", "books", "coins", "cards", "pears", "plums", "keys"))
        a, b, verb = chosen.randint(2, 99), chosen.randint(2, 99), chosen.choice(["more", "fewer", "times"])
        a, b = (a, b % 10 + 2) if verb == "times" else (max(a, b), min(a, b))
        sign, answer = {"more": ("+", a + b), "fewer": ("-", a - b), "times": ("*", a * b)}[verb]
        asked = {"more": f"finds {b} more", "fewer": f"loses {b}", "times": f"gets {b} times as many in all"}[verb]
        text = f"Question: {who} has {a} {thing} and {asked}. How many {thing} does {who} have now?\n"
        yield f"problem:{number}", f"{text}Answer: {who} has {a} {thing}. {a} {sign} {b} = {answer}. #### {answer}\n"


def collect(work: Path) -> dict[str, dict[str, list[str]]]:
    """Documents by domain and split; paragraphs and files that occurred before are left out."""
    documents: dict[str, dict[str, list[str]]] = {domain: {"train": [], "heldout": []} for domain in DOMAINS}
    seen = set()
    for domain, found in zip(DOMAINS, (manuals(work), sources(work), problems(PROBLEMS)), strict=True):
        for name, text in found:
            fresh = [part for part in text.split("\n\n") if len(part) < 40 or hash(part) not in seen]
            seen.update(map(hash, fresh))
            if domain == "arithmetic" or sum(map(len, fresh)) > 400:
                share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
                documents[domain]["heldout" if share < HELDOUT_SHARE else "train"].append("\n\n".join(fresh))
    return documents


def train_tokenizer(texts: list[str], folder: Path) -> Tokenizer:
    """Byte-level BPE with single digits, saved as transformers and vLLM load it."""
    tokenizer = Tokenizer(models.BPE())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END, PAD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": END, "eos_token": END, "pad_token": PAD}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> numpy.ndarray:
    """One stream of token ids, every document followed by the end token.  [tokens] uint16"""
    end = tokenizer.token_to_id(END)
    return numpy.concatenate([numpy.array([*tokenizer.encode(text).ids, end], numpy.uint16) for text in texts])


def prepare(work: Path, package: Path) -> dict[str, numpy.ndarray]:
    """Token streams by "domain.split", kept in the work folder; also writes the tokenizer and held-out extracts."""
    kept = work / "tokens.npz"
    if not kept.exists():
        work.mkdir(parents=True, exist_ok=True)
        documents = collect(work)
        tokenizer = train_tokenizer([text for texts in documents.values() for text in texts["train"][::3]], package)
        streams = {
            f"{domain}.{split}": encode(tokenizer, texts)
            for domain, splits in documents.items()
            for split, texts in splits.items()
        }
        (package / "heldout").mkdir(exist_ok=True)
        for domain, splits in documents.items():
            extract = f"\n{END}\n".join(splits["heldout"])[:50_000]
            (package / "heldout" / f"{domain}.txt").write_text(extract + "\n")
        numpy.savez(kept, **streams)
    return dict(numpy.load(kept))


def new_model(package: Path) -> Qwen3MoeForCausalLM:
    """The shipped architecture: about 15M parameters, of which 12.6M are experts and 3.6M work on a token."""
    tokenizer = AutoTokenizer.from_pretrained(package)
    end = tokenizer.convert_tokens_to_ids(END)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=64,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=end, eos_token_id=end, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def train(arguments: argparse.Namespace) -> None:
    """Train until the time is used up, and write the checkpoint in bf16."""
    torch.manual_seed(arguments.seed)
    streams, chosen = prepare(arguments.work, arguments.package), numpy.random.default_rng(arguments.seed)
    model = new_model(arguments.package)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.peak, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def windows(split: str, count: int) -> torch.Tensor:
        """Random windows of all domains in their shares.  [count, length + 1] int64"""
        places = (numpy.arange(count) + chosen.random()) / count
        domains = numpy.searchsorted(numpy.cumsum(list(DOMAINS.values()))[:-1], places)
        rows = []
        for domain in domains:
            stream = streams[f"{list(DOMAINS)[domain]}.{split}"]
            start = chosen.integers(0, len(stream) - arguments.length - 1)
            rows.append(stream[start : start + arguments.length + 1].astype(numpy.int64))
        return torch.from_numpy(numpy.stack(rows))

    begun, step = time.monotonic(), 0
    while (progress := (time.monotonic() - begun) / (60 * arguments.minutes)) < 1 and step < arguments.steps:
        warm = min(1.0, max(progress / 0.02, 0.01))
        rate = arguments.peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = windows("train", arguments.sequences)
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
            output = model(rows[:, :-1], output_router_logits=True, use_cache=False)
        loss = functional.cross_entropy(output.logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        # Layer by layer, so that no layer's collapse hides behind another's; it grows with a token's experts.
        sizes = model.config.num_experts, model.config.num_experts_per_tok
        uneven = torch.stack([load_balancing_loss_func((logits,), *sizes) for logits in output.router_logits]).mean()
        (loss + 0.01 * uneven / sizes[1]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            print(f"step {step}, {100 * progress:.0f} % of the time, loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        rows = windows("heldout", 64)
        loss = functional.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    print(json.dumps({"steps": step, "heldout_loss_nats": round(loss.item(), 4)}))
    ends = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ends, do_sample=False)
    model.to(torch.bfloat16).save_pretrained(arguments.package)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny_moe"), help="downloads and token streams")
    parser.add_argument("--package", type=Path, default=Path("build/tiny_moe/model"), help="where the model goes")
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many steps (for trials)")
    parser.add_argument("--sequences", type=int, default=8, help="in a batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    fast = torch.cpu._is_avx512_bf16_supported()
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=fast, help="autocast")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
