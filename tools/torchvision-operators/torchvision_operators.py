"""Declares the operators of torchvision whose shapes it registers at import."""

import importlib.util
from pathlib import Path

import torch

_DECLARED = [f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")]
_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def declare() -> None:
    """Declare torchvision's operators if its compiled ones do not load.

    torch calls this at import.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or _libraries:
        return
    (folder,) = spec.submodule_search_locations or [""]
    try:
        torch.ops.load_library(Path(folder) / "_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in _DECLARED:
            library.define(operator)
        _libraries.append(library)
