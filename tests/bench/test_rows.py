"""The benchmark's cases, their keys and groups, its rows on disk, and refusals."""

import json
from pathlib import Path

import pytest

from tests.cli.checkpoints import make_model
from vllm_dymoe.bench import run
from vllm_dymoe.bench.cases import Subject, Workload, grid, groups, subject_of
from vllm_dymoe.bench.prompts import PromptSet
from vllm_dymoe.bench.rows import ROWS, OutputsDifferError, append_row, check_outputs, read_rows
from vllm_dymoe.cli.bench import Bench
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan import machine

WORKLOAD = Workload("digest", "prompts", False, 2, 1, 8)


def cases(*policies, budgets=("25%", "50%"), batches=(1,)):
    return grid("model", [subject_of(policy, {}) for policy in policies], budgets, batches, WORKLOAD, {})


def test_a_grid_has_every_combination_once_and_full_load():
    found = cases("exact", "on-demand", "exact", batches=(1, 4))
    assert len(found) == len({case.key for case in found}) == 2 * 2 * 2 + 2
    assert [case.batch for case in found if case.budget == "100%"] == [1, 4]


def test_full_load_is_measured_first_and_an_engine_once():
    found = [[case.budget for case in group] for group in groups(cases("on-demand", "exact"))]
    assert found[0] == ["100%"]
    assert sorted(found[1:]) == [["25%", "50%"], ["25%", "50%"]]


@pytest.mark.parametrize(
    ("policy", "fixed"),
    [
        ("exact", True),
        ("firm", True),
        ('{"policy": "dymoe", "low": 2}', False),
    ],
)
def test_only_what_serves_one_precision_has_to_answer_alike(policy, fixed):
    found = {case.fixed_precision for case in cases(policy) if case.budget != "100%"}
    full = {case.fixed_precision for case in cases(policy) if case.budget == "100%"}
    assert (found == full) is fixed


def test_dense_layers_of_fewer_bits_are_another_precision_with_a_full_load_of_its_own():
    found = cases("exact", '{"label": "packed", "policy": "exact", "dense": 8}', budgets=("25%",))
    assert len({case.fixed_precision for case in found}) == 2
    assert [case.subject.label for case in found if case.budget == "100%"] == [
        "full load, 4 bits",
        "full load, 4 bits, dense 8",
    ]


@pytest.mark.parametrize("policy", ["nothing", "{", '{"policy": "exact", "expert_budget": 1}', '{"low": 3}'])
def test_policies_that_cannot_be_served_are_refused_before_anything_starts(policy):
    with pytest.raises(ConfigError):
        subject_of(policy, {})


def test_a_row_that_a_kill_has_cut_is_measured_again(tmp_path):
    path = tmp_path / "rows"
    append_row(path, {"key": "a"})
    with path.open("a") as stream:
        stream.write('{"key": "b", "measu')
    assert [row["key"] for row in read_rows(path)] == ["a"]
    append_row(path, {"key": "c"})
    assert [row["key"] for row in read_rows(path)] == ["a", "c"]


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "rows").write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_rows(tmp_path / "rows")


def test_a_run_goes_on_with_the_rows_that_are_missing(tmp_path, monkeypatch):
    found = cases("exact", "on-demand")
    started = []

    def answer(job, folder):
        started.append([case["key"] for case in job["cases"]])
        for case in job["cases"][: 1 if len(started) == 2 else None]:
            append_row(folder / ROWS, case)
        if len(started) == 2:
            raise ConfigError("killed")

    monkeypatch.setattr(run, "run_job", answer)
    monkeypatch.setattr(run, "machine", dict)
    with pytest.raises(ConfigError, match="killed"):
        run.measure(found, PromptSet("prompts"), tmp_path)
    rows = run.measure(found, PromptSet("prompts"), tmp_path)
    assert [row["key"] for row in rows] == [case.key for case in found]
    assert started[2] == started[1][1:]
    assert sum(map(len, started)) == len(found) + 1


def test_an_engine_that_fails_shows_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ENGINE", "no_such_module")
    job = {"label": "mine", "cases": [{"key": "k"}]}
    with pytest.raises(ConfigError, match=r"(?s)mine .*No module named"):
        run.run_job(job, tmp_path)


def row(label, outputs, precision="p"):
    said = {"label": label, "budget": "25%", "batch": 1, "fixed_precision": precision}
    return json.loads(json.dumps({**said, "measured": {"outputs": outputs}}))


def test_answers_of_one_precision_are_compared():
    rows = [row("a", ["x", "y"]), row("b", ["x", "y"]), row("other", ["z", "z"], "q"), row("peer", ["?"], None)]
    assert check_outputs(rows) == 2


@pytest.mark.parametrize("outputs", [["x", "z"], ["x"]])
def test_nothing_is_reported_where_they_differ(outputs):
    with pytest.raises(OutputsDifferError, match=r'"b" at 25% and "a".*request 2 of 2'):
        check_outputs([row("a", ["x", "y"]), row("b", outputs)])


def test_subjects_differ_by_what_is_served_and_not_by_their_label():
    one, other = (Subject(label, {"policy": "exact"}) for label in ("a", "b"))
    assert len(grid("model", [one, other], ["25%"], [1], WORKLOAD, {})) == 2
    peers = [Subject(name, peer=name) for name in ("a", "b")]
    assert len(grid("model", peers, ["its own"], [1], WORKLOAD, {})) == 2
    assert {case.budget for case in cases("duoserve")} == {"top-k", "100%"}, "a budget of its own"


def of_bench(model):
    workload = Workload("digest", "prompts", False, 2, 1, 8)
    return Bench(str(model), PromptSet("prompts"), workload, {}, {}, Path("out"))


def test_rows_of_other_conditions_are_other_rows(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")
    model.config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    model.save()
    seen = [of_bench(model.folder).conditions]
    assert of_bench(model.folder).conditions == seen[0]
    monkeypatch.setenv("DYMOE_HIGH", "8")
    seen.append(of_bench(model.folder).conditions)
    monkeypatch.setattr(machine, "__version__", "another")
    seen.append(of_bench(model.folder).conditions)
    next(iter(model.tensors.values())).add_(1)
    model.save()
    seen.append(of_bench(model.folder).conditions)
    monkeypatch.setattr(machine, "storage_of", lambda folder: "another machine")
    seen.append(of_bench(model.folder).conditions)
    assert len(set(seen)) == len(seen)
    keys = {case.key for at in seen for case in grid("m", [Subject("a", {})], ["25%"], [1], WORKLOAD, {}, at)}
    assert len(keys) == 2 * len(seen)
    assert len(set(map(run.machine_key, seen))) == len(seen), "and the machine's rates"
