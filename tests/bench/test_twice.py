"""Rows of benchmarks that are measured in two runs, of which the faster one counts."""

import pytest

from tests.support.benchmarks import modules_of
from vllm_dymoe.bench.rows import append_row, read_rows


@pytest.fixture(scope="module")
def twice():
    with modules_of("budget"):
        from budget import twice

        yield twice


class Bench:
    """Writes what its folder lacks; the next time of each row is the next of its list."""

    def __init__(self, **times):
        self.times = {name: iter(list_) for name, list_ in times.items()}
        self.measured = []

    def __call__(self, folder):
        path = folder / "rows.jsonl"
        known = {row["key"] for row in read_rows(path)}
        if "machine" not in known:
            append_row(path, {"key": "machine", "kind": "machine", "reaches": next(self.times["machine"])})
        for name in sorted(self.times.keys() - known - {"machine"}):
            mean = next(self.times[name])
            label = "full load, 4 bits" if name == "full" else name
            append_row(path, {"key": name, "kind": "speed", "label": label, "measured": {"tpot_ms": {"mean": mean}}})
            self.measured.append(name)
        (folder / "table.md").write_text(str(len(read_rows(path))))


def kept(out):
    return {
        row["key"]: row.get("reaches") or row["measured"]["tpot_ms"]["mean"] for row in read_rows(out / "rows.jsonl")
    }


def test_the_faster_run_of_each_row_counts(twice, tmp_path):
    bench = Bench(machine=[7], exact=[30.0, 20.0], cache=[10.0, 40.0], full=[6.0, 5.0])
    twice(bench, tmp_path)
    assert kept(tmp_path) == {"machine": 7, "exact": 20.0, "cache": 10.0, "full": 5.0}
    assert [
        row["measured"]["tpot_ms"]["runs"] for row in read_rows(tmp_path / "rows.jsonl") if row["key"] == "cache"
    ] == [[10.0, 40.0]]
    assert (tmp_path / "table.md").read_text() == "4"
    twice(bench, tmp_path)  # everything is there: nothing is left to be taken
    assert len(bench.measured) == 6
