"""LoRA beside packed experts: adapters change the other layers, and one that changes experts is refused."""

from typing import Any

from vllm.config import LoRAConfig

from vllm_dymoe.config import ConfigError
from vllm_dymoe.vllm_adapter.moe_method import DymoeMoEMethod


def may_reach_experts(lora: LoRAConfig | None) -> bool:
    """Whether adapters may change experts: vLLM wraps every layer unless target modules leave it out."""
    if lora is None:
        return False
    return lora.target_modules is None or any(map(_of_experts, lora.target_modules))


def refuse_adapted_experts(model: Any, path: str, adapter: Any) -> None:
    """Refuse an adapter with weights for experts, which vLLM itself leaves out in silence.

    Args:
        model: that is served, of us or not.
        path: of the adapter.
        adapter: vLLM's LoRAModel.

    Raises:
        ConfigError: it has some, and the model's experts are packed.
    """
    changed = [name for name in adapter.loras if _of_experts(name)]
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    if changed and any(isinstance(method, DymoeMoEMethod) for method in methods):
        raise ConfigError(
            f"vllm-dymoe: the adapter {path} changes experts ({changed[0]} and {len(changed) - 1} more), which are "
            "packed; train one that leaves them alone, or merge it into the checkpoint and serve that."
        )


def _of_experts(module: str) -> bool:
    # "experts" stands for the whole layer, "experts.3.up_proj" for one of its projections.
    return "experts" in module.split(".")
