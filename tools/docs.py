"""`make docs`: writes the tables of README.md and docs/ that follow from the code.

Each stands between two markers. A test compares the committed pages with the result.
"""

import json
import re
import tomllib
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vllm_dymoe.bench.table import markdown
from vllm_dymoe.options import ExpertBudget, Options
from vllm_dymoe.policies import POLICIES
from vllm_dymoe.policies.papers import PAPERS
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES
from vllm_dymoe.quantize.readers import METHODS
from vllm_dymoe.vllm_plugin import NEWEST_VLLM, OLDEST_CPU_BUILD, OLDEST_VLLM
from vllm_dymoe.vllm_plugin.metrics import METRICS

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGES = (
    ROOT / "README.md", BENCHMARKS / "gpu" / "README.md", BENCHMARKS / "predictors" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)  # fmt: skip
RECORD = ROOT / "tests" / "e2e" / "models.json"
FAMILIES = ROOT / "tests" / "e2e" / "families.json"
FORMATS = {
    "fp8": "FP8", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "awq": "AWQ", "gptq": "GPTQ", "int8": "INT8",
    "compressed": "compressed-tensors", "auto": "AutoRound",
}  # fmt: skip
"""By the first word of a kind."""
PREDICTORS = BENCHMARKS / "predictors" / "results.json"
EMULATED_CARD = BENCHMARKS / "predictors" / "emulated_card.json"
ON_DEVICE = BENCHMARKS / "gpu" / "policies.json"
STARTS = ROOT / "tests" / "plan" / "starts" / "chosen.json"
_KINDS = {int: "a number", float: "a number", bool: "`true`, `false`", Path: "a path", str: "a name", dict: "an object"}
_LIMITS = {"ge": "from {}", "gt": "above {}", "le": "up to {}"}
_BUDGETS = ("auto", "top-k", "layer")


def table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    return markdown(head, ([cell.replace("\n", " ") for cell in row] for row in rows)) + "\n"


def code(value: Any) -> str:
    """Return a value as JSON, or its ``str``."""
    return f"`{json.dumps(value, default=str)}`"


def values(field: FieldInfo, choices: Iterable[str] = ()) -> str:
    """Return the allowed values of an option or parameter."""
    if choices:
        return ", ".join(map(code, choices))
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return ", ".join(map(code, get_args(kind)))
    limits = {limit: getattr(bound, limit) for bound in field.metadata for limit in _LIMITS if hasattr(bound, limit)}
    words = [_LIMITS[limit].format(value) for limit, value in limits.items()]
    return " ".join(words) or _KINDS.get(get_origin(kind) or kind, "see below")


def options() -> str:
    """Return the table of options."""
    rows = []
    for name, field in Options.model_fields.items():
        default = code("auto") if name in ("expert_budget", "host_memory") else code(field.default)
        rows.append(
            [f"`{name}`", values(field, POLICIES if name == "policy" else ()), default, field.description or ""]
        )
    return table(["option", "values", "default", "meaning"], rows)


def policies() -> str:
    """Return the table of policies."""
    rows = []
    for name, policy in POLICIES.items():
        budget = next((word for word in _BUDGETS if ExpertBudget.parse(word) == policy.default_budget), "auto")
        rows.append(
            [code(name), policy.summary, prefetch.name if (prefetch := policy().prefetch) else "", code(budget)]
        )
    return table(["`policy`", "does", "prefetches by", "`expert_budget`, if not set"], rows)


def parameters() -> str:
    """Return the table of every policy's parameters; an inherited one is listed once."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, policy in POLICIES.items():
        if policy in PAPERS:  # the same parameters with other defaults
            continue
        for parameter, field in policy.model_fields.items():
            row = (f"`{parameter}`", values(field), code(field.default), field.description or "")
            rows.setdefault(row, []).append(code(name))
    lines = ([", ".join(names), *row] for row, names in rows.items())
    return table(["`policy`", "parameter", "values", "default", "meaning"], lines)


def metrics() -> str:
    """Return the table of metrics, with their own labels."""
    named = ((m.full_name + (f"{{{m.label}}}" if m.label else ""), m.meaning) for m in METRICS)
    return table(["metric", "meaning"], ([f"`{name}`", meaning] for name, meaning in named))


def methods() -> str:
    """Return values of ``quant_method`` whose experts can be read."""
    return ", ".join(f"`{method}`" for method in METHODS) + "\n"


def models() -> str:
    """Return what `make models` has recorded, by format.

    This is how many answers of each model equal vLLM's at 16 bits.
    """
    by_format: dict[str, list[str]] = {}
    for name, found in json.loads(RECORD.read_text()).items():
        model, _, kind = name.partition(":")
        if "failed" in found:
            continue  # the table of families has the reason
        said = f"{model} {found['answers'].removesuffix(' of 3')}"
        if re.fullmatch(r"\d+ of \d+", found.get("alone", "")):
            said += f" (same files: {found['alone'].removesuffix(' of 3')})"
        by_format.setdefault(kind or "16 bits", []).append(said)
    return table(["format", "answers equal, of 3"], ([kind, ", ".join(said)] for kind, said in by_format.items()))


def families() -> str:
    """Return the table of every family of models.

    It shows the family's status and the reason, and the formats, drafts and pictures with which it was run.
    """
    record, rows = json.loads(RECORD.read_text()), []
    for family in json.loads(FAMILIES.read_text()):
        names = family["tried"]
        found = {
            name: said for name, said in record.items() if name.partition(":")[0].removesuffix("-pictures") in names
        }
        worked = [name for name, said in found.items() if not said.get("answers", "OTHERS").startswith("OTHERS")]
        status = family.get("status") or ("by hand" if worked else "expected")
        why = [family["note"]] if "note" in family else []
        if status == "expected":
            why += list(dict.fromkeys(said["failed"] for said in found.values() if "failed" in said))[:1]
        formats = [FORMATS[name.partition(":")[2].split("-")[0]] for name in worked if ":" in name]
        formats = sorted({*formats, *family.get("formats", ())})
        pictures = family.get("pictures", "")
        if pictures != "CI" and any(name.endswith("-pictures") for name in worked):
            pictures = "by hand"
        rest = ", ".join(formats), family.get("drafts", ""), pictures
        rows.append([family["model"], status, "; ".join(why).replace("|", "/"), *rest])
    return table(["model", "status", "remark", "formats", "drafts", "pictures"], rows)


def architectures() -> str:
    """Return the networks that ``vllm-dymoe train`` knows."""
    return ", ".join(f"`{name}`" for name in ARCHITECTURES) + "\n"


def predictors() -> str:
    """Return the results of `benchmarks/predictors`, a row for each training size.

    A network's cell has its accuracy for whole layers and for single experts.
    """
    found = json.loads(PREDICTORS.read_text())
    names = list(dict.fromkeys(name for rates in found.values() for name in rates))
    names.sort(key=[*ARCHITECTURES, "next gate"].index)

    def cell(rates: dict[str, float] | None) -> str:
        return "" if rates is None else f"{rates['all_k']:.0%} / {rates['accuracy']:.0%}"

    rows = ([f"{int(tokens):,}", *(cell(rates.get(name)) for name in names)] for tokens, rates in found.items())
    titles = {"next gate": "next gate (free)"}
    return table(["tokens", *(titles.get(name, f"`{name}`") for name in names)], rows)


def versions() -> str:
    """Return the supported versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    last = f"{NEWEST_VLLM.major}.{NEWEST_VLLM.minor - 1}"
    python = project["requires-python"].removeprefix(">=")
    return f"vLLM {OLDEST_VLLM} to {last}, its CPU build from {OLDEST_CPU_BUILD}; Python {python} or newer; Linux.\n"


def starts() -> str:
    """Return what `vllm-dymoe serve` chooses for eight models on eight machines."""
    rows = []
    for machine, found in json.loads(STARTS.read_text()).items():
        chosen = {subject: what for subject, (what, _) in found["why"].items()}
        settings = {f"--{name}": value for name, value in found["arguments"].items()}
        options = {name: value for name, value in found["options"].items() if name not in ("policy", "high", "low")}
        said = [*(f"`{' '.join(filter(None, (name, value)))}`" for name, value in settings.items()),
                *(f"`{name}` {code(value)}" for name, value in options.items())]  # fmt: skip
        speed = f"{found['tokens_per_second']:.3g}"
        policy, best = f"`{chosen['policy']}`, {chosen['precision']}", f"{found['times_best']:.2f}"
        rows.append([machine, found["model"], policy, ", ".join(said), speed, best])
    return table(["machine", "model", "policy", "the rest", "tokens/s", "x best"], rows)


def on_device() -> str:
    """Return what the host does for a layer that the device plans.

    There is a row for each policy, and a column for each kind of step.
    """
    cells: dict[str, list[str]] = {}
    rows = json.loads(ON_DEVICE.read_text())
    for row in rows:
        if row["waits"] or not row["bits"]:
            raise ValueError(f"{row} is not what the page says: no waits, and equal bits")
        cells.setdefault(row["policy"], []).append(f"{row['launches']}, {row['host_us']:.0f} us")
    steps = list(dict.fromkeys(row["step"] for row in rows))
    return table(["policy", *steps], ([f"`{name}`", *found] for name, found in cells.items()))


def emulated_card() -> str:
    """Return the times of a token on an emulated card and their bounds, by policy."""
    found, rows = json.loads(EMULATED_CARD.read_text()), dict[str, list[str]]()
    for way in found.values():
        for row in way["rows"]:
            ratio, known = row["ms"] / row["bound_ms"], rows.setdefault(row["policy"], [f"{row['hits']:.0%}"])
            known += [f"{row['ms']:.0f}", f"{row['bound_ms']:.0f}", f"{ratio:.2f}", f"{row['useful']:.1f}"]
    titles = {"fetch": "fetched", "share": "shared with the CPU"}
    head = ["policy", "hits"]
    for way in found:
        head += [f"misses {titles[way]}: ms a token", "bound", "ratio", "came ahead"]
    return table(head, ([name, *cells] for name, cells in rows.items()))


GENERATED: dict[str, Callable[[], str]] = {
    "architectures": architectures,
    "emulated-card": emulated_card,
    "on-device": on_device,
    "methods": methods,
    "models": models,
    "families": families,
    "metrics": metrics,
    "options": options,
    "parameters": parameters,
    "policies": policies,
    "predictors": predictors,
    "starts": starts,
    "versions": versions,
}
"""Tables by marker."""


def generated(page: str) -> str:
    """Return a page with new content between its markers.

    The markers are ``<!-- generated: NAME -->`` and ``<!-- end -->``.

    Raises:
        KeyError: a marker is unknown.
    """
    return re.sub(
        r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{GENERATED[found[2]]()}{found[3]}",
        page,
        flags=re.DOTALL,
    )


def main() -> None:
    """Write every page that differs."""
    for path in PAGES:
        before = path.read_text()
        after = generated(before)
        if after != before:
            path.write_text(after)
            print(f"docs: wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
