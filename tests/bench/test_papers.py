"""The papers' page matches its results, and its verdicts follow from the numbers."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.benchmarks import modules_of
from vllm_dymoe.planner.importance import attention_mass
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.prefetch import RoutedModel
from vllm_dymoe.prefetch.gate import Gate
from vllm_dymoe.prefetch.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.vllm_plugin.step import WINDOW

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "papers"
RESULTS = json.loads((FOLDER / "results.json").read_text())


@pytest.fixture(scope="module")
def page():
    with modules_of("papers"):
        import page

        yield page


def test_the_page_is_what_the_results_say(page):
    assert page.text(RESULTS) == (FOLDER / "README.md").read_text(), "run make bench-papers, or papers.py --page"


def test_every_claim_has_a_verdict_and_what_fails_has_a_reason(page):
    rows = page.claims(RESULTS)
    assert {paper for paper, *_ in rows} == {"DyMoE", "DuoServe-MoE", "FIRM-MoE", "DynaExq"}
    for *_, verdict in rows:
        assert verdict.startswith(("**reproduced**", "**in part**", "**not reproduced**"))
        assert not verdict.startswith("**not reproduced**") or ": " in verdict, verdict


def test_verdicts_follow_from_the_numbers(page):
    changed = copy.deepcopy(RESULTS)
    for table in changed["duoserve"].values():
        table["DuoServe-MoE"]["end_to_end"] = table["ACC"]["end_to_end"] / 1.5
    held = {row[1]: row[4] for row in page.claims(changed)}
    assert all(
        verdict == "**reproduced**" for claim, verdict in held.items() if claim.startswith("end to end against ACC")
    )
    for table in changed["firm"]["caches"].values():
        table["All (firm-paper)"]["tpot"] = table["Baseline"]["tpot"] / 2
    held = {row[1]: row[4] for row in page.claims(changed)}
    assert all(verdict == "**reproduced**" for claim, verdict in held.items() if claim.startswith("Table 1, cache"))


def test_aims_are_missed_where_the_numbers_say_so(page, monkeypatch):
    rows, card = page._quality_rows("rescues"), page._card()
    before = page._aims()
    assert len(before) >= 7
    assert all(verdict.startswith(("**holds**", "**missed**")) for _, _, verdict in before)
    worse = [{**row, "kl_nats": 1.0, "fetched_per_token": 1.0} for row in rows]
    monkeypatch.setattr(page, "_quality_rows", lambda section: worse)
    slow = [{**row, "ms": 1.0 if row["policy"] == "dynaexq" else 1e3, "fetched_per_token": 1.0} for row in card["rows"]]
    monkeypatch.setattr(page, "_card", lambda: {**card, "rows": slow})
    assert all(verdict.startswith("**missed**") for _, _, verdict in page._aims())


@pytest.mark.parametrize("seed", range(4))
def test_who_names_experts(page, seed):
    """Votes of equal weight: three of three layers give the intersection.

    One vote out of three gives the union.
    """
    from compared import Votes

    generator = torch.Generator().manual_seed(seed)
    gates = [
        Gate(partial(torch.nn.functional.linear, weight=torch.randn(16, 8, generator=generator))) for _ in range(5)
    ]
    model = RoutedModel(5, 16, 4, gates, hidden=8)
    equal = (1.0, 1.0, 1.0)
    predictors = {
        "meeting": MeetingOfLayers(gates, 3, 3), "all": Votes(model, 3, equal, 3), "one": Votes(model, 3, equal, 1),
        "nearest": Votes(model, 3, (1.5, 1.0, 0.5), 1.5),
    }  # fmt: skip
    for layer in range(5):
        x = torch.randn(1, 8, generator=generator)
        at = Routing(layer, 5, x, torch.arange(4).view(1, 4).int(), torch.full((1, 4), 0.25))
        named = {}
        for name, predictor in predictors.items():
            predictor.observe(at)
            if isinstance(predictor, MeetingOfLayers):
                predictor.begin(layer)
            named[name] = {candidate.expert for candidate in predictor.predict(layer)}
        if layer < 4:
            assert named["all"] == named["meeting"] <= named["nearest"] <= named["one"]
            assert set(gates[layer + 1].best(x, 3)[0][0].tolist()) <= named["nearest"], "a layer's own names have 1.5"


def test_the_attention_of_a_prompt_is_what_the_plugin_measures(page):
    from recorded import ANSWER, _attention

    tokens, heads, dim = 60 + ANSWER, 4, 8
    query, key = (torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(at)) for at in (0, 1))
    scores = torch.einsum("qhd,khd->hqk", query, key) * dim**-0.5
    every = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
    found = _attention([every.unsqueeze(0)], 60)
    want = attention_mass(query[:60], key[:60], dim**-0.5, WINDOW)
    assert torch.allclose(found[:60, 0], want, atol=1e-6)
    assert not found[60:].any(), "an answer's tokens are no prompt's"


def test_pictures_are_there():
    for name in ("dymoe", "duoserve", "firm", "dynaexq"):
        assert (FOLDER / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
