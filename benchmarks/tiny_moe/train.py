"""Train the small Qwen3-MoE of this repository, within a fixed wall-clock time.

    python benchmarks/tiny_moe/train.py --work build/tiny_moe --minutes 75

The learning rate follows elapsed time, not steps, so that it anneals completely however fast the machine is. A run that
is stopped continues from its last checkpoint when it is started again with the same work folder.
"""

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path

import cpu_experts  # noqa: F401  (registers the experts' forward named "permuted")
import numpy
import torch
from prepare_data import END, MODEL
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

DOMAINS = {"docs": 0.45, "code": 0.40, "arithmetic": 0.15}  # shares of the sequences of a batch


def model_config(vocabulary: int, end: int, pad: int) -> Qwen3MoeConfig:
    """The shipped architecture: about 15M parameters, of which 12.6M are experts and 3.6M work on a token."""
    return Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=256,  # of dense layers, of which there are none
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.001,
        output_router_logits=False,
        use_sliding_window=False,
        rope_theta=10000.0,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=pad,
    )


class Batches:
    """Random windows of the domains' token streams; every batch has the same domain mix, up to one sequence."""

    def __init__(self, tokens: Path, split: str, sequences: int, length: int, seed: int) -> None:
        self.streams = {domain: numpy.load(tokens / f"{domain}.{split}.npy") for domain in DOMAINS}
        self.sequences, self.length = sequences, length
        self.random = numpy.random.default_rng(seed)

    def window(self, domain: str) -> numpy.ndarray:
        """One random window.  [length + 1] int64"""
        start = self.random.integers(0, len(self.streams[domain]) - self.length - 1)
        return self.streams[domain][start : start + self.length + 1].astype(numpy.int64)

    def next(self) -> torch.Tensor:
        """Windows of all domains, drawn by systematic sampling of their shares.  [sequences, length + 1] int64"""
        places = (numpy.arange(self.sequences) + self.random.random()) / self.sequences
        domains = numpy.searchsorted(numpy.cumsum(list(DOMAINS.values())), places)
        return torch.from_numpy(numpy.stack([self.window(list(DOMAINS)[min(d, len(DOMAINS) - 1)]) for d in domains]))


def balance_loss(router_logits: tuple[torch.Tensor, ...], active: int) -> torch.Tensor:
    """Load-balancing loss of the Switch Transformer, per layer and averaged over the layers: 1 when balanced.

    transformers' own joins all layers before it counts, so that one layer's collapse can hide behind another's.
    router_logits: one [tokens, experts] for each layer.
    """
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = probabilities.topk(active, dim=-1).indices
        load = functional.one_hot(chosen, logits.shape[-1]).sum(1).float().mean(0) / active
        losses.append(logits.shape[-1] * (load * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def learning_rate(progress: float, peak: float, warm_up: float = 0.02, floor: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to `floor` of the peak; progress is the used share of the time, in [0, 1]."""
    if progress < warm_up:
        return peak * max(progress / warm_up, 0.01)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))
    return peak * (floor + (1 - floor) * cosine)


def export(model: Qwen3MoeForCausalLM, package: Path) -> None:
    """Replace the package's checkpoint, file by file and atomically: bf16, one tensor per expert and projection."""
    package.mkdir(parents=True, exist_ok=True)
    copy = Qwen3MoeForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    copy.config.dtype = torch.bfloat16
    with tempfile.TemporaryDirectory(dir=package.parent, prefix=".tiny_moe-") as temporary:
        copy.save_pretrained(temporary)
        config = Path(temporary) / "config.json"
        settings = json.loads(config.read_text())
        settings["num_experts"] = model.config.num_experts  # the name in transformers 4
        config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        for path in sorted(Path(temporary).iterdir()):
            os.chmod(path, 0o644)
            os.replace(path, package / path.name)


def save_checkpoint(path: Path, state: dict) -> None:
    """Write, then rename: a crash leaves the previous checkpoint."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


@torch.no_grad()
def validation_loss(model: Qwen3MoeForCausalLM, tokens: Path, length: int) -> dict[str, float]:
    """Mean loss per domain in nats, over the same few held-out windows every time."""
    batches = Batches(tokens, "heldout", 0, length, seed=7)
    model.eval()
    losses = {}
    for domain in DOMAINS:
        rows = torch.from_numpy(numpy.stack([batches.window(domain) for _ in range(8)]))
        logits = model(rows[:, :-1]).logits
        losses[domain] = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()).item()
    model.train()
    return losses


def train(arguments: argparse.Namespace) -> None:
    """Train until the time is used up; resume if the work folder has a checkpoint."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.package)
    config = model_config(len(tokenizer), tokenizer.convert_tokens_to_ids(END), tokenizer.pad_token_id)
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("permuted")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    decayed = [p for name, p in model.named_parameters() if p.dim() >= 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": arguments.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.peak, betas=(0.9, 0.95), eps=1e-8, fused=True)

    tokens, log, checkpoint = (arguments.work / name for name in ("tokens", "loss.jsonl", "checkpoint.pt"))
    step, used, seen = 0, 0.0, 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, used, seen = state["step"], state["seconds"], state["tokens"]
    else:
        log.unlink(missing_ok=True)
    batches = Batches(tokens, "train", arguments.sequences, arguments.length, arguments.seed + step)
    print(f"{parameters:,} parameters, from step {step}, {used:.0f} s used", flush=True)

    budget, start = arguments.minutes * 60, time.monotonic() - used
    saved, exported = used, -1e9
    smooth, smooth_balance = None, None
    model.train()
    while (used := time.monotonic() - start) < budget and step < arguments.steps:
        rate = learning_rate(used / budget, arguments.peak)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = batches.next()
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
            output = model(rows[:, :-1], output_router_logits=True, use_cache=False)
        loss = functional.cross_entropy(output.logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        balance = balance_loss(output.router_logits, config.num_experts_per_tok)
        (loss + arguments.balance * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + rows[:, 1:].numel()
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm {norm} at step {step}")
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        smooth_balance = balance.item() if smooth_balance is None else 0.95 * smooth_balance + 0.05 * balance.item()
        used = time.monotonic() - start
        last = used >= budget or step >= arguments.steps
        if step % arguments.log_every == 0 or last:
            entry = {"step": step, "tokens": seen, "seconds": round(used, 1), "loss": round(smooth, 4),
                     "balance": round(smooth_balance, 4), "rate": rate, "gradient_norm": round(norm, 3)}  # fmt: skip
            if step % (arguments.log_every * 10) == 0 or last:
                entry["validation"] = validation_loss(model, tokens, arguments.length)
            with log.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(json.dumps(entry), flush=True)
        if used - saved >= 300 or last:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(checkpoint, {**state, "step": step, "seconds": used, "tokens": seen})
            saved = used
        if used - exported >= 600 or last:
            export(model, arguments.package)
            exported = used
    run = {"steps": step, "tokens": seen, "seconds": round(used, 1), "parameters": parameters,
           "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()
                        if key not in ("work", "package")}}  # fmt: skip
    (arguments.work / "run.json").write_text(json.dumps(run, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny_moe"), help="token streams, log and checkpoint")
    parser.add_argument("--package", type=Path, default=MODEL, help="folder of the shipped model")
    parser.add_argument("--minutes", type=float, default=75.0, help="wall-clock budget, all resumed parts together")
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many steps (for trials)")
    parser.add_argument("--sequences", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False,
                        help="bf16 autocast: slower on a CPU without bf16 instructions")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
