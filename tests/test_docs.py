"""The documents against the code: what they say in numbers, names and paths is true."""

import json
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch

from vllm_dymoe.config import ConfigError, ExpertBudget, Options, TraceOptions
from vllm_dymoe.experts.layout import BlobKey, ExpertFormat, ModelExperts, Projection
from vllm_dymoe.kernels import MatrixFormat, dequantize, pack
from vllm_dymoe.predict.expert_mlp import ARCHITECTURES
from vllm_dymoe.quantize.convert import Recipe
from vllm_dymoe.quantize.readers import METHODS
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.store import STORE_VERSION, Manifest
from vllm_dymoe.store.files import file_name
from vllm_dymoe.store.header import read_header
from vllm_dymoe.store.writer import StoreWriter
from vllm_dymoe.systems import SYSTEMS, pace
from vllm_dymoe.systems.schedule import Schedule
from vllm_dymoe.traces import TRACE_FORMAT, Trace, TraceHeader, recorder
from vllm_dymoe.units import size
from vllm_dymoe.vllm_adapter import NEWEST_VLLM, OLDEST_VLLM
from vllm_dymoe.vllm_adapter.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FORMAT = (ROOT / "docs" / "format.md").read_text()
METRICS_PAGE = (ROOT / "docs" / "metrics.md").read_text()
PREFETCH = (ROOT / "docs" / "prefetch.md").read_text()
OPTIONS = (ROOT / "docs" / "options.md").read_text()
APP = (ROOT / "vllm_dymoe" / "cli" / "app.py").read_text()
PRECISION = (ROOT / "docs" / "precision.md").read_text()
TRACES = (ROOT / "docs" / "traces.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

ROW, COLUMN, GROUP_SIZE = 99, 50, 32
BFLOAT16 = torch.bfloat16
MODEL = json.loads((ROOT / "benchmarks" / "tiny_moe" / "model" / "config.json").read_text())


def table(text, marker):
    """Rows of the table behind ``<!-- marker -->``, as dictionaries by column."""
    lines = iter(text.split(f"<!-- {marker} -->", 1)[1].strip().splitlines())
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split(" |")])
    header, _, *body = rows
    return [dict(zip(header, row, strict=True)) for row in body]


def code(cell):
    """What stands in backticks in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def integers(cell):
    return [int(number, 0) for number in re.findall(r"0x[0-9a-f]+|\d+", cell)]


def example_matrix(bits):
    return MatrixFormat(100, 70, bits, GROUP_SIZE, BFLOAT16)


def written(bits, *, codes=0, scales=0.0, zeros=0.0):
    """Bytes of the example's section with these values at its one place, and zeros elsewhere."""
    format = example_matrix(bits)
    section = torch.zeros(format.nbytes, dtype=torch.uint8)
    if bits == 16:
        format.view(section).weight[ROW, COLUMN] = codes
        return section
    all_codes = torch.zeros(format.rows, format.columns, dtype=torch.uint8)
    all_codes[ROW, COLUMN] = codes
    all_scales, all_zeros = torch.zeros(2, format.rows, format.groups)
    all_scales[ROW, COLUMN // GROUP_SIZE] = scales
    all_zeros[ROW, COLUMN // GROUP_SIZE] = zeros
    pack(format, all_codes, all_scales, all_zeros, section)
    return section


def places(section):
    return section.nonzero().flatten().tolist()


# -- docs/format.md -------------------------------------------------------------------------------


def test_sizes_of_the_example():
    rows = table(FORMAT, "example: sizes")
    assert [int(row["bits"]) for row in rows] == [16, 8, 4, 2]
    for row in rows:
        format = example_matrix(int(row.pop("bits")))
        both = row.pop("with both")
        assert both == (str(replace(format, bias=True, act_order=True).nbytes) if format.quantized else "")
        assert {name: int(cell) for name, cell in row.items()} == {
            "N'": format.padded_rows,
            "K'": format.padded_columns,
            "bytes of weights": format.weight_bytes,
            "S": format.scales_offset,
            "bytes of scales and zeros": format.groups * format.padded_rows * 2 * BFLOAT16.itemsize,
            "T": format.bias_offset,
            "bytes of the section": format.nbytes,
            "with a bias": replace(format, bias=True).nbytes,
        }


# All ones in every format: the largest code, and a bfloat16 of which no byte is zero.
@pytest.mark.parametrize(("bits", "everything"), [(16, -1.9921875), (8, 255), (4, 15), (2, 3)])
def test_places_of_the_example(bits, everything):
    (row,) = (row for row in table(FORMAT, "example: places") if int(row["bits"]) == bits)
    section = written(bits, codes=everything)
    assert places(section) == integers(row["bytes of the weight"])
    first, last = integers(row["bits of each byte"])
    if bits == 16:
        assert (first, last) == (0, 7)
    else:
        mask = (1 << (last + 1)) - (1 << first)
        assert {int(section[place]) for place in places(section)} == {mask}
        # A value whose first byte is not zero, so that the place begins where it is found.
        assert places(written(bits, scales=1.5078125))[0] == int(row["scale"])
        assert places(written(bits, zeros=1.5078125))[0] == int(row["zero"])


def test_bytes_of_the_example():
    section = written(4, codes=11, scales=0.5, zeros=-0.25)
    assert float(dequantize(example_matrix(4).view(section))[ROW, COLUMN]) == 1.25
    rows = table(FORMAT, "example: bytes")
    assert {int(row["byte"]): int(row["value"], 0) for row in rows} == {i: int(section[i]) for i in places(section)}


def test_the_order_of_the_example():
    format = replace(example_matrix(4), act_order=True)
    section = torch.zeros(format.nbytes, dtype=torch.uint8)
    format.view(section).order[COLUMN] = 1
    assert f"at byte\n{format.order_offset} + 2 * {COLUMN} = {places(section)[0]}." in FORMAT


def test_the_formulas_of_places_hold_everywhere():
    """The table of bytes, in Python, against the packer for random places."""
    generator = torch.Generator().manual_seed(0)
    for bits in (8, 4, 2):
        format = example_matrix(bits)
        codes = torch.randint(0, 1 << bits, (100, 70), generator=generator, dtype=torch.uint8)
        zeros = torch.zeros(100, format.groups)
        section = torch.zeros(format.nbytes, dtype=torch.uint8)
        pack(format, codes, zeros, zeros, section)
        wide = format.padded_columns
        for r, c in torch.randint(0, 70, (50, 2), generator=generator).tolist():
            block, half, e = r // 64, r % 64 // 32, r % 32
            group, i = divmod(c, GROUP_SIZE)
            q, j = divmod(i, GROUP_SIZE // 2)
            if bits == 4:
                found = section[32 * wide * block + 32 * c + e] >> 4 * half & 15
            elif bits == 8:
                high = section[64 * wide * block + 32 * c + e] >> 4 * half & 15
                low = section[64 * wide * block + 32 * wide + 32 * c + e] >> 4 * half & 15
                found = 16 * high + low
            else:
                found = section[16 * wide * block + 16 * GROUP_SIZE * group + 32 * j + e] >> 4 * half + 2 * q & 3
            assert int(found) == int(codes[r, c]), (bits, r, c)


def blob_format(bits):
    return ExpertFormat(MODEL["hidden_size"], MODEL["moe_intermediate_size"], bits, 64, BFLOAT16)


def test_blobs_of_the_shipped_model():
    rows = table(FORMAT, "example: blobs")
    assert [int(row["bits"]) for row in rows] == [16, 8, 4, 2]
    for row in rows:
        fmt = blob_format(int(row["bits"]))
        assert [int(row[name]) for name in ("gate", "up", "down")] == [section.start for section in fmt.sections]
        assert int(row["bytes of the blob"]) == fmt.nbytes


def shipped_manifest():
    formats = {bits: blob_format(bits) for bits in (4, 2)}
    experts = ModelExperts((0,), MODEL["num_experts"], MODEL["num_experts_per_tok"], formats)
    return Manifest(experts, "rtn", "0" * 16)


def test_a_shard_of_the_shipped_model(tmp_path):
    shards = StoreWriter(tmp_path / "store", shipped_manifest())
    section = torch.full((blob_format(4).matrices[1].nbytes,), 0xEE, dtype=torch.uint8)
    shards.write(BlobKey(0, 5, 4), Projection.UP, section)
    shards.finish()
    path = tmp_path / "store" / file_name(0)
    with path.open("rb") as file:
        places = read_header(path, file.fileno())
    start = min(place.begin for place in places.values())
    rows = table(FORMAT, "example: shard")
    assert [code(row["tensor"])[0] for row in rows] == list(places)
    for row, place in zip(rows, places.values(), strict=True):
        assert json.loads(row["shape"]) == list(place.shape)
        assert [int(row["first byte in the file"]), int(row["end"])] == [place.begin, place.end]
    assert f"begins at byte {start}, and a shard has {path.stat().st_size} bytes" in FORMAT
    found = path.read_bytes().index(b"\xee" * section.numel())
    assert (
        f"the up section of expert 5 at 4 bits is therefore at byte {start} + 5 * 27648 + 9216 = {found}".lower()
        in (FORMAT.lower())
    )


def test_every_field_of_the_manifest():
    rows = table(FORMAT, "fields: manifest")
    assert [code(row["field"])[0] for row in rows] == list(shipped_manifest().to_json())


def test_every_field_of_the_quantization_config():
    rows = table(FORMAT, "fields: quantization_config")
    assert [code(row["field of `quantization_config`"])[0] for row in rows] == list(Recipe().to_json())


def test_versions_of_the_format():
    assert FORMAT.startswith(f"# The format of packed experts, version {STORE_VERSION}\n")
    assert f"version of this format, {STORE_VERSION} |" in FORMAT
    assert f"version of the checkpoint's layout, {STORE_VERSION} |" in FORMAT


# -- docs/options.md ------------------------------------------------------------------------------


def load(options):
    return resolve_options(options, environment={})


def option_rows():
    return {code(row["option"])[0]: row for row in table(OPTIONS, "options")}


def test_every_option_is_there_in_the_order_of_the_code():
    assert list(option_rows()) == list(Options.model_fields)


@pytest.mark.parametrize("name", Options.model_fields)
def test_defaults(name):
    (default,) = code(option_rows()[name]["default"])
    assert getattr(load({name: json.loads(default)}), name) == getattr(Options(), name)


@pytest.mark.parametrize("name", [n for n, f in Options.model_fields.items() if get_origin(f.annotation) is Literal])
def test_values(name):
    documented = [json.loads(value) for value in code(option_rows()[name]["values"])]
    others = {"lo": {"hi": 16}, "hi": {"lo": 0}}.get(name, {})
    for value in documented:
        assert getattr(load({name: value} | others), name) == value
    for value in set(get_args(Options.model_fields[name].annotation)) - set(documented):
        with pytest.raises(ConfigError):
            load({name: value} | others)


def test_systems():
    assert [json.loads(value) for value in code(option_rows()["system"]["values"])] == list(SYSTEMS)
    rows = {json.loads(code(row["`system`"])[0]): row["is"] for row in table(OPTIONS, "systems")}
    assert rows == {name: system.summary for name, system in SYSTEMS.items()}


def test_parameters_of_systems():
    found = {name: {} for name in SYSTEMS}
    for row in table(OPTIONS, "system options"):
        for system in code(row["`system`"]):
            found[json.loads(system)][code(row["parameter"])[0]] = json.loads(*code(row["default"]))
    assert found == {
        name: {parameter: field.default for parameter, field in system.model_fields.items()}
        for name, system in SYSTEMS.items()
    }


def test_numbers_of_the_schedule():
    up, nearest = Schedule(0.75), Schedule(0.75, "nearest")
    assert f"has {round(up.realised(8, 4) * 32)} of 32 experts high" in PRECISION
    assert f"one token of Mixtral {round(up.realised(32, 2) * 64)} of 64" in PRECISION
    assert f"stays around r: {nearest.realised(32, 2):.3g} for" in PRECISION


def test_budgets():
    rows = table(OPTIONS, "budgets")
    assert len(rows) >= 6
    for row in rows:
        (value,) = code(row["value"])
        budget = ExpertBudget.parse(json.loads(value))
        if budget.is_auto:
            meaning = "from the free memory, see below"
        elif budget.slots:
            meaning = str(budget)
        elif budget.share is not None:
            meaning = f"{budget.share} of the experts"
        else:
            meaning = f"{budget.bytes} bytes"
        assert row["meaning"] == meaning, value


@pytest.mark.parametrize("text", [README, OPTIONS, PRECISION], ids=["README.md", "options.md", "precision.md"])
def test_options_of_the_examples_are_accepted(text):
    examples = re.findall(r'\{"dymoe": (\{[^{}]*(?:\{[^{}]*\})?\})\}', text)
    assert examples
    for example in examples:
        load(json.loads(example))


def test_variables_of_the_examples_are_accepted():
    found = re.findall(r"\b(DYMOE_[A-Z_]+)=(?:'([^']*)'|([^'\s`]+))", OPTIONS)
    variables = {name: quoted or plain for name, quoted, plain in found}
    assert len(variables) >= 5
    for name, value in variables.items():
        resolve_options(environment={"DYMOE_HI": "4", "DYMOE_LO": "2", "DYMOE_SYSTEM": "dymoe"} | {name: value})


def test_the_sentence_of_the_example():
    with pytest.raises(ConfigError) as caught:
        load({"expert_bugdet": "25%"})
    assert f"    {caught.value}\n" in OPTIONS


# -- docs/prefetch.md -----------------------------------------------------------------------------


def test_numbers_of_prefetch():
    least, most = int(pace._JUDGED * pace._LOSES), int(pace._JUDGED * pace._PAYS)
    text = " ".join(PREFETCH.split())
    assert f"of {pace._JUDGED} guesses at least {least} have to be needed" in text
    assert f"more than {most} of {pace._JUDGED} are needed" in text
    assert f"down to one in {pace._LARGEST_INTERVAL}," in text
    assert pace._COSTS_MORE == 2
    assert "below twice the former" in text


def test_architectures_of_the_predictor():
    rows = re.findall(r"^\| (`.*) \|", PREFETCH.split("## A trained predictor")[1].split("## ")[0], re.MULTILINE)
    assert {name for row in rows for name in code(row.split(" |")[0])} == ARCHITECTURES.keys()
    choices = re.search(r"architecture: Annotated\[\s*Literal\[(.*?)\]", APP, re.DOTALL)[1]
    assert re.findall(r'"([^"]+)"', choices) == ["auto", *ARCHITECTURES]


# -- docs/traces.md -------------------------------------------------------------------------------


def test_the_trace_format_is_the_codes():
    tensors = {"header", "domain"} | {code(row["name"])[0] for row in table(TRACES, "tensors")}
    assert tensors == {field.name for field in fields(Trace)}
    (row,) = (line for line in TRACES.splitlines() if line.startswith("| `header` |"))
    assert set(code(row)) == {"header", "format"} | {field.name for field in fields(TraceHeader)}
    assert f"`format` (now {TRACE_FORMAT})" in row


def test_numbers_of_recording():
    assert f"`limit` bytes, {size(TraceOptions(folder='a').limit).replace('.0', '')} if not set" in TRACES
    assert f"after {recorder._INTERVAL:.0f} seconds or {size(recorder._PART_BYTES).replace('.0', '')}" in TRACES


# -- docs/quantized.md ----------------------------------------------------------------------------


def test_every_method_that_is_read():
    rows = table((ROOT / "docs" / "quantized.md").read_text(), "quantized")
    assert tuple(code(row["`quant_method`"])[0] for row in rows) == METHODS


# -- docs/metrics.md ------------------------------------------------------------------------------


def test_the_table_of_metrics():
    rows = table(METRICS_PAGE, "metrics")
    assert [(*code(row["metric"]), row["type"], *code(row["labels"]), row["meaning"]) for row in rows] == [
        (metric.full_name, metric.kind.__name__.lower(), *metric.labels, metric.meaning) for metric in METRICS
    ]


def test_queries_name_metrics_that_exist():
    named = re.findall(r"vllm_dymoe_[a-z_]+(?=\[)", METRICS_PAGE)
    assert named
    assert set(named) <= {metric.full_name for metric in METRICS}


# -- README.md ------------------------------------------------------------------------------------


def tree():
    """Paths that the README's file tree names."""
    block = README.split("<!-- tree:begin -->")[1].split("<!-- tree:end -->")[0]
    paths, folder = [], ""
    for line in block.strip().strip("`").strip().splitlines():
        name, description = line.strip().split(maxsplit=1)
        assert description, f"{name} has no description"
        if line.startswith("  "):
            paths.append(folder + name)
        else:
            folder = name
            paths.append(name)
    return paths


def test_every_path_of_the_tree_exists():
    assert len(tree()) == len(set(tree()))
    for path in tree():
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path


def test_every_package_folder_is_in_the_tree():
    places = PROJECT["tool"]["setuptools"]["package-dir"]
    folders = {places.get(name, name.replace(".", "/")) + "/" for name in PROJECT["tool"]["setuptools"]["packages"]}
    assert folders <= set(tree())


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/format.md",
        "docs/metrics.md",
        "docs/options.md",
        "docs/precision.md",
        "docs/prefetch.md",
        "docs/quantize.md",
        "docs/quantized.md",
        "docs/traces.md",
    ],
)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / path).read_text()):
        assert link.startswith("https://") or ((ROOT / path).parent / link).exists(), f"{path}: {link}"


def test_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in set(re.findall(r"\bmake (demo|test|setup)\b", README)):
        assert re.search(rf"^{command}:.*## ", makefile, re.MULTILINE), command
    app = (ROOT / "vllm_dymoe" / "cli" / "app.py").read_text()
    for command in set(re.findall(r"vllm-dymoe ([a-z]+) [A-Z]", README)):
        assert f"def {command}(" in app, command


def test_worker_methods_of_the_documents_exist():
    worker = (ROOT / "vllm_dymoe" / "vllm_adapter" / "worker.py").read_text()
    named = set(re.findall(r"dymoe_[a-z_]+(?=\")", README + OPTIONS + PRECISION + PREFETCH))
    assert {"dymoe_stats", "dymoe_resize", "dymoe_precision", "dymoe_predictor"} <= named
    for name in named:
        assert f"def {name}(" in worker, name


def test_supported_versions():
    last = f"{NEWEST_VLLM.major}.{NEWEST_VLLM.minor - 1}"
    assert f"vLLM {OLDEST_VLLM} to {last}" in README
    assert PROJECT["project"]["optional-dependencies"]["cuda"] == [f"vllm>={OLDEST_VLLM},<{NEWEST_VLLM}"]


def test_the_demo_has_its_place():
    begin, end = README.index("<!-- demo:begin -->"), README.index("<!-- demo:end -->")
    assert begin < end
    assert README[begin:end].count("\n") >= 2
