"""Options: the order of their sources, and one clear sentence for each mistake."""

import pytest

from vllm_dymoe.options import ConfigError, ExpertBudget
from vllm_dymoe.resolve import resolve_options


def load(additional=None, checkpoint=None, environment=None):
    return resolve_options(additional, checkpoint, environment or {})


def test_the_nearest_source_wins():
    checkpoint = {"quant_method": "dymoe", "format_version": 5, "high": 8, "group_size": 128, "store_dir": "a"}
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
        (1_000, ExpertBudget(bytes=1_000)),
        ("1.5 MiB", ExpertBudget(bytes=3 * 2**19)),
        ("12.5%", ExpertBudget(share=0.125)),
        (0.25, ExpertBudget(share=0.25)),
        (1.0, ExpertBudget(share=1.0)),
        (1, ExpertBudget(bytes=1)),
    ],
)
def test_budgets_are_bytes_or_shares(text, budget):
    assert load({"expert_budget": text}).expert_budget == budget


@pytest.mark.parametrize("text", ["0%", "101%", -5, 0, "lots", "4 parsecs", 1.5e300, None, "nan%", [], True])
def test_impossible_budgets_are_refused(text):
    with pytest.raises(ConfigError, match=r"expert_budget.*(auto|GiB)"):
        load({"expert_budget": text})


@pytest.mark.parametrize(
    ("additional", "environment", "sentence"),
    [
        ({"expert_bugdet": "25%"}, {}, 'additional_config.dymoe.expert_bugdet .* did you mean "expert_budget"'),
        ({"zzz": 1}, {}, "zzz is not an option; the options are .*expert_budget"),
        ({}, {"DYMOE_HIGHH": "4"}, 'DYMOE_HIGHH is not an option; did you mean "high"'),
        ({"high": 3}, {}, "additional_config.dymoe.high = 3: input should be 16, 8, 4 or 2"),
        ({}, {"DYMOE_HIGH": "five"}, 'DYMOE_HIGH = "five"'),
        ({"high": 4, "low": 4}, {}, "low is 4 bits but must be below high, which is 4"),
        ({"policy": "best"}, {}, 'dymoe.policy: policy "best" does not exist; choose one of exact, on-demand'),
        ({}, {"DYMOE_POLICY": "best"}, 'DYMOE_POLICY: policy "best" does not exist'),
        ({"policy": "firm", "policy_options": {"p": 1}}, {}, "dymoe.system_options: .*p: extra inputs are"),
        ({}, {"DYMOE_POLICY_OPTIONS": '{"k": 1}'}, "DYMOE_POLICY_OPTIONS: .*; it has look_ahead"),
        ({"policy": "dymoe", "low": 0, "policy_options": {"retention": 0}}, {}, "would skip every expert"),
        ({"predictor": "a", "policy": "on-demand"}, {}, "dymoe.predictor: .*has no use for a predictor; leave it out"),
        ({"trace": {"limit": "1GiB"}}, {}, "dymoe.trace.folder = .*: field required"),
        ({"policy": ["firm"]}, {}, "policy = .*input should be a valid string"),
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
    with pytest.raises(ConfigError, match="has format_version 1, but this vllm-dymoe reads versions 5 and 6"):
        load(checkpoint={"quant_method": "dymoe", "format_version": 1, "high": 4})
    assert load(checkpoint={"quant_method": "dymoe", "format_version": 5, "high": 8}).high == 8


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
