"""The register of everything in vLLM that we change, with the reason and the day it can go.

A test holds the register against the installed vLLM, so a renamed target is
found by CI and not by a user.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One change to vLLM.

    Attributes:
        target: module and attribute that is replaced.
        why: what vLLM has no other way for.
        wrapper: makes the replacement from the original.
        removable: what upstream would have to offer.
    """

    target: tuple[str, str]
    why: str
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
    removable: str


def _with_prepared_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_dymoe.vllm_adapter.prepare import prepare, refuse_idle_options

        config = original(self, *args, **kwargs)
        if config.model_config is not None and config.model_config.quantization == "dymoe":
            prepare(config)
        else:
            refuse_idle_options(config)
        return config

    create_engine_config.dymoe_patched = True  # type: ignore[attr-defined]
    return create_engine_config


PATCHES = (
    Patch(
        target=("vllm.engine.arg_utils.EngineArgs", "create_engine_config"),
        why=(
            "Options must be refused in the user's process before any weight is loaded, decisions taken on the host "
            "must not be captured in a CUDA graph, and the worker methods must be there without another flag."
        ),
        wrapper=_with_prepared_config,
        removable="a hook of QuantizationConfig that sees the finished VllmConfig",
    ),
)


def apply_patches() -> None:
    """Apply every patch of the register, each once."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for patch in PATCHES:
        owner = resolve_obj_by_qualname(patch.target[0])
        original = getattr(owner, patch.target[1])
        if not getattr(original, "dymoe_patched", False):
            setattr(owner, patch.target[1], patch.wrapper(original))
