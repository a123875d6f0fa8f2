"""What does each part of the papers' systems buy over a link as slow as theirs? DyMoE's Table 3, FIRM-MoE's 1 and 2.

Two models answer through the real vLLM engine, one request at a time, each in a process
of its own: the shipped one, and four layers of the shapes of Qwen3-30B-A3B with random
weights. The link between host store and device is emulated in wall-clock time, and is
as slow beside this machine's computation as PCIe is beside an RTX 3090's. Every answer
of a variant that keeps precision has to be the same, token by token. Writes results.json,
ablation.png and the README's table.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
from hardware import LINKS
from variants import CACHE, VARIANTS

from vllm_dymoe.store import STORE_VERSION

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "budget"))
LOW_TIERS = (0, 2)  # of the variants; the high tier has 4 bits in all of them
SHIPPED = HERE.parent / "tiny_moe" / "model"


def shipped() -> dict[str, Any]:
    """The shipped model answers its own prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    texts = [entry["prompt"] for entry in json.loads((SHIPPED / "prompts.json").read_text())][::5]
    prompts = [tokenizer(text)["input_ids"] for text in texts][:2]
    models = dict.fromkeys(LOW_TIERS, str(SHIPPED))  # which is not quantized yet
    return {"models": models, "prompts": prompts, "new_tokens": 32, "temperature": 0, "budgets": ["25%", "50%", "75%"]}


def synthetic(work: Path, layers: int) -> dict[str, Any]:
    """Layers of Qwen3-30B-A3B's shapes, written and packed once."""
    import model

    bf16 = work / f"bf16-{layers}"
    packed = {lo: work / f"packed-{layers}-4-{lo}-version-{STORE_VERSION}" for lo in LOW_TIERS}
    for lo, folder in packed.items():
        if folder.exists():
            continue
        if not (bf16 / "config.json").exists():
            shutil.rmtree(bf16, ignore_errors=True)
            model.write(bf16, layers)
        tool = Path(sys.executable).with_name("vllm-dymoe")
        command = [tool, "quantize", bf16, "--out", folder, "--hi", "4", "--lo", str(lo), "--quantizer", "rtn"]
        subprocess.run(command, check=True)
    shutil.rmtree(bf16, ignore_errors=True)
    prompts = model.prompts(layers, 2, 24)
    models = {lo: str(folder) for lo, folder in packed.items()}
    return {"models": models, "prompts": prompts, "new_tokens": 12, "temperature": 1, "budgets": ["25%", "75%"]}


def serve(name: str, plan: dict[str, Any], arguments: argparse.Namespace, shape: dict[str, int] | None) -> Any:
    """One model in a process of its own."""
    logs = Path(tempfile.mkdtemp(prefix="dymoe-ablation-"))
    result, log = logs / "result.json", logs / "log"
    command = [sys.executable, HERE / "serve.py", "--models", json.dumps(plan["models"])]
    command += ["--prompts", json.dumps(plan["prompts"])]
    command += ["--new-tokens", str(plan["new_tokens"]), "--budgets", *plan["budgets"], "--result", result]
    command += ["--temperature", str(plan["temperature"])]
    if name == "shipped":
        command += ["--every-budget"]
    command += ["--links", *arguments.links, "--variants", *arguments.variants]
    if shape:
        command += ["--ratio-of", json.dumps(shape)]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_COLOR": "0"}
    environment["DYMOE_STORE_DIR"] = str(arguments.work / "stores")
    print(f"{name}: answering (log: {log}) ...", flush=True)
    with log.open("w") as output:
        code = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment, check=False
        ).returncode
    if code:
        sys.exit(f"{name} failed with {code}; the end of its log {log}:\n" + "".join(log.open().readlines()[-30:]))
    return json.loads(result.read_text())


def main() -> None:
    """Prepare, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the synthetic model")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-ablation", help="for models")
    parser.add_argument("--models", nargs="+", choices=["synthetic", "shipped"], default=["synthetic", "shipped"])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=HERE, help="where results.json and ablation.png go")
    arguments = parser.parse_args()
    if CACHE not in arguments.variants:
        parser.error(f"everything is compared with the variant {CACHE}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    models: dict[str, Any] = {}
    if "synthetic" in arguments.models:
        models["synthetic"] = serve("synthetic", synthetic(arguments.work, arguments.layers), arguments, None)
    if "shipped" in arguments.models:
        # The miniature is given the link of what it is a miniature of.
        shape = report.QWEN3_30B if "synthetic" not in models else models["synthetic"]["resident"]["shape"]
        models["shipped"] = serve("shipped", shipped(), arguments, shape)
    results = {"machine": f"{platform.machine()} CPU, {os.cpu_count()} cores", "models": models}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    report.show(results)
    if set(arguments.variants) == set(VARIANTS) and len(models) == 2:
        report.draw(results, arguments.out / "ablation.png")
        report.write_readme(results, arguments.out / "README.md")


if __name__ == "__main__":
    main()
