"""The documents match the code: tables, links, and examples run as printed.

No test quotes a sentence of the documents; reviewers check those.
"""

import ast
import importlib
import json
import re
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import typer

from vllm_dymoe import register
from vllm_dymoe.cache.store import STORE_VERSION, Manifest
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.cache.store.header import read_header
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.cli.app import app
from vllm_dymoe.experts.encoding import NESTED, encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, Projection, SliceKey, stored_formats
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize, pack, pack_nested
from vllm_dymoe.options import Options
from vllm_dymoe.quantize.convert import quantization_config
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.trace.trace import Trace
from vllm_dymoe.vllm_plugin.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
DOCS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
TEXTS = DOCS | {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [
        *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/LOG.md")),
        *ROOT.glob("benchmarks/*/README.md"),
    ]
}
ALL = "\n".join(DOCS.values())
FORMAT = DOCS["docs/format.md"]

ROW, COLUMN, GROUP_SIZE = 99, 50, 32
BFLOAT16 = torch.bfloat16
MODEL = json.loads((ROOT / "benchmarks" / "tiny_moe" / "model" / "config.json").read_text())


def table(text, marker):
    """Return the rows of the table after ``<!-- marker -->``, as dictionaries."""
    lines = iter(text.split(f"<!-- {marker} -->", 1)[1].strip().splitlines())
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split(" |")])
    header, _, *body = rows
    return [dict(zip(header, row, strict=True)) for row in body]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def example_matrix(bits):
    return MatrixFormat(100, 70, encoding_of(bits), GROUP_SIZE, BFLOAT16)


@pytest.fixture(scope="module")
def generator():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("docs")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize("page", DOCS)
def test_generated_tables_are_current(page, generator):
    assert generator.generated(DOCS[page]) == DOCS[page], f"{page} is not what the code says; run make docs"


def anchors(text):
    """Return the anchors that GitHub makes from a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]) + re.findall(r'(?:src|srcset)="([^"]+)"', TEXTS[page])
    for link in links:
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target.read_text()), f"{page}: {link}"


def test_places_in_the_code_exist():
    """The architecture page writes ``path.py::Class.name``, and later ``Class.name``."""
    page = DOCS["docs/architecture.md"]
    classes = {}
    found = re.findall(r"`([\w/]+\.(?:py|h))(?:::([\w.]+))?`", page)
    assert len(found) > 20
    for path, name in found:
        file = next((root / path for root in (ROOT / "vllm_dymoe", ROOT) if (root / path).is_file()), None)
        assert file is not None, f"{path} does not exist"
        names = definitions(file)
        assert not name or name in names, f"{path} has no {name}"
        classes |= {other: file for other in names if "." not in other}
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", page):
        assert owner in classes, f"no file is named for {owner}"
        assert f"{owner}.{name}" in definitions(classes[owner]), f"{owner} has no {name}"


def definitions(path):
    if path.suffix == ".h":
        return set(re.findall(r"^\S.*?\b(\w+)\(", path.read_text(), re.MULTILINE))
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {f"{node.name}.{name}" for inner in node.body for name in bound(inner)}
        names |= set(bound(node))
    return names


def bound(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def objects(text):
    return [json.JSONDecoder().raw_decode(text, at.start())[0]["dymoe"] for at in re.finditer(r'\{"dymoe": ', text)]


@pytest.mark.parametrize("page", [page for page in DOCS if '{"dymoe": ' in DOCS[page]])
def test_options_of_the_examples_are_accepted(page):
    for example in objects(DOCS[page]):
        resolve_options(example, environment={})


def test_variables_of_the_examples_are_accepted():
    one = r"\b(DYMOE_[A-Z_]+)=(?:'([^']*)'|([^'\s`]+))"
    commands = re.finditer(rf"(?:{one}[\s\\]*)+", "\n".join(TEXTS.values()))
    found = [re.findall(one, command[0]) for command in commands]
    assert sum(map(len, found)) >= 5
    assert max(map(len, found)) >= 3
    for variables in found:
        environment = {name: quoted or plain for name, quoted, plain in variables}
        resolve_options(environment={"DYMOE_HIGH": "4", "DYMOE_LOW": "2"} | environment)


@pytest.mark.parametrize("page", [page for page in DOCS if "```python" in DOCS[page]])
def test_python_of_the_examples_compiles_and_imports(page):
    for block in re.findall(r"```python\n(.*?)```", DOCS[page], re.DOTALL):
        tree = ast.parse(block)
        modules = {"vllm_dymoe": importlib.import_module("vllm_dymoe")}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("vllm_dymoe"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                assert hasattr(modules[node.value.id], node.attr)


def test_worker_methods_of_the_examples_exist():
    worker = definitions(ROOT / "vllm_dymoe" / "vllm_plugin" / "worker.py")
    named = set(re.findall(r"[\"`](dymoe_[a-z_]+)[\"`]", ALL)) - {"dymoe_domain"}
    assert {"dymoe_stats", "dymoe_resize", "dymoe_precision"} <= named
    assert {f"DymoeWorkerExtension.{name}" for name in named} <= worker


def command_lines(program):
    """Return commands from code blocks that start with ``program``.

    Variables before the program are cut off, and continued lines are joined.
    """
    blocks = [
        block for page in TEXTS.values() for block in re.findall(r"```(?:console|bash)?\n(.*?)```", page, re.DOTALL)
    ]
    joined = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    plain = [re.sub(r"^(?:[A-Z_]+=(?:'[^']*'|\S+) +)+", "", line) for line in joined]
    return sorted({line for line in plain if line.startswith(f"{program} ")})


@pytest.mark.parametrize("line", command_lines("vllm-dymoe"))
def test_commands_of_the_examples_are_accepted(line):
    _, name, *arguments = shlex.split(line, comments=True)
    command = typer.main.get_command(app).commands[name]
    assert command.make_context(name, arguments).params


@pytest.fixture(scope="module")
def serve_parser():
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # vLLM before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    register()
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("line", command_lines("vllm serve"))
def test_vllm_serve_of_the_examples_is_accepted_by_vllm(line, serve_parser):
    found = serve_parser.parse_args(shlex.split(line, comments=True)[2:])
    assert found.model_tag
    if found.additional_config:
        resolve_options(found.additional_config["dymoe"], environment={})


@pytest.mark.parametrize("line", command_lines("python"))
def test_scripts_of_the_examples_exist_with_their_options(line):
    _, script, *arguments = shlex.split(line, comments=True)
    text = (ROOT / script).read_text()
    for argument in arguments:
        assert not argument.startswith("--") or f'"{argument}"' in text, f"{script} has no {argument}"


@pytest.mark.parametrize("page", [page for page in TEXTS if "```json" in TEXTS[page]])
def test_json_of_the_examples_are_options(page):
    for block in re.findall(r"```json\n(.*?)```", TEXTS[page], re.DOTALL):
        assert [resolve_options(found, environment={}) for found in given_options(json.loads(block))]


def given_options(value):
    """Return the values of each key ``dymoe``, at any depth."""
    if isinstance(value, list):
        return [found for item in value for found in given_options(item)]
    if not isinstance(value, dict):
        return []
    own = [value["dymoe"]] if "dymoe" in value else []
    return own + [found for key, item in value.items() if key != "dymoe" for found in given_options(item)]


def test_every_page_is_on_the_site():
    named = set(re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert set(TEXTS) <= named
    assert all((ROOT / name).is_file() for name in named)


@pytest.fixture(scope="module")
def figures():
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("figures")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("palette", ["light", "dark"])
def test_pictures_are_of_the_committed_results(palette, figures):
    for name, sources in (("speed", (figures.BUDGET, figures.TIERS)), ("gpu", (figures.GPU,))):
        picture = (figures.IMAGES / f"{name}-{palette}.svg").read_text()
        assert figures.digest(*sources) in picture, "run make figures"


def test_tables_are_of_the_committed_results():
    budget = json.loads((ROOT / "benchmarks" / "budget" / "results.json").read_text())
    page = TEXTS["benchmarks/budget/README.md"]
    for row in budget["rows"]:
        assert re.search(
            rf"^\| {re.escape(row['policy'])} \| {row['budget']} \|.* {row['tokens/s']:.2f} \|", page, re.M
        ), row
    tiers = json.loads((ROOT / "benchmarks" / "memory_tiers" / "results.json").read_text())
    page = TEXTS["benchmarks/memory_tiers/README.md"]
    for name, run in tiers["runs"].items():
        assert f"| {name} | {run['one']['tokens_per_second']:.1f} |" in page


def test_make_commands_of_the_texts_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", "\n".join(TEXTS.values()), re.MULTILINE))
    assert {"demo", "test", "gpu", "docs"} <= named <= targets


def test_queries_name_metrics_that_exist():
    named = set(re.findall(r"vllm_dymoe_[a-z_]+(?=\[)", ALL))
    assert named
    assert named <= {metric.full_name for metric in METRICS}


DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "dymoe.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
LABELS = {metric.full_name: {*metric.labels} for metric in METRICS}


def test_queries_of_the_dashboard_name_metrics_and_labels_that_exist():
    queries = [target["expr"] for target in TARGETS]
    assert set(re.findall(r"\bvllm_dymoe_\w+", " ".join(queries))) == set(LABELS), "every metric is on it"
    for query in queries:
        for name, selector in re.findall(r"\b(vllm_dymoe_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=~?\"", selector)) <= LABELS[name], query
        grouped = re.findall(r"by \(([^)]*)\)", query)
        grouped = {label.strip() for group in grouped for label in group.split(",")} - {"le"}
        assert all(grouped <= LABELS[name] for name in re.findall(r"\bvllm_dymoe_\w+", query)), query
        assert query.count("(") == query.count(")")


def test_legends_of_the_dashboard_name_labels_that_a_query_keeps():
    for target in TARGETS:
        kept = re.findall(r"by \(([^)]*)\)", target["expr"])
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert not kept or any(label in group for group in kept), target


def test_fields_of_the_formats():
    tensors = {code(row["name"])[0] for row in table(DOCS["docs/traces.md"], "tensors")}
    assert tensors | {"header", "gates"} == {field.name for field in fields(Trace)}
    manifest = table(FORMAT, "fields: manifest")
    assert [code(row["field"])[0] for row in manifest] == list(shipped_manifest().to_json())
    sentence = FORMAT.split("<!-- fields: quantization_config -->\n", 1)[1].splitlines()[0]
    assert code(sentence)[1:] == list(quantization_config(Options()))
    (row,) = table(FORMAT, "version")
    assert int(row["version of this page"]) == STORE_VERSION


def example_values(format):
    """Return the example's codes, scales and zero points."""
    codes = torch.zeros(format.rows, format.columns, dtype=torch.uint8)
    scales, zeros = torch.zeros(2, format.rows, -(-format.columns // GROUP_SIZE))
    codes[ROW, COLUMN], scales[ROW, COLUMN // GROUP_SIZE], zeros[ROW, COLUMN // GROUP_SIZE] = 11, 0.5, -0.25
    return codes, scales, zeros


def test_bytes_of_the_example_whole_and_in_two_halves():
    format = example_matrix(4)
    section = torch.zeros(format.nbytes, dtype=torch.uint8)
    pack(format, *example_values(format), section)
    assert float(dequantize(format.view(section))[ROW, COLUMN]) == 1.25
    rows = table(FORMAT, "example: bytes")
    assert {int(row["byte"]): int(row["value"], 0) for row in rows} == {
        i: int(section[i]) for i in section.nonzero().flatten().tolist()
    }
    format = replace(format, encoding=NESTED[4])
    base, residual = (torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (format.base.nbytes, format.nbytes))
    pack_nested(format, *example_values(format), base, residual)
    low = format.base.view(base)
    assert (base[:3072].nonzero().item(), residual.nonzero().item()) == (2115, 2115)
    assert float(dequantize(low)[ROW, COLUMN]) == 0.5
    assert float(dequantize(format.view(residual, low))[ROW, COLUMN]) == 1.25


def test_the_formulas_of_places_hold_everywhere():
    """Write the table's formulas in Python, and compare with the packer."""
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


def packed_format(bits):
    return ExpertFormat(MODEL["hidden_size"], MODEL["moe_intermediate_size"], encoding_of(bits), 64, BFLOAT16)


def shipped_manifest():
    formats = stored_formats((4, 2), packed_format)
    experts = ModelExperts((0,), MODEL["num_experts"], MODEL["num_experts_per_tok"], formats)
    return Manifest(experts, "rtn", "0" * 16)


def test_a_shard_of_the_shipped_model(tmp_path):
    shards = StoreWriter(tmp_path / "store", shipped_manifest())
    section = torch.full((shipped_manifest().experts.formats[4].matrices[1].nbytes,), 0xEE, dtype=torch.uint8)
    shards.write(SliceKey(0, 5, 4), Projection.UP, section)
    shards.finish()
    path = tmp_path / "store" / file_name(0)
    with path.open("rb") as file:
        places = read_header(path, file.fileno())
    rows = table(FORMAT, "example: shard")
    assert [code(row["tensor"])[0] for row in rows] == list(places)
    for row, place in zip(rows, places.values(), strict=True):
        assert json.loads(row["shape"]) == list(place.shape)
        assert [int(row["first byte in the file"]), int(row["end"])] == [place.begin, place.end]


def messages_of(source):
    """Yield the strings of a module.

    ``...`` stands for each formatted value.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_in_troubleshooting_exist_in_the_code():
    """Each quoted message is a part of one in the code.

    With ``...`` between its parts, they must occur in one message in this order.
    """
    messages = [text for path in ROOT.glob("vllm_dymoe/**/*.py") for text in messages_of(path.read_text())]
    rows = [
        row for row in DOCS["docs/troubleshooting.md"].split("## It is slow")[0].splitlines() if row.startswith("| `")
    ]
    assert len(rows) > 30
    for phrase in (phrase for row in rows for phrase in code(row.split(" | ")[0])):
        pattern = re.compile(".*".join(map(re.escape, phrase.split("..."))))
        assert any(pattern.search(message) for message in messages), phrase
