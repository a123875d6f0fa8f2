"""What do the compilers make of the kernels, on every architecture?

Compiles every variant ahead of time, without a GPU, with each Triton that a supported torch ships. Registers, spills,
shared memory, tensor-core instructions and the order of decode's operations go into compiled.json. Rows whose kernel
source, tile and Triton have not changed are kept, so an interrupted run resumes. `--jobs` compiles in several
processes; `--triton` and `--architecture` compile for one of them only.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # an installed package takes precedence

import triton
from flow import digests
from launched import large_batch_launches, plain_launches, tensor_core_launches, wrong_numbers
from machine_code import accesses_before_waiting, compile_variant, compiled_ptx, product_loops
from variants import ARCHITECTURES, MAIN, Variant, all_variants

from vllm_dymoe.kernels.triton.start import Overlap

HERE = Path(__file__).parent
TABLE = HERE / "compiled.json"
COLUMNS = ("triton", "architecture", "kernel", "shape", "precisions", "note")
TRITONS = {"3.6.0": "torch 2.11, vLLM 0.26", "3.7.1": "torch 2.13, vLLM 0.32", "3.8.0": "torch 2.14, vLLM 0.33"}
"""The Tritons of supported torch builds."""
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one program may have, from NVIDIA's compute capability table."""
BARRIERS = {"3.6.0": 6}
"""Barriers in a strip of 64 columns; the layout of scales differs from that of the products."""
INSTRUCTIONS = {
    8: {"8": 490, "4": 310, "2": 285, "4/2": 360, "8/4": 500, "mxfp4": 295, "nvfp4": 215, "fp8": 330, "e8": 345,
        "e8+e8/e8": 655},
    16: {"4": 395, "4/2": 450},
}  # fmt: skip
"""At most, in the loop that multiplies a warp's strip on tensor cores, by tokens and precisions: a twentieth more than
there are. Strips have 64 columns, of MXFP4 and FP8 32, and of NVFP4 16."""
IN_REGISTERS = {"4": 630, "2": 535, "4/2": 590, "8": 420, "mxfp4": 725, "nvfp4": 925, "fp8": 485,
                "e8+e8/e8": 900}  # fmt: skip
"""The same for 64 positions of a large batch. Strips of 8 bits and FP8 have 32 columns."""
SPILLS = {"3.6.0": 8}
"""Spilled bytes of a thread: gate and up with MXFP4 on sm_90."""
TENSOR_CORE_SPILLS = 24
"""The same on tensor cores, at most: 8 with E8 and FP8 on sm_90, 16 and 24 at 4 and 4/2 bits on sm_100."""


def problems(row: dict) -> list[str]:
    """Return what is wrong with a variant, as sentences."""
    found = []
    name = " ".join(str(row[column]) for column in COLUMNS if row[column])
    grouped = row["kernel"].startswith("grouped")
    # A few bytes do not matter in a launch that waits for the link, nor in planning, one program per layer.
    waits = "device" in row["note"] or row["kernel"] in ("decide", "choose")
    on_tensor_cores = row["kernel"].startswith("mma")
    allowed = TENSOR_CORE_SPILLS if on_tensor_cores else 64 if waits else SPILLS.get(row["triton"], 0)
    if row["kernel"].startswith("mma_grouped"):
        allowed = 0
    if row["spill_bytes"] > allowed and not grouped:
        found.append(f"{name} spills {row['spill_bytes']} bytes")
    if row["shared_bytes"] > SHARED_KIB[row["architecture"]] * 1024:
        found.append(f"{name} takes {row['shared_bytes']} bytes of shared memory, more than available")
    if grouped and not row["tensor_cores"]:
        found.append(f"{name} has no tensor-core instructions")
    if row["kernel"].startswith("mma_grouped"):
        limit = IN_REGISTERS[row["precisions"]]
        if "mma" not in row["tensor_cores"] or row["barriers_in_loops"] > 2:
            found.append(f"{name} has no tensor-core instructions in its loop, or more than two barriers")
        if row["instructions"] > limit:
            found.append(f"{name} has {row['instructions']} instructions in its loop, {limit} are expected at most")
    elif on_tensor_cores:
        limit = INSTRUCTIONS[16 if "16 tokens" in row["note"] else 8][row["precisions"]]
        if "mma" not in row["tensor_cores"] or row["barriers_in_loops"]:
            found.append(f"{name} has no tensor-core instructions in its loop, or exchanges data between threads")
        if row["instructions"] > limit:
            found.append(f"{name} has {row['instructions']} instructions in its loop, {limit} are expected at most")
    if row.get("early"):
        found.append(f"{name} accesses memory {row['early']} times before it waits for the planner")
    if row["kernel"] in ("gate_up", "down") and row["barriers_in_loops"] > BARRIERS.get(row["triton"], 0):
        found.append(f"{name} exchanges data between threads in its loop")
    if "flow" in row:
        fetching, fetching_two, plain, plain_two = row["flow"].split()
        if (fetching, fetching_two) != (plain, plain_two):
            found.append(f"{name} computes differently when it fetches")
        if (fetching, plain) != (fetching_two, plain_two):
            found.append(f"{name} computes a token differently with another one")
    return found


def has_flow(row: dict) -> bool:
    """Return whether a row has to say how outputs are computed (``flow.py``).

    Only down is checked, as device-planned steps launch it; gate and up have the same products. On tensor cores these
    are all codes on the main architecture, and 4 and 4/2 bits on the others. Without tensor cores they are all codes on
    the main architecture and on sm_120, and a code of each kind on sm_80.
    """
    if row["kernel"] == "mma_down":
        return row["architecture"] == MAIN or row["precisions"] in ("4", "4/2")
    of_a_kind = row["architecture"] == 80 and row["precisions"] in ("4", "8/4", "e8+e8/e8")
    return row["kernel"] == "down" and row["note"] == "device" and (row["architecture"] in (MAIN, 120) or of_a_kind)


def compile_row(variant: Variant) -> dict:
    """Return one row of the table."""
    named = dict(zip(COLUMNS, (triton.__version__, *variant.key), strict=True))
    row = named | asdict(compile_variant(variant)) | {"digest": variant.digest}
    if variant.kernel.startswith("mma_grouped"):  # for each number of positions of a tile
        row["loops"] = product_loops(variant)
    if variant.constants.get("OVERLAP") == Overlap.START:
        row["early"] = accesses_before_waiting(variant)
    return row | {"flow": digests(variant, compiled_ptx)} if has_flow(row) else row


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--triton", choices=TRITONS, action="append")
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES)
    arguments = parser.parse_args()
    if arguments.triton != [triton.__version__]:
        for version in arguments.triton or TRITONS:
            _with(version)
        wrong = [sentence for row in known_rows() for sentence in problems(row)]
        for sentence in wrong:
            print(f"compile_table: {sentence}", file=sys.stderr)
        return 1 if wrong else 0
    rows = fresh(known_rows(), all_variants())
    save(rows)
    done = set(map(key, rows))
    of_these = (v for v in all_variants() if arguments.architecture in (None, v.architecture))
    wanted = [variant for variant in of_these if (triton.__version__, *variant.key) not in done]
    print(f"Triton {triton.__version__}: {len(wanted)} rows are to be compiled", flush=True)
    of_main = {variant.kernel for variant in wanted if variant.architecture == MAIN}
    chosen = [
        *(plain_launches() if "down" in of_main else ()),
        *(tensor_core_launches() if "mma_down" in of_main else ()),
        *(large_batch_launches() if "mma_grouped_down" in of_main else ()),
    ]
    if wrong := wrong_numbers(chosen):
        print(f"compile_table: Triton {triton.__version__}: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(compile_row, wanted):
            rows.append(row)
            print(" ".join(str(value) for value in row.values()), flush=True)
            save(rows)
    return 0


def _with(version: str) -> None:
    """Compile with another Triton, installed next to the checkout's."""
    folder = Path(__file__).resolve().parents[2] / "build" / f"triton-{version}"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
    others = [word for word in sys.argv[1:] if word != "--triton" and word not in TRITONS]
    command = [sys.executable, __file__, *others, "--triton", version]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(folder)})


def key(row: dict) -> tuple:
    """Return the Triton and variant of a row."""
    return tuple(row[column] for column in COLUMNS)


def known_rows() -> list[dict]:
    """Return all rows of the table, whatever source they were compiled from."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else []


def fresh(rows: list[dict], planned: Iterable[Variant]) -> list[dict]:
    """Return rows of planned variants that have not changed.

    Source, tile and arguments are compared.
    """
    known = {variant.key: variant.digest for variant in planned}
    rows = [row for row in rows if row["triton"] in TRITONS and known.get(key(row)[1:]) == row["digest"]]
    return [row for row in rows if "flow" in row or not has_flow(row)]


def save(rows: list[dict]) -> None:
    """Write the table, in the order of Tritons and variants."""
    order = {variant.key: number for number, variant in enumerate(all_variants())}
    rows.sort(key=lambda row: (row["triton"], order[key(row)[1:]]))
    text = ",\n".join(json.dumps(row) for row in rows)
    TABLE.write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    sys.exit(main())
