"""Points of a lattice through the real engine: the same bits at every budget, and answers near those of 16 bits."""

import pytest

from tests.e2e.engines import MODEL, answer, answers_at_budgets, engine, equal_share, runtime_of
from tests.quantize.recordings import write_recording
from vllm_dymoe.config import Options
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import convert
from vllm_dymoe.residency.code import E8_BASE, E8_NESTED

pytestmark = pytest.mark.engine

TEXTS = ["To sort a list in Python,", "The command prints", "12 + 30 ="]


def test_a_checkpoint_of_points_has_the_same_bits_at_every_budget(tmp_path):
    checkpoint = Checkpoint.open(MODEL)
    described = {"layers": checkpoint.layers, "num_experts": 32, "top_k": 4, "hidden": 256}
    write_recording(tmp_path / "calibration", model=checkpoint.fingerprint(), parts=(600,), **described)
    options, calibration = Options(hi=4, lo=2, quantizer="e8"), Calibration(tmp_path / "calibration")
    manifest = convert(checkpoint, tmp_path / "e8", options, calibration=calibration)
    assert manifest.experts.stored_nbytes < 4.4 / 16 * checkpoint.expert_bytes
    assert len(manifest.experts.curves) == 2
    with engine(MODEL, {"hi": 16, "expert_budget": "100%"}) as llm:
        want = answer(llm, TEXTS, 16)
    system = {"system": "dymoe", "system_options": {"retention": 0.5, "high_by": "depth", "reuse_high": False}}
    with engine(tmp_path / "e8", {"expert_budget": "50%", **system}) as llm:
        formats = runtime_of(llm).store.experts.formats
        assert {bits: fmt.code for bits, fmt in formats.items()} == {4: E8_NESTED, 2: E8_BASE}
        got = answers_at_budgets(llm, ("100%", "minimum"), lambda: answer(llm, TEXTS, 16))
    # 0.94 of the tokens were the same; a wrong scale, rotation or slice leaves fewer than 0.1.
    assert equal_share(got, want) > 0.5
