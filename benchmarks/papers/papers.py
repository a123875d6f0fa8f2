"""The four papers' tables on the shipped model, by `vllm-dymoe bench --paper`; their pages lie beside this file."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = HERE.parent / "tiny_moe" / "model"
PAPERS = ("dymoe", "duoserve", "firm", "dynaexq")


def main() -> None:
    """Measure what is missing of each, and keep its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("papers", nargs="*", default=PAPERS, help=f"some of {', '.join(PAPERS)}; all of them if none")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-papers", help="for rows")
    parser.add_argument("--quality", action="store_true", help="and quality, through lm-eval")
    arguments = parser.parse_args()
    # Which of four continuations of a held-out text is its own? And how likely is that text (perplexity of its words)?
    quality = ["--tasks", "dymoe_continuations,dymoe_texts", "--include", HERE.parent / "quality" / "lm_eval"]
    # One core computes. Another copies: behind a GPU's link a copy takes nothing from computation.
    alone = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for paper in arguments.papers:
        command = [Path(sys.executable).with_name("vllm-dymoe"), "bench", MODEL, "--paper", paper, "--link", "rtx3090"]
        command += ["--requests", "4", "--max-tokens", "32", "--out", arguments.work.resolve() / paper]
        command += quality if arguments.quality else []
        subprocess.run([str(part) for part in command], check=True, env=alone, cwd=ROOT)
        page = (arguments.work / paper / f"{paper}.md").read_text().replace(str(MODEL), "the shipped model")
        (HERE / f"{paper}.md").write_text(page)


if __name__ == "__main__":
    main()
