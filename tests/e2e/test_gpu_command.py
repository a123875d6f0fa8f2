"""The part of `make gpu` that needs vLLM, with vLLM's CPU build and without a card."""

import pytest

from tests.support.benchmarks import modules_of


@pytest.fixture
def part(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with modules_of("gpu"):
        from parts import engine

        monkeypatch.setattr(engine, "SETTINGS", {"enforce_eager": True})
        monkeypatch.setattr(engine, "GRAPHS", {"off": ("NONE", {}), "on": ("FULL_DECODE_ONLY", engine.DRAFTS)})
        yield engine


@pytest.mark.engine
def test_both_engines_give_the_same_answers(part, tmp_path):
    """On a CPU there are no graphs in either, nor is it worth compiling: the part runs to its end and compares."""
    from record import Found, Recorder

    path = tmp_path / "engine.jsonl"
    part.run(Recorder(path))
    found = Found()
    for line in path.read_text().splitlines():
        found.add(line)
    assert found.wrong == []
    assert [check["name"] for check in found.checks] == [
        "vLLM's engine answers with graphs off, at 100% and 25%",
        "vLLM's engine answers with graphs on, at 100% and 25%",
        "the same answers with graphs as without",
    ]
    assert found.sentences[0].startswith("cudagraph_mode in force was NONE, ")


def test_another_token_or_log_probability_is_named(part):
    answers = [[(7, -0.5), (8, -0.25)], [(9, -1.0)]]
    assert part._differences(answers, answers, "25 %") == []
    assert part._differences([[(7, -0.5), (3, -0.25)], answers[1]], answers, "25 %") == [
        "25 %: prompt 0 has at position 1 token 3 and not 8"
    ]
    assert part._differences([answers[0], [(9, -1.5)]], answers, "25 %") == [
        "25 %: prompt 1 has at position 0 log-probability -1.5 and not -1.0"
    ]
