"""The papers' tables: every row has a source, what can be computed is, and what cannot says why."""

import pytest
import torch

from vllm_dymoe.bench import quality
from vllm_dymoe.bench.cases import Workload
from vllm_dymoe.bench.papers import PAPERS
from vllm_dymoe.bench.papers.dynaexq import activated
from vllm_dymoe.bench.papers.tables import Line, PaperTable, Quality, Speed, cases_of, fill, lines
from vllm_dymoe.cli import paper as paper_command
from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.observe.trace import Trace, expert_dtype
from vllm_dymoe.residency.identity import ModelIdentity
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.systems import make_system
from vllm_dymoe.training import TrainingError

WORKLOAD = Workload("digest", "prompts", False, 2, 1, 8)
EXPECTED = {
    "dymoe": {"Table 1", "Table 2", "Table 3"},
    "duoserve": {"Table 2", "Table 3", "Figure 5", "Figure 6"},
    "firm": {"Table 1", "Table 2"},
    "dynaexq": {f"Table {n}" for n in (1, 2, 4)} | {f"Figure {n}" for n in (1, 3, 6, 7, 8)},
}


@pytest.mark.parametrize("paper", PAPERS)
def test_a_preset_has_every_table_and_its_options_can_be_served(paper):
    tables = list(PAPERS[paper]())
    assert {table.name for table in tables} == EXPECTED[paper]
    for line in (line for table in tables for line in table.lines):
        assert set(line.paper) <= {name for table in tables for name in table.columns}
        if isinstance(line.ours, str):
            assert line.ours.endswith("."), line
        elif isinstance(line.ours, Quality):
            resolve_options(line.ours.options, environment={})
        elif isinstance(line.ours, Speed):
            assert line.ours.subject.options is not None
    for case in cases_of(tables, "m", WORKLOAD, {}, lambda subject: subject):
        resolve_options({**case.subject.options, "expert_budget": case.budget}, environment={})


HEADER = ModelIdentity("m", "f", 5, 8, 2, 16)


@pytest.fixture(scope="module")
def recorded():
    """Six requests of four tokens and six more, which are routed at random."""
    chosen = torch.rand(60, 5, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices
    return Trace(
        HEADER, chosen.to(expert_dtype(8)), torch.full((60, 5, 2), 0.5).half(),
        request=torch.arange(60).int() // 10, position=torch.arange(60).int() % 10,
        prefill=torch.arange(60) % 10 < 4,
    )  # fmt: skip


def test_experts_of_a_batch(recorded):
    assert activated(recorded, 1, prefill=False) == 25
    assert 25 < activated(recorded, 4, prefill=False) < 100
    assert activated(recorded, 1, prefill=True) > 25
    assert activated(recorded, 8, prefill=False) is None


def test_the_network_of_a_preset_learns_from_requests_that_are_not_measured(recorded, tmp_path, monkeypatch):
    learned = []
    monkeypatch.setattr(paper_command, "write", lambda trace, *_, **__: learned.append(trace.request.unique().tolist()))
    paper_command.train(recorded, 4, tmp_path)
    assert learned == [[4, 5]]
    with pytest.raises(TrainingError, match="none of the prompts is left to learn from behind 6 that are measured"):
        paper_command.train(recorded, 6, tmp_path)


def test_quality_is_that_of_the_choice_and_not_of_what_happens_to_be_resident():
    """Everything fits where quality is measured; a system that may reuse would compute every expert high there."""
    rows = [line.ours for table in PAPERS["dymoe"]() for line in table.lines if isinstance(line.ours, Quality)]
    systems = [make_system(Options(**row.options)) for row in rows if row.options.get("system") == "dymoe"]
    assert len(systems) == 12
    assert not any(system.precision.reuses_high for system in systems)


def test_numbers_stand_beside_the_papers_and_missing_ones_say_why():
    moved = {"exposed_wait_seconds": 0.3, "bytes_moved": {"demand": 60_000_000}}
    measured = {"ttft_ms": {"median": 5188.4e3}, "tpot_ms": {"mean": 50.0}, "decode_tokens": 10}
    row = {"measured": measured | {"decode": moved}, "options": {"link_gbps": 0.15}}

    def broken(recorded):
        raise ValueError("no gates")

    def shown(table):
        found = [fill(line, lambda *_: row, lambda: None, lambda source: "no lm-eval.") for line in table.lines]
        return lines(table, found)

    table = next(table for table in PAPERS["dymoe"]() if table.name == "Table 3")
    head, body, notes = shown(table)
    assert head[1:3] == ["16 GB TTFT s, paper", "16 GB TTFT s, ours"]
    assert body[0][1:5] == ["1.019", "5,188", "0.2795", "0.05"]
    assert notes == []
    # 20 ms of computation, 40 of the link, of which 10 were hidden.
    assert body[-1] == ["bound: all of 2 overlaps", *[""] * 3, "0.0400 (1.50 times)", *[""] * 3, "0.0400 (1.50 times)"]
    missing = [Line("a", "not here.", {"x": None, "y": "-"}), Line("b", broken), Line("c", Quality({}, {"x": "mmlu"}))]
    head, body, notes = shown(PaperTable("Table", "", ("x", "y"), missing))
    assert (head, body) == (["", "y, paper"], [["a", "-"], ["b", ""], ["c", ""]])
    assert notes == ["a: not here.", "b: no gates.", "c: no lm-eval."]
    assert shown(next(iter(PAPERS["dymoe"]())))[2] == ["All rows: no lm-eval."]


FAKE = """
import json, os, pathlib, sys
from vllm_dymoe.systems import SYSTEMS
assert os.environ.get("DYMOE_SYSTEM", "exact") in SYSTEMS
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
tasks = given["--tasks"].split(",")
assert os.environ["DYMOE_HI"] == "4", os.environ
if "broken" in tasks: sys.exit("no such task")
out = pathlib.Path(given["--output_path"]) / "m"; out.mkdir()
(out / "results_1.json").write_text(json.dumps({"results": {task: {"acc,none": 0.25} for task in tasks}}))
with open(os.environ["COUNT"], "a") as file: file.write("x")
"""


@pytest.fixture
def lm_eval(tmp_path, monkeypatch):
    (tmp_path / "lm_eval.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    return tmp_path


def test_a_cell_is_scored_once(lm_eval):
    for _ in range(2):
        row = quality.score("m", {"hi": 4, "system": "dymoe"}, ["a", "b"], lm_eval / "out", limit=3)
        assert row["scores"] == {"a": 0.25, "b": 0.25}
    quality.score("m", {"hi": 4, "system": "compared"}, ["a"], lm_eval / "out")
    assert (lm_eval / "count").read_text() == "xx"


def test_a_task_that_fails_shows_its_log(lm_eval):
    with pytest.raises(ConfigError, match="no such task"):
        quality.score("m", {"hi": 4}, ["broken"], lm_eval / "out")
    with pytest.raises(ConfigError, match="says of a only"):
        quality.read_scores({"results": {"a": {"bleu,none": 1}}}, ["a"])
