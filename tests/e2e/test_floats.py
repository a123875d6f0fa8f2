"""Published floats through the real engine: the checkpoint's codes, and vLLM's answers with the dequantized weights."""

import pytest
import torch

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import answer, check_logprobs_close, equal_share, recorded_layers, runtime_of
from tests.e2e.make_checkpoints import FOLDER
from tests.e2e.quantized import dequantize_checkpoint, write_floats
from tests.e2e.test_models import TOKENS, prompts, serve
from tests.e2e.test_quantized import place
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.residency.format import BlobKey, Projection

pytestmark = pytest.mark.engine


def named_matrices(experts):
    """Layer, expert, projection and matrix of everything that was written."""
    for name, matrix in experts.items():
        if not isinstance(matrix, list):
            yield (*place(name), matrix)
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        for expert, each in enumerate(matrix):
            if "down" in name:
                yield layer, expert, Projection.DOWN, each
            else:
                yield layer, expert, Projection.GATE, each.part(0, slice(0, None, 2))
                yield layer, expert, Projection.UP, each.part(0, slice(1, None, 2))


def check_store(store, experts):
    """Every code and every weight of the high tier is the checkpoint's."""
    bits = max(store.experts.formats)
    fmt = store.experts.formats[bits]
    count = 0
    for layer, expert, projection, matrix in named_matrices(experts):
        blob = torch.empty(fmt.nbytes, dtype=torch.uint8)
        store.read_into(BlobKey(store.experts.layers.index(layer), expert, bits), blob)
        packed = fmt.view(blob)[projection]
        assert torch.equal(unpack(packed), matrix.codes)
        assert torch.equal(dequantize(packed), matrix.dequantize())
        count += 1
    assert count == 3 * len(store.experts.layers) * store.experts.num_experts


KINDS = [("mxfp4", "gpt-oss"), ("fp8-blocks", "deepseek-v3"), ("nvfp4-compressed-tensors", "glm-4-moe")]


@pytest.mark.parametrize(("kind", "model"), [*KINDS, ("exported", "qwen3-moe-nvfp4")])
def test_published_floats_are_served_as_they_are(tmp_path, kind, model):
    """Of the last, every file is ModelOpt's own."""
    if kind == "exported":
        experts = dequantize_checkpoint(FOLDER / model, tmp_path)
        (tmp_path / "quantized").symlink_to(FOLDER / model)
    else:
        experts = write_floats(ARCHITECTURES[model], kind, tmp_path)
    with serve(tmp_path / "plain") as llm:
        want = answer(llm, prompts(), TOKENS)
    with serve(tmp_path / "quantized", {"lo": 2}) as llm:
        runtime = runtime_of(llm)
        check_store(runtime.store, experts)
        with recorded_layers(runtime) as layers:
            got = answer(llm, prompts(), TOKENS)
        runtime.resize("30%")
        with recorded_layers(runtime) as others:
            again = answer(llm, prompts(), TOKENS)
        runtime.check_integrity()
    assert [a.tokens for a in again] == [a.tokens for a in got]
    assert all(torch.equal(a, b) for a, b in zip(layers, others, strict=True))
    check_logprobs_close(got, want)
    assert equal_share(got, want) > 0.8
