"""`make docs`: write the tables of README.md and docs/ that follow from the code, each between two markers.

A test compares what is committed with what this makes.
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
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RECORD = ROOT / "tests" / "e2e" / "models.json"
FAMILIES = ROOT / "tests" / "e2e" / "families.json"
FORMATS = {
    "fp8": "FP8", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "awq": "AWQ", "gptq": "GPTQ", "int8": "INT8",
    "compressed": "compressed-tensors", "auto": "AutoRound",
}  # fmt: skip
"""By the first word of a kind."""
PREDICTORS = ROOT / "benchmarks" / "predictors" / "results.json"
STARTS = ROOT / "tests" / "plan" / "starts" / "chosen.json"
EMULATED_CARD = PREDICTORS.with_name("emulated_card.json")
_KINDS = {int: "a number", float: "a number", bool: "`true`, `false`", Path: "a path", str: "a name", dict: "an object"}
_LIMITS = {"ge": "from {}", "gt": "above {}", "le": "up to {}"}
_BUDGETS = ("auto", "top-k", "layer")


def table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    return markdown(head, ([cell.replace("\n", " ") for cell in row] for row in rows)) + "\n"


def code(value: Any) -> str:
    """A value as JSON, or another one in its own words."""
    return f"`{json.dumps(value, default=str)}`"


def values(field: FieldInfo, choices: Iterable[str] = ()) -> str:
    """What an option or parameter may be."""
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
    """Every option."""
    rows = []
    for name, field in Options.model_fields.items():
        default = code("auto") if name in ("expert_budget", "host_memory") else code(field.default)
        rows.append(
            [f"`{name}`", values(field, POLICIES if name == "policy" else ()), default, field.description or ""]
        )
    return table(["option", "values", "default", "meaning"], rows)


def policies() -> str:
    """Every policy."""
    rows = []
    for name, policy in POLICIES.items():
        budget = next((word for word in _BUDGETS if ExpertBudget.parse(word) == policy.default_budget), "auto")
        rows.append(
            [code(name), policy.summary, prefetch.name if (prefetch := policy().prefetch) else "", code(budget)]
        )
    return table(["`policy`", "is", "fetches ahead", "`expert_budget`, if not set"], rows)


def parameters() -> str:
    """Every parameter of every policy; one that a policy inherits stands once."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, policy in POLICIES.items():
        if policy in PAPERS:  # other defaults of another's
            continue
        for parameter, field in policy.model_fields.items():
            row = (f"`{parameter}`", values(field), code(field.default), field.description or "")
            rows.setdefault(row, []).append(code(name))
    lines = ([", ".join(names), *row] for row, names in rows.items())
    return table(["`policy`", "parameter", "values", "default", "meaning"], lines)


def metrics() -> str:
    """Every metric, with the label of its own."""
    named = ((m.full_name + (f"{{{m.label}}}" if m.label else ""), m.meaning) for m in METRICS)
    return table(["metric", "meaning"], ([f"`{name}`", meaning] for name, meaning in named))


def methods() -> str:
    """Values of ``quant_method`` whose experts are read."""
    return ", ".join(f"`{method}`" for method in METHODS) + "\n"


def models() -> str:
    """What `make models` has recorded, by format: how many answers of each model are vLLM's at 16 bits."""
    by_format: dict[str, list[str]] = {}
    for name, found in json.loads(RECORD.read_text()).items():
        model, _, kind = name.partition(":")
        said = f"{model} {(found.get('answers') or found['failed']).removesuffix(' of 3')}"
        if re.fullmatch(r"\d+ of \d+", found.get("alone", "")):
            said += f" (same files: {found['alone'].removesuffix(' of 3')})"
        by_format.setdefault(kind or "16 bits", []).append(said)
    return table(["format", "answers equal, of 3"], ([kind, ", ".join(said)] for kind, said in by_format.items()))


def families() -> str:
    """Every family of models: what its status is, why, and in which formats, with drafts and pictures it was run."""
    record, rows = json.loads(RECORD.read_text()), []
    for family in json.loads(FAMILIES.read_text()):
        names = family["tried"]
        found = {name: said for name, said in record.items() if name.partition(":")[0] in names}
        worked = [name for name, said in found.items() if not said.get("answers", "OTHERS").startswith("OTHERS")]
        status = family.get("status") or ("by hand" if worked else "expected")
        why = [family["note"]] if "note" in family else []
        if status == "expected":
            why += list(dict.fromkeys(said["failed"] for said in found.values() if "failed" in said))[:1]
        formats = [FORMATS[name.partition(":")[2].split("-")[0]] for name in worked if ":" in name]
        formats = sorted({*formats, *family.get("formats", ())})
        rest = ", ".join(formats), family.get("drafts", ""), family.get("pictures", "")
        rows.append([family["model"], status, "; ".join(why).replace("|", "/"), *rest])
    return table(["model", "status", "remark", "formats", "drafts", "pictures"], rows)


def architectures() -> str:
    """Networks that ``vllm-dymoe train`` knows."""
    return ", ".join(f"`{name}`" for name in ARCHITECTURES) + "\n"


def predictors() -> str:
    """What `benchmarks/predictors` has recorded: rows by tokens, whole layers and single experts of each network."""
    found = json.loads(PREDICTORS.read_text())
    names = list(dict.fromkeys(name for rates in found.values() for name in rates))
    names.sort(key=[*ARCHITECTURES, "next gate"].index)

    def cell(rates: dict[str, float] | None) -> str:
        return "" if rates is None else f"{rates['all_k']:.0%} / {rates['accuracy']:.0%}"

    rows = ([f"{int(tokens):,}", *(cell(rates.get(name)) for name in names)] for tokens, rates in found.items())
    titles = {"next gate": "next gate (free)"}
    return table(["tokens", *(titles.get(name, f"`{name}`") for name in names)], rows)


def emulated_card() -> str:
    """What `benchmarks/predictors/emulated_card.py` has measured: milliseconds a token beside their bound."""
    rows = json.loads(EMULATED_CARD.read_text())["rows"]

    def cells(row: dict[str, Any]) -> list[str]:
        ratio, moved = row["ms"] / row["bound_ms"], f"{row['demand_mb']:.2f} + {row['ahead_mb']:.2f}"
        return [row["policy"], row["misses"], f"{row['ms']:.1f}", f"{row['bound_ms']:.1f}", f"{ratio:.2f}", moved]

    return table(["policy", "`misses`", "ms a token", "bound", "ratio", "MB a token: demand + ahead"], map(cells, rows))


def versions() -> str:
    """What the package runs with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    last = f"{NEWEST_VLLM.major}.{NEWEST_VLLM.minor - 1}"
    python = project["requires-python"].removeprefix(">=")
    return f"vLLM {OLDEST_VLLM} to {last}, its CPU build from {OLDEST_CPU_BUILD}; Python {python} or newer; Linux.\n"


def starts() -> str:
    """What `vllm-dymoe serve` chooses for eight models on eight machines."""
    rows = []
    for machine, found in json.loads(STARTS.read_text()).items():
        chosen = {subject: what for subject, (what, _) in found["why"].items()}
        settings = {f"--{name}": value for name, value in found["arguments"].items()}
        options = {name: value for name, value in found["options"].items() if name not in ("policy", "high", "low")}
        said = [*(f"`{name} {value}`" for name, value in settings.items()), *(f"`{name}` {code(value)}" for name, value
                in options.items())]  # fmt: skip
        speed = f"{found['tokens_per_second']:.3g}"
        rows.append([machine, found["model"], f"`{chosen['policy']}`, {chosen['precision']}", ", ".join(said), speed])
    return table(["machine", "model", "policy", "the rest", "tokens/s"], rows)


GENERATED: dict[str, Callable[[], str]] = {
    "architectures": architectures,
    "emulated-card": emulated_card,
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
"""By marker."""


def generated(page: str) -> str:
    """A page with what its markers ``<!-- generated: NAME -->`` and ``<!-- end -->`` enclose made anew; KeyError for a
    marker that nothing is generated for."""
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
