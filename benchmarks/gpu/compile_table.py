"""What does the compiler make of the kernels, on every architecture?

Compiles every variant ahead of time, without a GPU, and writes registers, spills, shared memory and tensor-core
instructions to compiled.json and the README. A row of the same kernel source, tile and Triton is kept: a run that was
interrupted goes on where it was. After a change of the sources a row is kept if the compiler is still given the same
code for it, so that only what the change touches is compiled again. `--jobs` compiles in several processes,
`--architecture` for one of them only, `--essential` what no change of a kernel may do without.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from checkout import find_package

find_package()
sys.path.append(str(Path(__file__).resolve().parents[1]))

import triton  # noqa: E402
from machine_code import compile_variant, ir_digest  # noqa: E402
from readme import put  # noqa: E402
from variants import ARCHITECTURES, Variant, all_variants, essential_variants  # noqa: E402

HERE = Path(__file__).parent
TABLE, README = HERE / "compiled.json", HERE / "README.md"
COLUMNS = ("architecture", "kernel", "shape", "tiers", "note")
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one program may have, from NVIDIA's compute capability table."""


def problems(row: dict) -> list[str]:
    """What is wrong with a variant, as sentences."""
    found = []
    name = " ".join(str(row[column]) for column in COLUMNS if row[column])
    grouped = row["kernel"].startswith("grouped")
    # A launch that fetches waits for the link, and one program for a layer for itself: a few bytes do not matter there.
    allowed = 64 if "fetch" in row["note"] or row["kernel"] in ("decide", "name_ahead") else 0
    if row["spill_bytes"] > allowed and not grouped:
        found.append(f"{name} spills {row['spill_bytes']} bytes")
    if row["shared_bytes"] > SHARED_KIB[row["architecture"]] * 1024:
        found.append(f"{name} takes {row['shared_bytes']} bytes of shared memory, more than there are")
    if grouped and not row["tensor_cores"]:
        found.append(f"{name} has no tensor-core instructions")
    if row["barriers_in_loops"] and row["kernel"] in ("gate_up", "down"):
        found.append(f"{name} exchanges data between threads in its loop")
    return found


def compile_row(variant: Variant) -> dict:
    """One row of the table."""
    named = dict(zip(COLUMNS, variant.key, strict=True))
    return named | asdict(compile_variant(variant)) | {"digest": variant.digest, "ir": ir_digest(variant)}


def renew_row(variant: Variant, row: dict) -> dict | None:
    """A row of another source, if the compiler would be given the same by this one; else None."""
    return row | {"digest": variant.digest} if row["ir"] == ir_digest(variant) else None


def markdown(table: dict) -> str:
    """By kernel, shape, tiers and note: the range over the architectures, and where tensor cores are."""
    groups: dict[tuple, list[dict]] = {}
    for row in table["rows"]:
        groups.setdefault(tuple(row[column] for column in COLUMNS[1:]), []).append(row)
    lines = ["| kernel | shape | tiers | | sm | registers | spilled bytes | shared KiB | loop | tensor cores |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    order = {variant.key[1:]: number for number, variant in enumerate(all_variants())}
    for key, rows in sorted(groups.items(), key=lambda group: order[group[0]]):

        def span(name, rows=rows, scale=1):
            values = sorted({round(row[name] / scale) for row in rows})
            return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"

        on = sorted(row["architecture"] for row in rows)
        cores = sorted({row["tensor_cores"] for row in rows} - {""})
        loop = "" if key[0].startswith("grouped") else span("instructions")
        cells = [*key, "all" if on == list(ARCHITECTURES) else " ".join(map(str, on))]
        cells += [span("registers"), span("spill_bytes"), span("shared_bytes", scale=1024), loop, ", ".join(cores)]
        lines.append("| " + " | ".join(cells) + " |")
    count = f"{len(table['rows'])} of {len(list(all_variants()))} planned variants"
    note = f"Triton {table['triton']}, {count}; `make kernels-table` compiles what is missing."
    return "\n".join([*lines, "", note, ""])


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES)
    parser.add_argument("--essential", action="store_true")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        rows = renewed(known_rows(), pool)
        save(rows)
        done = {key(row) for row in rows}
        planned = essential_variants() if arguments.essential else all_variants()
        wanted = [v for v in planned if arguments.architecture in (None, v.architecture) and v.key not in done]
        print(f"{len(rows)} rows are up to date, {len(wanted)} are to be compiled", flush=True)
        # What an interrupted run has is worth most in this order: the essential ones, decode, the ends' architectures.
        first, ends = {variant.key for variant in essential_variants()}, (ARCHITECTURES[0], ARCHITECTURES[-1])
        wanted.sort(key=lambda v: (v.key not in first, v.kernel.startswith("grouped"), v.architecture not in ends))
        for row in pool.map(compile_row, wanted):
            rows.append(row)
            print(" ".join(str(value) for value in row.values()), flush=True)
            save(rows)
    save(rows)
    wrong = [sentence for row in rows for sentence in problems(row)]
    for sentence in wrong:
        print(f"compile_table: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def key(row: dict) -> tuple:
    """Of which variant it is."""
    return tuple(row[column] for column in COLUMNS)


def known_rows() -> list[dict]:
    """Rows that this Triton made, of whatever sources."""
    if not TABLE.exists():
        return []
    table = json.loads(TABLE.read_text())
    return [] if table["triton"] != triton.__version__ else table["rows"]


def renewed(rows: list[dict], pool: Executor) -> list[dict]:
    """Rows whose numbers still hold, with the digests of the present sources."""
    planned = {variant.key: variant for variant in all_variants()}
    kept = fresh(rows, planned.values())
    done = {key(row) for row in kept}
    stale = [row for row in rows if key(row) in planned and key(row) not in done]
    again = pool.map(renew_row, [planned[key(row)] for row in stale], stale)
    return kept + [row for row in again if row is not None]


def fresh(rows: list[dict], planned: Iterable[Variant]) -> list[dict]:
    """Rows of planned variants whose source, tile and arguments are still what they were compiled from."""
    digests = {variant.key: variant.digest for variant in planned}
    return [row for row in rows if digests.get(key(row)) == row["digest"]]


def save(rows: list[dict]) -> None:
    """Write the table and its place in the README, in the order of the variants."""
    order = {variant.key: number for number, variant in enumerate(all_variants())}
    rows.sort(key=lambda row: order[key(row)])
    table = {"triton": triton.__version__, "rows": rows}
    text = ",\n".join(json.dumps(row) for row in rows)
    TABLE.write_text(f'{{"triton": "{table["triton"]}", "rows": [\n{text}\n]}}\n')
    put(README, "compiled", markdown(table))


if __name__ == "__main__":
    sys.exit(main())
