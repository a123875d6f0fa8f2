"""What does the compiler make of the kernels, on every architecture?

Compiles every variant ahead of time, without a GPU, and writes registers, spills, shared memory and tensor-core
instructions to compiled.json and the README. Rows of the same sources and Triton are kept, so that a run that was
interrupted goes on where it was. `--jobs` compiles in several processes, `--architecture` for one of them only.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from checkout import find_package

find_package()

import triton  # noqa: E402
from variants import ARCHITECTURES, SHARED_KIB, Variant, all_variants, compile_variant, source_hash  # noqa: E402

HERE = Path(__file__).parent
TABLE, README = HERE / "compiled.json", HERE / "README.md"
BEGIN, END = "<!-- compiled:begin -->\n", "<!-- compiled:end -->"
COLUMNS = ("architecture", "kernel", "model", "tiers", "note")


def problems(row: dict) -> list[str]:
    """What is wrong with a variant, as sentences."""
    found = []
    name = " ".join(str(row[column]) for column in COLUMNS if row[column])
    grouped = row["kernel"].startswith("grouped")
    if row["spill_bytes"] and not grouped:
        found.append(f"{name} spills {row['spill_bytes']} bytes")
    if row["shared_bytes"] > SHARED_KIB[row["architecture"]] * 1024:
        found.append(f"{name} takes {row['shared_bytes']} bytes of shared memory, more than there are")
    if grouped and not row["tensor_cores"]:
        found.append(f"{name} has no tensor-core instructions")
    if row["barriers_in_loops"] and not grouped:
        found.append(f"{name} exchanges data between threads in its loop")
    return found


def compile_row(variant: Variant) -> dict:
    """One row of the table."""
    return dict(zip(COLUMNS, variant.key, strict=True)) | asdict(compile_variant(variant))


def markdown(table: dict) -> str:
    """By kernel, tiers and note: the worst of all architectures, and where tensor cores are."""
    groups: dict[tuple, list[dict]] = {}
    for row in table["rows"]:
        groups.setdefault((row["kernel"], row["model"], row["tiers"], row["note"]), []).append(row)
    lines = ["| kernel | shape | tiers | | registers | spilled bytes | shared KiB | loop | tensor cores |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for (kernel, model, tiers, note), rows in groups.items():

        def span(name, rows=rows, scale=1):
            values = sorted({round(row[name] / scale) for row in rows})
            return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"

        cores = sorted({row["tensor_cores"] for row in rows} - {""})
        loop = "" if kernel.startswith("grouped") else span("instructions")
        cells = [kernel, model, tiers, note, span("registers"), span("spill_bytes"), span("shared_bytes", scale=1024)]
        lines.append("| " + " | ".join([*cells, loop, ", ".join(cores)]) + " |")
    architectures = ", ".join(f"sm_{a}" for a in sorted({row["architecture"] for row in table["rows"]}))
    count = f"{len(table['rows'])} of {len(list(all_variants()))} variants"
    note = f"Triton {table['triton']}, {count}, on {architectures}; `make kernels-table` compiles what is missing."
    return "\n".join([*lines, "", note, ""])


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES)
    arguments = parser.parse_args()
    rows = known_rows()
    done = {tuple(row[column] for column in COLUMNS) for row in rows}
    wanted = [v for v in all_variants() if arguments.architecture in (None, v.architecture) and v.key not in done]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(compile_row, wanted):
            rows.append(row)
            print(" ".join(str(value) for value in row.values()), flush=True)
            save(rows)
    save(rows)
    wrong = [sentence for row in rows for sentence in problems(row)]
    for sentence in wrong:
        print(f"compile_table: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def known_rows() -> list[dict]:
    """Rows that this Triton made of these sources: an interrupted run goes on where it was."""
    if not TABLE.exists():
        return []
    table = json.loads(TABLE.read_text())
    return table["rows"] if (table["source"], table["triton"]) == (source_hash(), triton.__version__) else []


def save(rows: list[dict]) -> None:
    """Write the table and its place in the README, in the order of the variants."""
    order = {variant.key: number for number, variant in enumerate(all_variants())}
    rows.sort(key=lambda row: order[tuple(row[column] for column in COLUMNS)])
    table = {"source": source_hash(), "triton": triton.__version__, "rows": rows}
    text = ",\n".join(json.dumps(row) for row in rows)
    TABLE.write_text(f'{{"source": "{table["source"]}", "triton": "{table["triton"]}", "rows": [\n{text}\n]}}\n')
    before, rest = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + markdown(table) + END + rest.split(END)[1])


if __name__ == "__main__":
    sys.exit(main())
