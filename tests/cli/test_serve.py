"""`vllm-dymoe serve`: its arguments, its output, and the command that it starts."""

import json
import os
import re
import shlex

import pytest

from tests.cli.checkpoints import command, refused
from tests.plan.test_plan import QWEN3_30B
from tests.plan.test_start import CPU, DESKTOP
from vllm_dymoe.cli.serve import Arguments, command_of
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.start import Start


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "qwen"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_30B))
    return model


@pytest.fixture
def machine(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(DESKTOP.model_dump_json())
    return path


def pasted(output):
    """Return the words of the printed command, and its environment."""
    (line,) = re.findall(r"^(?:\w+=\S+ )*vllm serve .*$", output, re.MULTILINE)
    words = shlex.split(line)
    first = words.index("vllm")
    return words[first:], dict(word.split("=") for word in words[:first])


def options_of(words):
    return json.loads(words[words.index("--additional-config") + 1])


def test_a_described_machine_is_planned_and_nothing_is_started(folder, machine, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    monkeypatch.setenv("COLUMNS", "120")
    result = command("serve", folder, "--machine", machine, "--max-model-len", "8k", "-tp", "1", "--enforce-eager")
    assert result.exit_code == 0, result.output
    words, environment = pasted(result.stdout)
    assert words[:3] == ["vllm", "serve", str(folder)]
    assert words[3:8] == ["--max-model-len", "8k", "-tp", "1", "--enforce-eager"], "the user's own, as they were"
    assert words.count("--max-model-len") == 1
    assert environment == {}
    for said in ("RTX 4090", "policy", "KV cache", "tokens/s", "requests"):
        assert said in result.stdout, said
    for subject in ("machine", "policy", "precision", "dense layers", "expert budget", "misses", "context", "KV cache",
                    "tokens of a step", "expected"):  # fmt: skip
        assert re.search(rf"^{subject} ", result.stdout, re.MULTILINE), subject
    _title, _heads, *choices = result.stdout.partition("\nTokens/s of")[0].splitlines()
    assert len(choices) == 10, "all of it in ten lines"


def test_additional_config_is_one_whatever_way_it_was_written(folder, machine, monkeypatch):
    """Options of the environment count as the user's, too.

    All are tested with one choice, which takes seconds.
    """
    monkeypatch.setenv("DYMOE_HIGH", "8")
    given = [
        "--additional-config", '{"other": {"a": 1}, "dymoe": {"policy": "exact"}}', "--additional-config.dymoe.low=0"
    ]  # fmt: skip
    words, _ = pasted(command("serve", folder, "--machine", machine, *given).stdout)
    assert words.count("--additional-config") == 1
    found = options_of(words)
    assert found["other"] == {"a": 1}
    assert {name: found["dymoe"][name] for name in ("high", "low", "policy")} == {
        "high": 8,
        "low": 0,
        "policy": "exact",
    }


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1T", 2**40), ("auto", None), ("Auto", None), ("-1", None)],
)
def test_numbers_are_vllms(text, number):
    for words in ([f"--max_model_len={text}"], ["--max-model-len", text, "--enforce-eager"]):
        assert Arguments.parse(words).number("max-model-len") == number


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quantization", "awq"], "awq"),
        (["--additional-config", "{"], "JSON"),
        (["--additional-config", "[]"], "object"),
        (["--config", "serve.yaml"], "--config"),
        (["--max-model-len", "long"], "no number"),
        (["--additional-config.dymoe.policy", "best"], "best"),
        (["--additional-config", '{"dymoe": "exact"}'], "object of options"),
        (["--gpu-memory-utilization", "90%"], "90%"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(folder, machine, words, said):
    assert said in refused("serve", folder, "--machine", machine, *words)


def test_an_unknown_option_is_named(folder, machine):
    result = command("serve", folder, "--machine", machine, "--additional-config.dymoe.hihg", "4")
    assert (result.exit_code, result.stdout) == (1, "")
    assert 'did you mean "high"?' in result.stderr


def test_a_size_in_the_environment_is_a_number(folder, machine, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40GB")
    assert "VLLM_CPU_KVCACHE_SPACE is 40GB" in refused("serve", folder, "--machine", machine)


def test_the_model_comes_first(folder):
    assert "MODEL --port" in refused("serve", "--port", "8001", folder)


def test_what_is_left_to_vllm_stays_so():
    start = Start({}, {"max-model-len": "4096", "kv-cache-dtype": "fp8"}, {}, (), 1.0, 1.0, 1.0, ())
    words = command_of("m", Arguments.parse(["--max-model-len", "auto"]), start)
    assert words[3:9] == ["--max-model-len", "auto", "--quantization", "dymoe", "--kv-cache-dtype", "fp8"]


def test_config_json_is_of_the_revision_that_is_served(folder, tmp_path, monkeypatch):
    asked = []

    def download(*names, **choice):
        asked.append((*names, choice))
        return str(folder / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    given = ["--revision", "v2", "--hf-token", "secret", "--machine", tmp_path / "nowhere.json"]
    assert "nowhere.json" in refused("serve", "someone/model", *given)
    assert asked == [("someone/model", "config.json", {"revision": "v2", "token": "secret"})]


def test_it_becomes_vllm_and_remembers(folder, tmp_path, monkeypatch):
    started = []
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr("vllm_dymoe.plan.here.machine_here", lambda probe, kept, retune: CPU)
    monkeypatch.setattr(os, "execve", lambda program, words, environment: started.append((words, environment)))
    first = command("serve", folder, "--port", "8001")
    assert first.exit_code == 0, first.output
    ((words, environment),) = started
    assert words[1:5] == ["serve", str(folder), "--port", "8001"]
    assert options_of(words)["dymoe"]["expert_budget"] == "top-k"
    assert int(environment["VLLM_CPU_KVCACHE_SPACE"]) >= 1
    monkeypatch.setattr("vllm_dymoe.plan.here.choose", lambda *_: pytest.fail("chosen again"))
    assert command("serve", folder, "--port", "8001", "--dry-run").stdout == first.stdout
    for changed in (["--retune"], ["--max-model-len", "4096"]):
        with pytest.raises(pytest.fail.Exception, match="chosen again"):
            command("serve", folder, "--port", "8001", "--dry-run", *changed)
    (folder / "config.json").write_text(json.dumps(QWEN3_30B | {"vocab_size": 1000}))
    with pytest.raises(pytest.fail.Exception, match="chosen again"):
        command("serve", folder, "--port", "8001", "--dry-run")
    assert len(started) == 1


def test_a_choice_by_disturbed_rates_is_not_kept_and_that_is_said(folder, tmp_path, monkeypatch):
    busy = CPU.model_copy(update={"others": 0.42})
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr("vllm_dymoe.plan.here.machine_here", lambda probe, kept, retune: busy)
    told = command("serve", folder, "--dry-run").stdout
    assert re.search(r"^machine .* others used 42% of the cores, so not kept", told, re.MULTILINE)
    assert len(told.partition("\nTokens/s of")[0].splitlines()) <= 12, "a title, heads, and ten lines"
    assert not list(tmp_path.rglob("starts.json"))


def test_a_home_that_cannot_be_written_keeps_nothing(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("vllm_dymoe.plan.here.machine_here", lambda probe, kept, retune: CPU)
    result = command("serve", folder, "--dry-run")
    assert result.exit_code == 0, result.output


def test_arguments_of_another_kind_pass(folder):
    parsed = Arguments.parse(["--served-model-name", "a", "b", "--no-enable-prefix-caching", "-dp=2"])
    assert parsed.passed == ("--served-model-name", "a", "b", "--no-enable-prefix-caching", "-dp=2")
    assert parsed.asked({}).ranks.dp == 2
    assert parsed.asked({}).prefix_caching is False
    both = Arguments.parse(["--no-enable-prefix-caching", "--enable-prefix-caching"])
    assert both.asked({}).prefix_caching is True, "the last one counts"
    assert Arguments.parse([]).asked({}).prefix_caching is None


def test_a_chosen_flag_has_no_value(folder, machine):
    options = {"policy": "exact", "high": 4, "trace": "traces"}
    result = command("serve", folder, "--machine", machine, "--additional-config", json.dumps({"dymoe": options}))
    words, _ = pasted(result.stdout)
    place = words.index("--no-enable-prefix-caching")
    assert words[place + 1].startswith("--")


def test_another_quantization_is_refused():
    with pytest.raises(ConfigError, match="quantization"):
        Arguments.parse(["-q", "fp8"])
