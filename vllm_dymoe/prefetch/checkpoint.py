"""The file of a trained predictor: safetensors, with a model card in its metadata."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_dymoe.durable import replace_file
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.prefetch.folded import FoldedMLP

PREDICTOR_FORMAT = 1
_KIND = "vllm-dymoe predictor"
_METRICS = TypeAdapter(dict[str, dict[str, float]])


class PredictorError(ValueError):
    """A file cannot be used as a predictor here.

    The message is one sentence for the user.
    """


@dataclass(frozen=True)
class PredictorCard:
    """The model of a predictor, its training, and its accuracy."""

    header: ModelIdentity  # identity of the model: fingerprint and sizes
    architecture: Mapping[str, Any] = field(default_factory=dict)  # name and sizes of the network
    trace: Mapping[str, Any] = field(default_factory=dict)  # training data: path, tokens, requests
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # hit rates on held-out requests
    seed: int = 0  # of the training
    version: str = ""  # of vllm-dymoe that trained it
    format: int = PREDICTOR_FORMAT  # of the file

    def check(self, path: Path, here: ModelIdentity) -> None:
        """Raise PredictorError if the predictor does not suit the model that runs here.

        The predictor must have been trained for this model, and predict no worse than the next layer's gate.
        """
        for name, what in (
            ("num_layers", "MoE layers"),
            ("num_experts", "experts in a layer"),
            ("top_k", "experts for each token"),
            ("hidden", "hidden features"),
        ):
            theirs, ours = getattr(self.header, name), getattr(here, name)
            if theirs != ours:
                raise PredictorError(
                    f"predictor {path} was trained for {self.header.model}, which has {theirs} {what}, but this model "
                    f"has {ours} on this rank; train one for this model with `vllm-dymoe train`."
                )
        if self.header.fingerprint != here.fingerprint:
            raise PredictorError(
                f"predictor {path} was trained for {self.header.model} with the weights {self.header.fingerprint}, but "
                f"this model has others ({here.fingerprint}); train one for it with `vllm-dymoe train`."
            )
        if worse := worse_than_next_gate(self.metrics):
            raise PredictorError(f"predictor {path} is refused: {worse}")


def worse_than_next_gate(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Return why a predictor is worse than the next layer's gate, which is free.

    Empty if it is not worse, or if that is unknown.
    """
    rates = {
        name: metrics[name]["accuracy"] for name in ("trained", "next gate") if "accuracy" in metrics.get(name, {})
    }
    if len(rates) < 2 or rates["trained"] >= rates["next gate"]:
        return ""
    return (
        f"it predicts {rates['trained']:.1%} of the chosen experts, but the next layer's gate, which needs no "
        f"training, {rates['next gate']:.1%} (on tokens that it was not trained on); train on more tokens, or with the "
        "architecture linear+input, or serve without it."
    )


def save_predictor(path: Path, card: PredictorCard, network: FoldedMLP) -> None:
    """Write a predictor's file atomically.

    Raises PredictorError if it cannot be written.
    """
    half = network.to(torch.device("cpu"), torch.float16)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, save(half.tensors, {"kind": _KIND, "card": json.dumps(asdict(card))}))
    except (OSError, SafetensorError) as error:
        raise PredictorError(f"predictor {path} cannot be written ({error}).") from error


def read_card(path: Path) -> PredictorCard:
    """Return the card of a predictor.

    Raises PredictorError if the file is missing, truncated, damaged or not a predictor.
    """
    return _read(path)[0]


def load_predictor(path: Path) -> tuple[PredictorCard, FoldedMLP]:
    """Return card and network, in float16 on the CPU.

    Raises PredictorError like ``read_card``, and if tensors do not fit the card.
    """
    card, tensors = _read(path, with_tensors=True)
    sizes = card.header
    try:
        network = FoldedMLP(tensors)
        width = network.tables.shape[2]
        one_or_all = (1, sizes.num_layers - 1)
        found = [network.num_layers, network.num_experts, len(network.tables) in one_or_all, network.tables.shape[1]]
        expected = [sizes.num_layers, sizes.num_experts, True, network.history * sizes.num_experts]
        if network.recent is not None:
            found += list(network.recent.shape)
            expected += [sizes.num_layers - 1, sizes.num_experts, width]
        elif len(network.tables) != sizes.num_layers - 1:
            raise ValueError("one table serves all layers, but the table of what each layer adds is missing")
        if network.gates is not None:
            found += list(network.gates.shape[1:])
            expected += [sizes.hidden, width]
        for matrix, bias in zip(network.matrices, network.biases, strict=True):
            found += [matrix.shape[1], bias.shape[1], len(bias), len(matrix) in one_or_all]
            expected += [width, matrix.shape[2], len(matrix), True]
            width = matrix.shape[2]
        for ahead, (table, gates) in enumerate(network.further, 2):
            layers = sizes.num_layers - ahead
            found += [*table.shape, *gates.shape]
            expected += [layers, sizes.num_experts, sizes.num_experts, layers, sizes.hidden, sizes.num_experts]
        if network.correction is not None:
            found += network.correction.shape
            expected += [sizes.num_layers, sizes.num_experts]
        whole = found == expected and width == sizes.num_experts and network.history > 0
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    except (KeyError, IndexError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise _damaged(path, f"a tensor is missing or has another shape: {error}") from error
    if not whole:
        raise _damaged(path, "its tensors have other shapes than its card says")
    if not finite:
        raise _damaged(path, "a number in it is not finite")
    return card, network


def _read(path: Path, *, with_tensors: bool = False) -> tuple[PredictorCard, dict[str, torch.Tensor]]:
    if not path.is_file():
        raise PredictorError(f"predictor {path} is not a file; train one with `vllm-dymoe train`.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != _KIND:
                raise PredictorError(f"{path} is a safetensors file, but not a predictor of `vllm-dymoe train`.")
            described = json.loads(metadata["card"])
            if described.get("format") != PREDICTOR_FORMAT:
                raise PredictorError(
                    f"predictor {path} has format {described.get('format')}, but this vllm-dymoe reads "
                    f"{PREDICTOR_FORMAT}; train it again, or use the version that wrote it."
                )
            described["header"].pop("format", None)  # of the trace, which older files have here
            described["header"] = header = ModelIdentity(**described["header"])
            if not all(
                isinstance(n, int) for n in (header.num_layers, header.num_experts, header.top_k, header.hidden)
            ):
                raise TypeError("its sizes are not numbers")
            described["metrics"] = _METRICS.validate_python(described.get("metrics", {}))
            card = PredictorCard(**described)
            names = file.keys() if with_tensors else ()
            return card, {name: file.get_tensor(name) for name in names}
    except PredictorError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> PredictorError:
    return PredictorError(
        f"{path} cannot be read as a predictor ({reason}); it is truncated, damaged or another kind of file."
    )
