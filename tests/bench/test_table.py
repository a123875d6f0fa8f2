"""The table of a benchmark, computed from the times of tokens."""

import pytest

from vllm_dymoe.bench.summary import Answers, distribution, side_by_side, summarise
from vllm_dymoe.bench.table import Bounds, for_terminals, lines
from vllm_dymoe.cli.display import print_table

COUNTED = {
    "hits": 30, "misses": 10, "bytes_moved": {"demand": 6e6, "prefetch": 2e6}, "resident_experts": {"high": 3},
    "peak_expert_bytes": 5_000_000, "budget_bytes": 6_000_000, "predictor_bytes": 0, "prefetch_interval": {},
}  # fmt: skip


def answers(**changes):
    return Answers(**({
        "first": [0.1, 0.2], "between": [0.01, 0.03, 0.02, 0.02], "seconds": 0.3,
        "lengths": [3, 3], "since": 0.2, "decoded": 4, "outputs": ["a", "b"], "decode": COUNTED,
    } | changes))  # fmt: skip


def test_engines_beside_each_other_are_one_round_as_long_as_the_slowest():
    slow = {"first": [0.25], "between": [0.05, 0.05], "seconds": 0.5, "since": 0.25, "decoded": 2}
    ours, theirs = answers(), answers(**slow, lengths=[3], outputs=["c"])
    (both,) = side_by_side([[ours], [theirs]])
    assert (both.seconds, both.first, both.outputs) == (0.5, [0.1, 0.2, 0.25], ["a", "b", "c"])
    found = summarise([both])
    assert found["decode_tokens_per_second"] == pytest.approx(6 / 0.3)
    assert (found["decode"]["hits"], found["decode"]["resident_experts"]) == (60, {"high": 6})
    assert side_by_side([[ours, theirs]]) == [ours, theirs]
    assert side_by_side([[answers(decode={})]] * 2)[0].decode == {}, "of a peer nothing is counted"


def row(label, measured, **changes):
    return {
        "kind": "speed", "label": label, "budget": "25%", "batch": 2, "options": {"high": 4}, "measured": measured,
        "workload": {"random": False},
    } | changes  # fmt: skip


def test_a_distribution_is_in_milliseconds():
    found = distribution([0.001 * n for n in range(1, 101)])
    assert (found["median"], found["p99"], found["count"]) == (pytest.approx(50.5), pytest.approx(99), 100)
    assert distribution([4, 2, 1, 3])["p99"] == 4000, "a value that occurs"


def test_counts_add_up_and_sizes_do_not():
    found = summarise([answers(), answers(outputs=["c", "d"])])
    assert found["decode"]["bytes_moved"] == {"demand": 12e6, "prefetch": 4e6}
    assert found["decode"]["hit_rate"] == 0.75
    assert found["decode"]["resident_experts"] == {"high": 3}
    assert found["decode_tokens_per_second"] == pytest.approx(8 / 0.2)
    assert found["outputs"] == ["a", "b", "c", "d"]


def test_tokens_before_the_last_first_token_are_no_decoded_ones():
    found = summarise([answers(between=[0.01] * 6)])
    assert (found["decode_tokens"], found["tpot_ms"]["count"]) == (4, 6)
    assert found["decode_tokens_per_second"] == pytest.approx(4 / 0.1)


def test_every_share_is_of_what_it_says():
    measured = summarise([answers()]) | {"peak_device_bytes": 9e6}
    fast = {**measured, "decode_tokens_per_second": 2 * measured["decode_tokens_per_second"]}
    bounds = Bounds(link=1e9, memory=1e9, token_bytes={(4, 16): 1e7, (4, 8): 5e6}, expert_bytes={4: 2_000_000})
    cells, _ = lines([row("exact", measured), row("full load, 4 bits", fast)], bounds)
    assert cells["of full load"] == "50%"
    assert cells["hits"] == "75.0%"
    assert cells["resident MB"] == "6.0"
    assert cells["demand MB/token"] == "1.5"
    assert cells["ahead"] == "0.5"
    assert cells["link used"] == "8%"  # 8 MB in 0.1 s over a link of 1 GB/s
    assert cells["memory used"] == "", "of a batch"
    (cells,) = lines([row("exact", measured, batch=1)], bounds)
    assert cells["memory used"] == "50%"  # 10 MB in 20 ms
    (cells,) = lines([row("exact", measured, batch=1, options={"high": 4, "dense": 8})], bounds)
    assert cells["memory used"] == "25%", "8-bit dense layers are half as large"


def test_a_row_is_compared_with_the_full_load_of_its_own_precision():
    measured = summarise([answers()]) | {"peak_device_bytes": 9e6}
    rate = measured["decode_tokens_per_second"]
    loads = [{}, {"dense": 8}, {"high": 8}, {"group_size": 32}]
    rows = [
        row(f"full load {number}", {**measured, "decode_tokens_per_second": rate * (number + 1)}, options=options)
        for number, options in enumerate(loads)
    ]  # fmt: skip
    rows += [row("exact", measured, options={**options, "host_store": "pinned"}) for options in loads]
    cells = lines(rows, Bounds())
    assert [line["of full load"] for line in cells] == ["100%"] * 4 + ["100%", "50%", "33%", "25%"]


def test_an_emulated_link_is_the_bound_and_random_prompts_have_no_hits():
    measured = summarise([answers()]) | {"peak_device_bytes": 9e6}
    said = {"options": {"high": 4, "link_gbps": 0.1}, "workload": {"random": True}}
    (cells,) = lines([row("exact", measured, **said)], Bounds(1e9, 1e9))
    assert (cells["hits"], cells["link used"]) == ("random", "80%")


def test_a_peer_has_no_counters():
    measured = summarise([answers(decode={})]) | {"peak_device_bytes": 9e6}
    (cells,) = lines([row("vllm", measured, options=None)], Bounds(1e9, 1e9))
    assert (cells["hits"], cells["experts peak MB"], cells["device peak MB"]) == ("", "", "9")


def test_both_tables_fit_a_terminal_of_80_columns_without_a_broken_word(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    measured = summarise([answers()]) | {"peak_device_bytes": 4.57e11}
    rows = [
        row("full load, 4 bits, dense 8", measured, budget="100%"),
        row("on-demand, misses share", measured, batch=16),
    ]
    body = lines(rows, Bounds(link=1e9, memory=1e9, token_bytes={(4, 16): 1e6}, expert_bytes={4: 10**9}))
    for columns in for_terminals(body):
        print_table("", columns, [[line[name] for name in columns] for line in body])
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        assert {word for name in columns for word in name.split()} <= set(printed.split())
        assert {cell for line in body for name in columns for cell in line[name].split()} <= set(printed.split())
