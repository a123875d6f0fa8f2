"""Options: the order of their sources, and one clear sentence for each mistake."""

from pathlib import Path

import pytest

from tests.errors import refused
from vllm_dymoe.options import ConfigError, ExpertBudget, Options, cache_folder
from vllm_dymoe.resolve import resolve_options


def load(additional=None, checkpoint=None, environment=None):
    return resolve_options(additional, checkpoint, environment or {})


def test_the_nearest_source_wins():
    checkpoint = {"quant_method": "dymoe", "format_version": 5, "hi": 8, "group_size": 128}
    environment = {"DYMOE_GROUP_SIZE": "32", "DYMOE_STORE_DIR": "b", "PATH": "/bin"}
    options = load({"store_dir": "c"}, checkpoint, environment)
    assert (options.high, options.group_size, str(options.store_dir)) == (8, 32, "c")


def test_environment_values_are_json_or_text():
    options = load(environment={"DYMOE_EXPERT_BUDGET": "25%", "DYMOE_HOST_STORE": "pinned", "DYMOE_HIGH": "16"})
    assert options.expert_budget == ExpertBudget(share=0.25)
    assert (options.host_store, options.high) == ("pinned", 16)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("auto", ExpertBudget()),
        ("auto for 4 requests", ExpertBudget(requests=4)),
        (1_000, ExpertBudget(bytes=1_000)),
        ("1.5 MiB", ExpertBudget(bytes=3 * 2**19)),
        ("12.5%", ExpertBudget(share=0.125)),
        (0.25, ExpertBudget(share=0.25)),
        (1.0, ExpertBudget(share=1.0)),
        (1, ExpertBudget(bytes=1)),
        (2**63 - 1, ExpertBudget(bytes=2**63 - 1)),
    ],
)
def test_budgets_are_bytes_or_shares(text, budget):
    assert load({"expert_budget": text}).expert_budget == budget


def test_host_memory_leaves_no_kv_cache():
    assert ExpertBudget(requests=4).is_auto
    with refused(option="host_memory"):
        load({"host_memory": "auto for 4 requests"})


@pytest.mark.parametrize(
    "text",
    ["0%", "101%", -5, 0, "lots", "4 parsecs", 1.5e300, 2**63, "8EiB", None, "nan%", [], True, "auto for 0 requests"],
)
def test_impossible_budgets_are_refused(text):
    with refused(option="expert_budget"):
        load({"expert_budget": text})


@pytest.mark.parametrize(
    ("additional", "environment", "sentence"),
    [
        ({"expert_bugdet": "25%"}, {}, 'additional_config.dymoe.expert_bugdet .* did you mean "expert_budget"'),
        ({"zzz": 1}, {}, "zzz is not an option; .*expert_budget"),
        ({}, {"DYMOE_HIGHH": "4"}, 'DYMOE_HIGHH is not an option; did you mean "high"'),
        ({"high": 3}, {}, "additional_config.dymoe.high = 3"),
        ({}, {"DYMOE_HIGH": "five"}, 'DYMOE_HIGH = "five"'),
        ({"high": 4, "low": 4}, {}, "low is 4 bits"),
        ({"policy": "best"}, {}, 'dymoe.policy: .*"best"'),
        ({}, {"DYMOE_POLICY": "best"}, 'DYMOE_POLICY: .*"best"'),
        ({"policy": "firm", "policy_options": {"q": 1}}, {}, "dymoe.policy_options: .*q: "),
        ({}, {"DYMOE_POLICY_OPTIONS": '{"k": 1}'}, "DYMOE_POLICY_OPTIONS: .*; it has look_ahead"),
        ({"policy": "dymoe", "low": 0, "policy_options": {"retention": 0}}, {}, "would skip every expert"),
        ({"predictor": "a", "policy": "on-demand"}, {}, "dymoe.predictor: "),
        ({"trace": {"limit": "1GiB"}}, {}, "dymoe.trace.folder = "),
        ({"policy": ["firm"]}, {}, "policy = .*string"),
        ("25%", {}, "must be an object of options"),
    ],
)
def test_mistakes_are_one_sentence_that_names_the_place(additional, environment, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(additional, environment=environment)
    message = str(caught.value)
    assert message.startswith("vllm-dymoe: ")
    assert "\n" not in message


def test_a_checkpoint_of_another_version_is_refused():
    with pytest.raises(ConfigError, match="format_version 1"):
        load(checkpoint={"quant_method": "dymoe", "format_version": 1, "hi": 4})
    assert load(checkpoint={"quant_method": "dymoe", "format_version": 5, "hi": 8}).high == 8


def test_a_budget_and_a_host_store_that_are_not_set_are_the_policies():
    own, chosen = load({"policy": "duoserve"}), {"expert_budget": "auto", "host_store": "auto"}
    assert (own.expert_budget, own.host_store) == (ExpertBudget(slots="top-k"), "pinned")
    for options in (load({"policy": "duoserve"} | chosen), load()):
        assert options.expert_budget.is_auto
        assert options.host_store == "auto"


def test_a_predictor_stands_in_for_what_a_policy_would_ask():
    for name in ("exact", "dymoe", "duoserve"):
        assert load({"policy": name, "predictor": "a/file"}).predictor is not None
    assert load({"predictor": "~/file"}).predictor.is_absolute()


def test_a_trace_is_a_folder_or_what_is_recorded_there():
    assert load({"trace": "a"}).trace == load({"trace": {"folder": "a"}}).trace
    trace = load(environment={"DYMOE_TRACE": '{"folder": "a", "limit": "1GiB", "inputs": true}'}).trace
    assert (str(trace.folder), trace.limit, trace.inputs) == ("a", 2**30, True)


FORMAT_AND_PRECISION = {"high", "low", "group_size", "quantizer"}


@pytest.mark.parametrize("option", sorted(Options.model_fields.keys() - FORMAT_AND_PRECISION))
def test_a_checkpoint_sets_its_format_and_precision_and_nothing_else(option):
    """A checkpoint's publisher must not choose which folders are written."""
    field = Options.model_fields[option]
    checkpoint = {"quant_method": "dymoe", "format_version": 6, "hi": 8, option: field.default}
    if option == "dense":  # describes layers other than the experts
        return
    with refused(option=option):
        load(checkpoint=checkpoint)


def test_a_trace_in_a_checkpoint_is_refused():
    trace = {"folder": "/tmp/x", "limit": "10TiB", "inputs": True}
    with refused(option="trace"):
        load(checkpoint={"quant_method": "dymoe", "hi": 8, "trace": trace})
    with pytest.raises(ConfigError, match="quantization_config"):
        load(checkpoint=8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DYMOE_PORT", "tcp://10.0.0.1:8000"),
        ("DYMOE_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("DYMOE_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("DYMOE_PORT_8000_TCP_PORT", "8000"),
        ("DYMOE_PORT_8000_TCP_PROTO", "tcp"),
        ("DYMOE_PORT_53_UDP", "udp://10.0.0.1:53"),
        ("DYMOE_SERVICE_HOST", "10.0.0.1"),
        ("DYMOE_SERVICE_PORT", "8000"),
        ("DYMOE_SERVICE_PORT_HTTP", "8000"),
        ("DYMOE_QWEN_SERVICE_HOST", "10.0.0.1"),
        ("DYMOE_QWEN_PORT", "tcp://10.0.0.1:8000"),
        ("DYMOE_QWEN_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
    ],
)
def test_what_kubernetes_injects_for_a_service_is_no_option(name, value):
    assert load(environment={name: value, "DYMOE_HIGH": "8"}).high == 8


def test_an_option_that_resembles_a_service_is_still_refused():
    for name, value in (("DYMOE_PORT", "8000"), ("DYMOE_PORTS", "tcp://a:1"), ("DYMOE_SERVICE", "a")):
        with refused(option=name.removeprefix("DYMOE_").lower()):
            load(environment={name: value})


@pytest.mark.parametrize("option", sorted(Options.model_fields))
def test_an_empty_variable_is_one_that_is_not_set(option):
    assert load(environment={f"DYMOE_{option.upper()}": ""}) == load()


@pytest.mark.parametrize("value", ["", " ", "~nosuchuser/x"])
@pytest.mark.parametrize("option", ["store_dir", "predictor", "trace", "train_predictor"])
def test_a_path_names_a_place(option, value):
    with refused(option=option):
        load({option: value})
    if option == "trace":
        with refused(option="trace"):
            load({option: {"folder": value}})


def test_what_is_trained_is_read_where_it_exists_and_stands_alone(tmp_path):
    file = tmp_path / "predictor"
    options = load({"train_predictor": str(file)})
    assert options.train_predictor.file == file
    assert options.predictor_file is None
    file.touch()
    assert options.predictor_file == file
    assert load({"train_predictor": {"file": str(file), "memory": "1MiB"}}).train_predictor.memory == 2**20
    assert load({"predictor": "a"}).predictor_file.name == "a"
    with pytest.raises(ConfigError, match="leave predictor out"):
        load({"train_predictor": "a", "predictor": "b"})
    with refused(option="train_predictor"):
        load({"train_predictor": "a", "policy": "firm"})


def test_a_home_is_found_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/there")
    options = load({"store_dir": "~/a", "predictor": "~/b", "trace": "~/c"})
    assert [options.store_dir, options.predictor, options.trace.folder] == [Path("/there") / x for x in "abc"]


@pytest.mark.parametrize("value", [1e300, float("inf"), float("nan"), 10**400])
@pytest.mark.parametrize("option", ["transfer_timeout_s", "disk_gbps", "link_gbps", "misses_rows"])
def test_numbers_that_no_clock_or_counter_holds_are_refused(option, value):
    if option.endswith("gbps") and value == 1e300:
        return
    with refused(option=option):
        load({option: value})


@pytest.mark.parametrize(
    ("policy", "parameter"),
    [("dynaexq", name) for name in ("window_s", "window_uses", "margin", "in_flight")] + [("exact", "look_ahead")],
)
def test_parameters_that_no_clock_or_counter_holds_are_refused(policy, parameter):
    for value in (float("inf"), float("nan"), 10**400):
        with refused(parameter, option="policy_options"):
            load({"policy": policy, "low": 2, "policy_options": {parameter: value}})


def test_deep_and_long_json_is_text():
    for text in ("[" * 100_000, '{"a":' * 100_000, "9" * 5000):
        with refused(option="policy_options"):
            load(environment={"DYMOE_POLICY_OPTIONS": text})


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/home/me/.cache/vllm-dymoe"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/vllm-dymoe"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/vllm-dymoe"),
        # The specification says that relative paths are ignored.
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/vllm-dymoe"),
        ({"XDG_CACHE_HOME": "/x", "VLLM_CACHE_ROOT": "/v"}, "/v/vllm-dymoe"),
        ({"VLLM_CACHE_ROOT": "~/v"}, "/home/me/v/vllm-dymoe"),
        ({"VLLM_CACHE_ROOT": ""}, "/home/me/.cache/vllm-dymoe"),
    ],
)
def test_the_cache_is_where_the_environment_has_caches(environment, folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder(environment) == Path(folder)


def test_no_home_is_a_sentence(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # an unmapped user id without HOME
    with refused(option="store_dir"):
        cache_folder({})
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/vllm-dymoe")
