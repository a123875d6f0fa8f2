"""The papers' page matches its results, and its verdicts follow from the numbers."""

import copy
import json
from pathlib import Path

import pytest

from tests.support.benchmarks import modules_of

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


def test_pictures_are_there():
    for name in ("dymoe", "duoserve", "firm", "dynaexq"):
        assert (FOLDER / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
