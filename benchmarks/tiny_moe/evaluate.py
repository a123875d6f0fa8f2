"""Measure the shipped small model: perplexity, expert load and reuse per domain, right answers, samples.

    python benchmarks/tiny_moe/evaluate.py --work build/tiny_moe

Reads only the package folder for the measurements; the training log, sizes and sources come from the work folder when
it is there, from the last record when it is not. Writes record.json, loss.png, load.png and the tables of README.md.
"""

import argparse
import json
import math
import platform
import re
from pathlib import Path

import matplotlib
import numpy
import torch
from prepare_data import END, MODEL
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from word_problems import word_problems

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).resolve().parent
DOMAINS = ("docs", "code", "arithmetic")
WINDOW = 512  # tokens of context at most
MARK = ("<!-- tables: begin -->", "<!-- tables: end -->")


@torch.no_grad()
def measure_domain(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> dict:
    """Perplexity and routing of one held-out extract, read in windows of WINDOW tokens that do not overlap.

    The first token of a window has no context and is not scored; bits per byte divide by the bytes of the scored
    tokens. "load" is, for each layer, each expert's share of all choices; "reuse" the share of a token's experts that
    the token before it used too.
    """
    documents = [document.strip("\n") for document in text.split(f"\n{END}\n")]
    ids = [
        token
        for document in documents
        for token in [*tokenizer(document, verbose=False)["input_ids"], tokenizer.eos_token_id]
    ]
    layers, experts = model.config.num_hidden_layers, model.config.num_experts
    counts, reuse, pairs = torch.zeros(layers, experts), torch.zeros(layers), 0
    nats, scored, scored_bytes = 0.0, 0, 0
    for first in range(0, len(ids) - 1, WINDOW):
        row = torch.tensor([ids[first : first + WINDOW]])
        if row.shape[1] < 2:
            continue
        output = model(row, output_router_logits=True, use_cache=False)
        nats += functional.cross_entropy(output.logits[0, :-1].float(), row[0, 1:], reduction="sum").item()
        scored += row.shape[1] - 1
        scored_bytes += len(tokenizer.decode(row[0, 1:], skip_special_tokens=True).encode())
        pairs += row.shape[1] - 1
        for layer, logits in enumerate(output.router_logits):
            chosen = functional.one_hot(logits.topk(model.config.num_experts_per_tok).indices, experts).sum(1)
            counts[layer] += chosen.sum(0)
            reuse[layer] += (chosen[1:] * chosen[:-1]).sum() / model.config.num_experts_per_tok
    load = counts / counts.sum(1, keepdim=True)
    entropy = -(load * load.clamp_min(1e-12).log()).sum(1) / math.log(experts)
    return {
        "tokens": scored,
        "bytes": scored_bytes,
        "perplexity": round(math.exp(nats / scored), 3),
        "bits_per_byte": round(nats / math.log(2) / scored_bytes, 4),
        "load": [[round(share, 5) for share in row] for row in load.tolist()],
        "load_entropy": [round(value, 4) for value in entropy.tolist()],
        "reuse": [round(value, 4) for value in (reuse / pairs).tolist()],
    }


@torch.no_grad()
def round_experts(model: PreTrainedModel, bits: int, group: int = 64) -> None:
    """Round the experts' weights to the nearest of 2**bits values, asymmetric, in groups along the input."""
    for layer in model.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            groups = weight.view(*weight.shape[:-1], -1, group)
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            scale = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
            groups.copy_(((groups - low) / scale).round() * scale + low)


def load_distances(domains: dict[str, dict]) -> dict[str, list[float]]:
    """Total variation between the loads of each two domains, per layer: 0 the same experts, 1 disjoint ones."""
    names, distances = list(domains), {}
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            difference = numpy.array(domains[one]["load"]) - numpy.array(domains[other]["load"])
            distances[f"{one}-{other}"] = [round(value, 4) for value in (numpy.abs(difference).sum(1) / 2).tolist()]
    return distances


@torch.no_grad()
def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], tokens: int) -> list[str]:
    """Greedy continuations of prompts, as one batch, until the end token or `tokens` tokens."""
    inputs = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False, padding=True, padding_side="left")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def right_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: list[str]) -> float:
    """Share of the problems whose number after #### comes out right, asked through the chat template."""
    pairs = [problem.removeprefix("Question: ").split("\nAnswer: ") for problem in problems]
    chats = [[{"role": "user", "content": question}] for question, _ in pairs]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    found = [re.search(r"#### (-?\d+)", text) for text in complete(model, tokenizer, prompts, 80)]
    right = [match and match[1] == answer.split("#### ")[1] for match, (_, answer) in zip(found, pairs, strict=True)]
    return sum(map(bool, right)) / len(problems)


def plot_loss(curve: list[dict], path: Path) -> None:
    """Training loss and held-out loss per domain over the tokens seen."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([e["tokens"] / 1e6 for e in curve], [e["loss"] for e in curve], label="training", color="black", lw=1)
    checked = [entry for entry in curve if "validation" in entry]
    for domain in checked[0]["validation"] if checked else ():
        tokens = [e["tokens"] / 1e6 for e in checked]
        axes.plot(tokens, [e["validation"][domain] for e in checked], label=f"held out, {domain}")
    axes.set(xlabel="million tokens", ylabel="nats per token", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_load(domains: dict[str, dict], path: Path) -> None:
    """Each expert's load in each layer, one panel for a domain, as a multiple of the uniform share."""
    figure, panels = pyplot.subplots(len(domains), 1, figsize=(8, 2.3 * len(domains)), sharex=True)
    for axes, (domain, measured) in zip(panels, domains.items(), strict=True):
        load = numpy.array(measured["load"])
        image = axes.imshow(load * load.shape[1], aspect="auto", cmap="viridis", vmin=0, vmax=4)
        axes.set(ylabel="layer", title=domain)
    panels[-1].set_xlabel("expert")
    figure.colorbar(image, ax=panels, label="load / uniform")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def tables(record: dict) -> str:
    """The Markdown that stands between the marks of README.md."""
    run, quality = record["run"], record["quality"]

    def mean(values: list[float]) -> str:
        return f"{sum(values) / len(values):.2f}"

    lines = [
        f"{run['parameters']:,} parameters; {run['steps']:,} steps, {run['tokens']:,} tokens, "
        f"{run['seconds']:,.0f} seconds ({run['tokens'] / run['seconds']:,.0f} tokens/s).",
        "",
        "| domain | held-out tokens | perplexity | bits per byte | load entropy | reuse |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for domain, d in quality["domains"].items():
        lines.append(
            f"| {domain} | {d['tokens']:,} | {d['perplexity']:.2f} | {d['bits_per_byte']:.3f} "
            f"| {mean(d['load_entropy'])} | {mean(d['reuse'])} |"
        )
    lines += [
        "",
        "Load entropy: of the experts' load in one layer, 1 = uniform, mean over layers. Reuse: share of a token's",
        "experts that the token before it used too, mean over layers "
        f"(chance: {quality['chance_reuse']:.3f}). All three domains together: load",
        f"entropy {mean(quality['load_entropy_all'])}, least balanced layer {min(quality['load_entropy_all']):.2f}.",
        "",
        "| layer | " + " | ".join(f"entropy, {name}" for name in quality["domains"]) + " | "
        + " | ".join(f"distance {name}" for name in quality["load_distance"]) + " |",
        "| --- |" + " --- |" * (len(quality["domains"]) + len(quality["load_distance"])),
    ]  # fmt: skip
    for layer in range(len(quality["load_entropy_all"])):
        cells = [d["load_entropy"][layer] for d in quality["domains"].values()]
        cells += [distance[layer] for distance in quality["load_distance"].values()]
        lines.append(f"| {layer} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    lines += [
        "",
        "Distance: total variation between the two domains' loads, 0 = the same, 1 = no expert in common.",
        "",
        "Perplexity with the experts' weights rounded to nearest in groups of 64 (the rest of the model as it is):",
        "",
        "| bits | " + " | ".join(quality["domains"]) + " |",
        "| --- |" + " --- |" * len(quality["domains"]),
        "| 16 | " + " | ".join(f"{d['perplexity']:.2f}" for d in quality["domains"].values()) + " |",
        *(
            f"| {bits} | " + " | ".join(f"{value:.2f}" for value in values.values()) + " |"
            for bits, values in quality["perplexity_of_rounded_experts"].items()
        ),
        "",
        f"Right answers: {quality['right_answers']:.0%} of {quality['problems']} new problems, greedy, through the "
        "chat template.",
        "",
        "### Data",
        "",
        "| source | version | licence | domain | documents | bytes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for s in record["data"]["sources"]:
        documents, size = f"{s['documents']:,}", f"{s['bytes']:,}"
        lines.append(f"| {s['name']} | {s['version']} | {s['licence']} | {s['domain']} | {documents} | {size} |")
    made = record["data"]["sizes"]["arithmetic.train"]
    lines.append(f"| word_problems.py | - | this project's | arithmetic | {made['documents']:,} | {made['bytes']:,} |")
    lines += ["", "| stream | documents | bytes | tokens |", "| --- | --- | --- | --- |"]
    for name, size in record["data"]["sizes"].items():
        lines.append(f"| {name} | {size['documents']:,} | {size['bytes']:,} | {size['tokens']:,} |")
    lines += ["", "### Samples", "", "Greedy, 48 tokens at most, as `prompts.json` has them.", ""]
    for sample in record["samples"]:
        text = sample["prompt"] + "⟶" + sample["continuation"].rstrip()
        lines += [f"{sample['domain']}:", "", "```text", text, "```", ""]
    return "\n".join(lines)


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure, then write the record, the plots and the README's tables."""
    torch.set_num_threads(arguments.threads)
    record_path = HERE / "record.json"
    record = json.loads(record_path.read_text()) if record_path.exists() else {}
    tokenizer = AutoTokenizer.from_pretrained(arguments.package)
    model = AutoModelForCausalLM.from_pretrained(arguments.package, dtype=torch.float32).eval()
    record["config"] = json.loads((arguments.package / "config.json").read_text())

    domains = {}
    texts = {domain: (arguments.package / "heldout" / f"{domain}.txt").read_text() for domain in DOMAINS}
    for domain, text in texts.items():
        domains[domain] = measure_domain(model, tokenizer, text)
        print(domain, {key: value for key, value in domains[domain].items() if key != "load"})
    together = torch.tensor([measured["load"] for measured in domains.values()]).mean(0)
    entropy = -(together * together.clamp_min(1e-12).log()).sum(1) / math.log(model.config.num_experts)
    known = set(word_problems(arguments.known, seed=1))
    fresh = [problem for problem in word_problems(arguments.problems, seed=2) if problem not in known]
    rounded = {}
    for bits in (4, 3, 2):
        copy = AutoModelForCausalLM.from_pretrained(arguments.package, dtype=torch.float32).eval()
        round_experts(copy, bits)
        rounded[bits] = {domain: measure_domain(copy, tokenizer, text)["perplexity"] for domain, text in texts.items()}
    record["quality"] = {
        "perplexity_of_rounded_experts": rounded,
        "domains": domains,
        "load_entropy_all": [round(value, 4) for value in entropy.tolist()],
        "load_distance": load_distances(domains),
        "chance_reuse": model.config.num_experts_per_tok / model.config.num_experts,
        "right_answers": right_answers(model, tokenizer, fresh),
        "problems": len(fresh),
    }
    prompts = json.loads((arguments.package / "prompts.json").read_text())
    continued = complete(model, tokenizer, [entry["prompt"] for entry in prompts], 48)
    record["samples"] = [{**entry, "continuation": text} for entry, text in zip(prompts, continued, strict=True)]
    if (arguments.work / "run.json").exists():
        record["run"] = json.loads((arguments.work / "run.json").read_text())
        record["data"] = json.loads((arguments.work / "data.json").read_text())
        record["loss"] = [json.loads(line) for line in (arguments.work / "loss.jsonl").read_text().splitlines()]
        record["software"] = {"python": platform.python_version(), "torch": torch.__version__}
    record_path.write_text(json.dumps(record) + "\n")
    plot_loss(record["loss"], HERE / "loss.png")
    plot_load(domains, HERE / "load.png")
    readme = HERE / "README.md"
    head, rest = readme.read_text().split(MARK[0])
    readme.write_text(f"{head}{MARK[0]}\n{tables(record)}\n{MARK[1]}{rest.split(MARK[1])[1]}")
    summary = {f"perplexity_{domain}": measured["perplexity"] for domain, measured in domains.items()}
    print(json.dumps({**summary, "right_answers_share": record["quality"]["right_answers"]}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny_moe"), help="folder of data and log")
    parser.add_argument("--package", type=Path, default=MODEL, help="folder of the shipped model")
    parser.add_argument("--problems", type=int, default=100, help="word problems to solve")
    parser.add_argument("--known", type=int, default=60_000, help="word problems of the training data, never asked")
    parser.add_argument("--threads", type=int, default=2)
    evaluate(parser.parse_args())


if __name__ == "__main__":
    main()
