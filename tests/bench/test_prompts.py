"""Prompts in every format that serving benchmarks use."""

import json

import pytest

from vllm_dymoe.bench.prompts import Prompt, by_turns, read_prompts
from vllm_dymoe.options import ConfigError

SHAREGPT = [
    {"id": "a", "conversations": [{"from": "gpt", "value": "Hello."}, {"from": "human", "value": "Why?"}]},
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "user", "value": "How?"}]},
]
SPEC = [{"question_id": 1, "category": "writing", "turns": ["First", "Second"]}]
CUSTOM = [
    {"prompt": "One", "output_tokens": 7},
    {"prompt": "Two\nlines", "domain": "code"},
    {"prompt": "3", "domain": None},
]


def json_lines(entries):
    return "\n".join(map(json.dumps, entries)) + "\n\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (json.dumps(SHAREGPT), [Prompt("Why?"), Prompt("How?")]),
        (json.dumps([{"domain": "x", "prompt": "One"}], indent=1), [Prompt("One", "x")]),
        (json_lines(SPEC), [Prompt("First", "writing")]),
        (json_lines(CUSTOM), [Prompt("One", output_tokens=7), Prompt("Two\nlines", "code"), Prompt("3")]),
        ("one\n\ntwo {\n", [Prompt("one"), Prompt("two {")]),
        ('{"prompt": "one\u2028of two\x85lines"}\n', [Prompt("one\u2028of two\x85lines")]),
    ],
)
def test_every_format_is_told_by_what_it_holds(tmp_path, text, found):
    (tmp_path / "file").write_text(text, encoding="utf-8")
    assert list(read_prompts(str(tmp_path / "file")).prompts) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts"),
        ("[{]", "is not JSON"),
        ('[{"id": 1}]', "entry 1, has no list"),
        ('{"prompt": "x"}\n{"prompt": 3}', "line 2, has neither"),
        ('{"prompt": "x"}\n{"prompt": "x", "domain": 3}', "line 2, has neither"),
        ('{"prompt": "x"}\n[]', "line 2, is not an object"),
        ('{"prompt": "x"}\n{', "line 2, is not JSON"),
        ('{"prompt": "x", "output_tokens": 0}', "not a number of tokens"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path, text, message):
    (tmp_path / "file").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_prompts(str(tmp_path / "file"))


def test_a_file_that_is_not_there_and_random_prompts_without_tokens_are_refused():
    assert read_prompts("random:24").is_random
    assert read_prompts("random:24").digest != read_prompts("random:25").digest
    for source in ("nowhere", "random:0", "random"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_prompts(source)


def test_the_set_that_ships_has_every_domain_at_the_front():
    shipped = read_prompts("shipped")
    domains = {prompt.domain for prompt in shipped.prompts}
    assert len(domains) == 4
    assert {prompt.domain for prompt in by_turns(shipped.prompts)[:4]} == domains
    assert sorted(map(str, by_turns(shipped.prompts))) == sorted(map(str, shipped.prompts))
