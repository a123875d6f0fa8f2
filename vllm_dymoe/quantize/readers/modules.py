"""The expert matrices of a checkpoint, under all names that rules may use.

A rule of a quantization_config names modules as the tool that wrote it saw them. The names may be those of the tensors,
of an older or newer transformers (``language_model.model`` became ``model.language_model``; Mixtral's
``block_sparse_moe.experts.0.w1`` became ``mlp.experts.0.gate_proj``), or vLLM's. So a rule matches a matrix if it
matches one of its names.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from vllm_dymoe.experts.format import Projection
from vllm_dymoe.quantize.readers.base import FLOATS
from vllm_dymoe.quantize.tensor_names import read_name

_PREFIXES = ("model", "model.language_model", "language_model.model", "language_model", "thinker.model", "backbone")
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "mixer", "ffn", "moe")
_OTHER_WORDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_WORDS = {Projection.GATE: "gate_proj", Projection.UP: "up_proj", Projection.DOWN: "down_proj"}
_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules")


@dataclass(frozen=True)
class ExpertModule:
    """One matrix: a projection of an expert, or of all experts of a layer in a stack."""

    name: str  # ``model.layers.3.mlp.experts.7.gate_proj``, ``model.layers.3.mlp.experts.gate_up_proj``
    layer: int
    expert: int | None  # None for a stack
    projections: tuple[Projection, ...]
    plain: bool | None  # whether its tensors have 16 bits; None if unknown

    @property
    def aliases(self) -> tuple[str, ...]:
        """The matrix's names, the checkpoint's own first."""
        layers, _, rest = self.name.partition(f".{self.layer}.")
        block, _, tail = rest.partition(".experts.")
        prefix = layers.removesuffix("layers").removesuffix(".")
        draft = "mtp" in prefix.split(".")
        prefixes = (prefix, "mtp", "model.mtp") if draft else (prefix, *_PREFIXES)
        tails = [tail]
        if self.expert is not None:
            number, _, projection = tail.partition(".")
            tails.append(f"{number}.{_OTHER_WORDS.get(projection, projection)}")
        else:
            tails += [f"0.{_WORDS[projection]}" for projection in self.projections]
        made = (
            f"{begin}.layers.{self.layer}.{middle}.experts.{end}"
            for begin in prefixes
            for middle in (block, *_BLOCKS)
            for end in tails
        )
        return tuple(dict.fromkeys((self.name, *made)))


def guessed_modules(layers: int = 128) -> tuple[ExpertModule, ...]:
    """Return modules for a checkpoint whose tensors are not known."""
    return tuple(
        ExpertModule(f"model.layers.{layer}.mlp.experts.0.{word}", layer, 0, (projection,), None)
        for layer in range(layers)
        for projection, word in _WORDS.items()
    )


def modules_of(tensors: Mapping[str, str], layers: int) -> tuple[list[ExpertModule], list[ExpertModule]]:
    """Return the expert matrices of the model, and of its drafts.

    Drafts are layers for multi-token prediction. ``tensors`` are dtypes, in safetensors' words, by name; ``layers`` is
    the model's number of layers.
    """
    parts: dict[str, list[tuple[str, str]]] = {}
    named = {}
    for tensor, dtype in tensors.items():
        found = read_name(tensor)
        if found is None or not found.projections:
            continue
        ending = found.part if tensor.endswith(found.part) else ""
        module = tensor[: len(tensor) - len(ending)].rstrip("._") if ending else tensor
        parts.setdefault(module, []).append((found.part, dtype))
        named[module] = found
    model, drafts = [], []
    for module, found in named.items():
        plain = all(part in ("weight", "bias") and dtype in FLOATS for part, dtype in parts[module])
        made = ExpertModule(module, found.layer, found.expert, found.projections, plain)
        if found.of_model and found.layer < layers:
            model.append(made)
        elif found.of_model or "mtp" in found.layers.split("."):
            drafts.append(made)
    return model, drafts


def representatives(config: Mapping[str, Any], modules: Iterable[ExpertModule]) -> list[ExpertModule]:
    """Return modules that represent all others.

    One expert of each layer and projection suffices, in addition to those that rules name by number.
    """
    named = {int(number) for number in re.findall(r"experts\\*\.(\d+)", str(config))}
    kept: dict[object, ExpertModule] = {}
    for module in modules:
        expert = module.expert if module.expert in named else None
        kept.setdefault((module.layer, module.projections, module.plain, expert), module)
    return list(kept.values())


def matches(pattern: str, names: Collection[str], *, anywhere: bool = False) -> bool:
    """Return whether an expression matches one of the names.

    It matches from their beginning, or ``anywhere``. An invalid expression matches nothing.
    """
    compiled = _compiled(pattern)
    if compiled is None:
        return False
    find = compiled.search if anywhere else compiled.match
    return any(map(find, names))


def excluded(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether a configuration leaves a module at 16 bits.

    It may use "re:" and an expression, wildcards, or parts of names. Or it lists what is quantized, by parts of names
    (GPTQ's ``modules_in_block_to_quantize``, a list or a list of lists). Only for modules whose tensors are not known;
    otherwise the tensors decide.
    """
    listed = config.get("modules_in_block_to_quantize") or ()
    quantized = [part for entry in listed for part in ([entry] if isinstance(entry, str) else entry)]
    if quantized and not any(part in name for part in quantized for name in names):
        return True
    whole, dotted = {module for name in names for module in _containers(name)}, [f".{name}." for name in names]
    for key in _EXCLUSIONS:
        for pattern in config.get(key) or ():
            if pattern.startswith("re:"):
                found = matches(pattern[len("re:") :], names)
            elif "*" in pattern:
                found = any(fnmatchcase(name, pattern) for name in whole)
            else:
                part = f".{pattern.strip('.')}."
                found = any(part in name for name in dotted)
            if found:
                return True
    return False


def _containers(name: str) -> Iterable[str]:
    """Yield what a wildcard has to match.

    It is the experts of a layer, or another matrix and the modules that contain it.
    """
    before, experts, _ = name.partition(".experts.")
    if experts:
        yield f"{before}.experts"
        return
    parts = name.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), 0) + 2
    yield from (".".join(parts[:length]) for length in range(first, len(parts) + 1))


def dense_aliases(layer: int, part: str) -> tuple[str, ...]:
    """Return the names of a matrix outside of experts.

    Args:
        part: "attention", "shared" experts, or "mlp" of a layer without experts.
    """
    tails = {
        "attention": [f"{name}.o_proj" for name in ("self_attn", "attn", "attention")],
        "shared": [f"{block}.{name}.down_proj" for block in _BLOCKS for name in ("shared_experts", "shared_expert")],
        "mlp": [f"{block}.down_proj" for block in _BLOCKS],
    }[part]
    return tuple(f"{prefix}.layers.{layer}.{tail}" for prefix in _PREFIXES for tail in tails)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:
        return None
