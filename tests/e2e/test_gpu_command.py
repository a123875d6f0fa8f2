"""The part of `make gpu` that needs vLLM, without a card on vLLM's CPU build."""

import pytest
import vllm

from tests.e2e.full_replays import replayed_steps
from tests.kernels.host_card import Inline
from tests.support.benchmarks import modules_of

NAMES = "off", "over whole steps"
"""Checks of the graphs. Those with drafts run, too; those with compiled pieces need a compiled model."""


@pytest.fixture
def part(monkeypatch):
    """Return the engine part of `make gpu`, set up to run in this process.

    As on a card, the device plans, and decode steps are captured at their first run.
    """
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    original = vllm.LLM
    with modules_of("gpu"), replayed_steps() as seen:
        from parts import engine

        def start(**settings):
            settings["additional_config"]["dymoe"] |= {"planning": "device", "host_store": "pinned"}
            settings["compilation_config"]["mode"], seen.replaying = 0, False
            llm = original(**settings)
            seen.replaying = True
            return llm

        monkeypatch.setattr(vllm, "LLM", start)
        monkeypatch.setattr(engine, "ProcessPoolExecutor", Inline)
        monkeypatch.setattr(engine, "SETTINGS", {})
        monkeypatch.setattr(engine, "NEW_TOKENS", 8)
        monkeypatch.setattr(engine, "GRAPHS", {name: engine.GRAPHS[name] for name in NAMES})
        engine.seen = seen
        yield engine


@pytest.mark.engine
def test_every_line_but_those_of_a_card_runs(part, tmp_path):
    """All checks pass, at both budgets.

    They ask one request, several together, three that fill a graph for four, and one that arrives late.
    """
    from record import Found, Recorder

    path = tmp_path / "engine.jsonl"
    part.run(Recorder(path))
    found = Found()
    for line in path.read_text().splitlines():
        found.add(line)
    assert found.wrong == []
    names = [f"vLLM's engine answers with graphs {name}, at 100% and 25%" for name in NAMES]
    assert [check["name"] for check in found.checks] == [*names, "the same answers with graphs as without"]
    assert found.sentences == ["cudagraph_mode in force was NONE, FULL_DECODE_ONLY."]
    assert set(part.seen.captures) == {1, part.BATCH}
    assert part.seen.replays > 3 * part.NEW_TOKENS
    assert part.seen.moved == 0


def test_another_token_or_log_probability_is_named(part):
    answers = [[(7, -0.5), (8, -0.25)], [(9, -1.0)]]
    assert part._differences(answers, answers, "25 %") == []
    assert part._differences([[(7, -0.5), (3, -0.25)], answers[1]], answers, "25 %") == [
        "25 %: prompt 0 has at position 1 token 3 and not 8"
    ]
    assert part._differences([answers[0], [(9, -1.5)]], answers, "25 %") == [
        "25 %: prompt 1 has at position 0 log-probability -1.5 and not -1.0"
    ]
