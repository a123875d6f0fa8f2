"""Describes this machine."""

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

import torch
import triton
from record import Recorder


def run(record: Recorder) -> None:
    """Record the card, the driver and versions of packages."""
    with record.check("torch finds a CUDA device, and it computes") as wrong:
        if not torch.cuda.is_available():
            wrong.append("torch finds no CUDA device here, so there is nothing to check")
            return
        if torch.ones(1 << 10, device="cuda").sum().item() != 1 << 10:
            wrong.append("1024 ones do not sum to 1024")
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            wrong.append(f"its compute capability is {major}.{minor}; the kernels are written for 8.0 and later")
        memory = torch.cuda.mem_get_info()[1]
        facts = {
            "card": torch.cuda.get_device_name(),
            "capability": f"{major}.{minor}",
            "memory_gib": round(memory / 2**30),
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "vllm": _version_of_vllm(),
            "python": platform.python_version(),
        }
        record.keep(**facts)
        record.say(", ".join(f"{name} {value}" for name, value in facts.items()))


def _driver() -> str:
    """Return the version of the kernel's driver, from the driver's own file."""
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split() if file.is_file() else []
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), "unknown")


def _version_of_vllm() -> str | None:
    """Return vLLM's version without importing it, which takes seconds."""
    if importlib.util.find_spec("vllm") is None:
        return None
    found = importlib.metadata.packages_distributions().get("vllm")
    return importlib.metadata.version(found[0]) if found else "of unknown version"
