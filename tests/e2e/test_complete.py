"""A checkpoint that lacks a tensor is refused, with the tensor's name.

It must never be served with uninitialized memory in the tensor's place.
"""

import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import in_own_process, random_prompts, small_engine

pytestmark = pytest.mark.engine

CUT = {
    "model.layers.1.input_layernorm.weight": "model.layers.1.input_layernorm.weight",
    "model.layers.0.self_attn.o_proj.weight": "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.mlp.gate.weight": "model.layers.1.mlp.gate.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "model.embed_tokens.weight": "model.embed_tokens.weight",
}
"""Maps each tensor that is removed to its name in vLLM's model."""


def without(folder, name, target):
    shutil.copytree(folder, target)
    (path,) = target.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys() if key != name}  # noqa: SIM118
        assert len(tensors) == len(file.keys()) - 1
    save_file(tensors, path, {"format": "pt"})
    return target


def starts(folders, options):
    """Return the error of each start, or None."""
    from vllm.distributed import cleanup_dist_env_and_memory

    found = []
    for folder in folders:
        try:
            with small_engine(folder, options) as llm:
                llm.generate(random_prompts()[:1], use_tqdm=False)
            found.append(None)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            cleanup_dist_env_and_memory()
    return found


@pytest.mark.parametrize("options", [{"high": 16}, {"high": 4, "dense": 8}], ids=["16 bits", "dense 8"])
def test_a_dense_weight_that_is_missing_is_an_error_with_its_name(options, tmp_path):
    whole = ARCHITECTURES["qwen3-moe"].save(tmp_path / "whole")
    names = list(CUT)[: None if options["high"] == 16 else 2]
    cut = [without(whole, name, tmp_path / f"cut-{number}") for number, name in enumerate(names)]
    complete, *errors = in_own_process(starts, [whole, *cut], options)
    assert complete is None
    for name, error in zip(names, errors, strict=True):
        assert error is not None, f"served without {name}"
        assert CUT[name] in error
