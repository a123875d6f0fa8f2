"""Invariants 1, 3 and 6 through the real engine on the shipped model."""

import os
import shutil

import pytest

from tests.e2e.engines import (
    MODEL,
    answer,
    answers_at_budgets,
    check_logprobs_close,
    engine,
    equal_share,
    prompts,
    server_of,
    watch,
)
from tests.quantize.recordings import write_recording
from vllm_dymoe.experts.encoding import E8_BASE, E8_NESTED
from vllm_dymoe.options import Options
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import convert

pytestmark = pytest.mark.engine

BUDGETS = ("100%", "25%", "minimum")
# With retention 1 the policy dymoe serves as "exact" does. The tests lower it while the same engine runs.
WATCHED = {"retention": 1, "high_by": "depth", "heavy_share": 0.2, "look_ahead": 0}
EXACT = {"high": 16, "low": 2, "policy": "dymoe", "policy_options": WATCHED}


def every_budget(llm):
    answers_at_budgets(llm, BUDGETS, lambda: answer(llm, prompts()[:1]))
    return answers_at_budgets(llm, BUDGETS, lambda: answer(llm, prompts()))


def answers_of(**settings):
    """Return answers at 16 bits, answers with mixed precision, and heavy hitters.

    Mixed: half of the experts at 2 bits. The heavy hitters are those of each layer and step.
    """
    with engine(dymoe=EXACT | {"expert_budget": "25%"}, **settings) as llm:
        exact, server = every_budget(llm), server_of(llm)
        server.resize("25%")
        llm.collective_rpc("dymoe_precision", kwargs={"retention": 0.5})
        watched = watch(server)
        less = answer(llm, prompts())
        assert server.stats().planned["low"] > 0
        return exact, less, [routing.prompt.heavy for routing, _ in watched.seen if routing.prompt is not None]


@pytest.fixture(scope="module")
def plain_answers():
    with engine() as llm:
        return answer(llm, prompts())


@pytest.fixture(scope="module")
def eager():
    return answers_of()


@pytest.fixture(scope="module")
def compiled():
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("vLLM compiles with a C++ compiler, and there is none; make setup says how to get it")
    return answers_of(enforce_eager=False)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_sixteen_bits_reproduce_vllm_at_every_budget(plain_answers, kind, request):
    exact, *_ = request.getfixturevalue(kind)
    check_logprobs_close(exact, plain_answers)
    assert equal_share(exact, plain_answers) >= 0.99


def test_compiled_models_have_the_heavy_hitters_of_eager_ones(eager, compiled):
    (_, less, heavy), (_, less_compiled, heavy_compiled) = eager, compiled
    assert len(heavy_compiled) == len(heavy) > 0
    for ours, theirs in zip(heavy_compiled, heavy, strict=True):
        assert 0 < int(theirs.sum()) < len(theirs)
        # The two compute attention with other roundings, so a token at the threshold may change sides.
        assert float((ours == theirs).float().mean()) > 0.95
    check_logprobs_close(less_compiled, less)
    assert equal_share(less_compiled, less) >= 0.97


def test_points_of_a_lattice_have_the_same_bits_at_every_budget_and_answers_near_those_of_16(plain_answers, tmp_path):
    checkpoint = Checkpoint.open(MODEL)
    described = {"layers": checkpoint.layers, "num_experts": 32, "top_k": 4, "hidden": 256}
    write_recording(tmp_path / "calibration", model=checkpoint.fingerprint(), parts=(600,), **described)
    options, calibration = Options(high=4, low=2, quantizer="e8"), Calibration(tmp_path / "calibration")
    manifest = convert(checkpoint, tmp_path / "e8", options, calibration=calibration)
    assert manifest.experts.stored_nbytes < 4.4 / 16 * checkpoint.expert_bytes
    assert len(manifest.experts.curves) == 2
    policy = {"policy": "dymoe", "policy_options": {"retention": 0.5, "high_by": "depth", "reuse_high": False}}
    with engine(tmp_path / "e8", {"expert_budget": "50%", **policy}) as llm:
        formats = server_of(llm).store.experts.formats
        assert {bits: fmt.encoding for bits, fmt in formats.items()} == {4: E8_NESTED, 2: E8_BASE}
        got = answers_at_budgets(llm, ("100%", "minimum"), lambda: answer(llm, prompts()[:3]))
    # A wrong scale, rotation or slice leaves fewer than a tenth of the tokens equal.
    assert equal_share(got, plain_answers[:3]) > 0.5
