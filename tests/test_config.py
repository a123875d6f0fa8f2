"""Options: the order of their sources, and one clear sentence for each mistake."""

import pytest
from pydantic import ValidationError

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.policy import PRESETS, SYSTEMS, make_policy


def load(additional=None, checkpoint=None, environment=None):
    return Options.load(additional, checkpoint, environment or {})


def test_the_nearest_source_wins():
    checkpoint = {"quant_method": "dymoe", "format_version": 4, "hi": 8, "group_size": 128, "seed": 1}
    environment = {"DYMOE_GROUP_SIZE": "32", "DYMOE_SEED": "2", "PATH": "/bin"}
    options = load({"seed": 3}, checkpoint, environment)
    assert (options.hi, options.group_size, options.seed) == (8, 32, 3)


def test_environment_values_are_json_or_text():
    options = load(environment={"DYMOE_EXPERT_BUDGET": "25%", "DYMOE_HOST_STORE": "pinned", "DYMOE_HI": "16"})
    assert options.expert_budget == ExpertBudget(share=0.25)
    assert (options.host_store, options.hi) == ("pinned", 16)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("auto", ExpertBudget()),
        (1_000, ExpertBudget(bytes=1_000)),
        ("4GiB", ExpertBudget(bytes=4 * 2**30)),
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


def test_a_share_resolves_to_bytes():
    assert ExpertBudget(share=0.25).resolve(1000) == 250
    assert ExpertBudget(bytes=77).resolve(1000) == 77
    with pytest.raises(ValueError, match="automatic"):
        ExpertBudget().resolve(1000)


@pytest.mark.parametrize(
    ("additional", "environment", "sentence"),
    [
        ({"expert_bugdet": "25%"}, {}, 'additional_config.dymoe.expert_bugdet .* did you mean "expert_budget"'),
        ({"zzz": 1}, {}, "zzz is not an option; the options are .*expert_budget"),
        ({}, {"DYMOE_HII": "4"}, 'DYMOE_HII is not an option; did you mean "hi"'),
        ({"hi": 3}, {}, "additional_config.dymoe.hi = 3: input should be 16, 8, 4 or 2"),
        ({}, {"DYMOE_HI": "five"}, 'DYMOE_HI = "five"'),
        ({"hi": 4, "lo": 4}, {}, "lo is 4 bits but must be below hi, which is 4"),
        ({"hi": 2, "lo": 8}, {}, "must be below hi"),
        ({"policy": "best"}, {}, 'policy "best" does not exist; choose one of duoserve, dymoe, exact, firm'),
        ({"prefetch": "next-game"}, {}, 'prefetch "next-game" does not exist; choose one of none, layer'),
        ({"prefetch": "layer", "prefetch_options": {"k": 1}}, {}, "does not take these prefetch_options .*it has none"),
        ({"policy": "firm", "prefetch_options": {"p": -1}}, {}, "p: input should be greater than 0"),
        ({"policy": "uniform-lo"}, {}, "would skip every expert"),
        ({"group_size": 100}, {}, "group_size = 100"),
        ({"host_store": "cloud"}, {}, "host_store"),
        ({"staging_slots": 0}, {}, "staging_slots = 0"),
        ({"io_threads": -1}, {}, "io_threads = -1"),
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
    with pytest.raises(ConfigError, match="has format_version 1, but this vllm-dymoe reads version 4"):
        load(checkpoint={"quant_method": "dymoe", "format_version": 1, "hi": 4})


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(ValidationError):
        Options().hi = 8


def test_stored_bits_leave_out_what_is_skipped():
    assert Options(hi=4, lo=0).stored_bits == (4,)
    assert Options(hi=8, lo=2).stored_bits == (8, 2)


def test_a_system_is_composed_of_parts():
    firm = load({"policy": "firm"})
    assert (firm.policy, firm.prefetch, firm.prefetch_projections) == ("firm", "meeting-of-layers", 2)
    assert not load({"policy": "on-demand"}).keep_experts
    assert load({"policy": "on-demand"}).prefetch == "none", "an expert comes when its router has named it"
    assert load().prefetch == "next-gate"
    assert load(environment={"DYMOE_POLICY": "dymoe"}).prefetch == "next-gate"


def test_what_the_user_sets_goes_before_what_a_system_stands_for():
    firm = load({"policy": "firm", "prefetch_projections": 1}, environment={"DYMOE_PREFETCH": "next-gate"})
    assert (firm.prefetch, firm.prefetch_projections) == ("next-gate", 1)
    assert load({"policy": "on-demand", "keep_experts": True}).keep_experts


def test_a_predictor_is_for_the_trained_scheme_and_stands_behind_any_system():
    file = {"predictor": "a/file"}
    assert load(file).prefetch == "trained"
    assert load({"policy": "exact", **file}).prefetch == "trained"
    assert load({"policy": "duoserve"}).prefetch == "popularity"
    paper = load({"policy": "duoserve", **file})
    assert (paper.prefetch, paper.keep_experts, paper.expert_budget.top_k) == ("trained", False, True)
    assert (
        load({"policy": "duoserve", "expert_budget": "25%", "keep_experts": True, **file}).expert_budget.share == 0.25
    )
    assert load({"predictor": "~/file"}).predictor.is_absolute()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": "trained"}, 'prefetch "trained" needs the file of a predictor; name it in the option predictor'),
        ({"prefetch": "layer", "predictor": "a"}, 'predictor is set, but prefetch is "layer", which has no use for it'),
    ],
)
def test_a_predictor_and_its_scheme_go_together(options, words):
    with pytest.raises(ConfigError, match=words):
        load(options)


def test_a_budget_of_one_tokens_experts():
    assert load({"expert_budget": "top-k"}).expert_budget.resolve(1000, token_bytes=80) == 80
    assert str(load({"expert_budget": "top-k"}).expert_budget) == "as many experts as a token uses in a layer"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_options_and_gives_way_to_the_user(name):
    assert load({"preset": name}) == load(dict(PRESETS[name])).model_copy(update={"preset": name})
    assert load({"preset": name, "hi": 8, "prefetch": "layer"}).hi == 8
    assert load({"preset": name, "prefetch": "layer"}).prefetch == "layer"


def test_a_preset_goes_before_what_a_checkpoint_says():
    """Which is then refused, since its experts are packed: not served with other tiers than those of the preset."""
    assert load({"preset": "cache+dyquant-4/2"}, {"hi": 8, "lo": 0}).stored_bits == (4, 2)


def test_a_preset_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match='preset "row 7" does not exist; choose one of load-on-demand, cache'):
        load({"preset": "row 7"})


def test_systems_with_one_precision_are_exact():
    for name in SYSTEMS:
        load({"policy": name})
        assert make_policy(name).tiers == ({Tier.HI, Tier.LO} if name == "dymoe" else {Tier.HI})
