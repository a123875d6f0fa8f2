"""vLLM opens what ``vllm-dymoe quantize`` wrote, without being told how."""

import pytest

from tests.cli.checkpoints import command
from tests.e2e.engines import MODEL, answer, engine, prompts, runtime_of


@pytest.mark.engine
def test_a_written_checkpoint_serves_as_if_quantized_while_loading(tmp_path):
    out = tmp_path / "out"
    assert command("quantize", MODEL, "-o", out, "--hi", 4, "--lo", 2).exit_code == 0
    options = {"expert_budget": "50%"}
    with engine(out, additional_config={"dymoe": options}) as llm:
        assert runtime_of(llm).store.description == f"files in {out}"
        written = answer(llm, prompts()[:4])
    while_loading = {"hi": 4, "lo": 2, "store_dir": str(tmp_path / "store"), **options}
    with engine(dymoe=while_loading) as llm:
        loaded = answer(llm, prompts()[:4])
    # The packed bytes are the same and the batches are, so every bit is.
    assert written == loaded
