"""What else serves a model, beside this plugin in the same table.

A peer that is not there is left out with a sentence. One that has no Python of its own to call is measured through the
server that it starts: ``--peer http://localhost:8080``.
"""

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_ENGINE = "vllm_dymoe.vllm_adapter.measure"


@dataclass(frozen=True)
class Peer:
    """How something else is measured.

    Attributes:
        module: the program that answers a job.
        missing: why it cannot run here, in a sentence; None if it can.
        engine: from the share of experts that may stay on the device to arguments of vLLM's ``LLM``.
        takes_budgets: whether that share means anything to it.
    """

    module: str
    missing: Callable[[], str | None] = lambda: None
    engine: Callable[[float, int], Mapping[str, Any]] = lambda share, expert_bytes: {}
    takes_budgets: bool = False


def _needs(package: str, name: str) -> Callable[[], str | None]:
    found = importlib.util.find_spec(package) is not None
    return lambda: None if found else f"{name} is left out: `pip install {package}` brings it."


def _needs_cuda(name: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        import torch

        return None if torch.cuda.is_available() else f"{name} is left out: it offloads from a GPU, and there is none."

    return missing


def _served(name: str) -> Callable[[], str | None]:
    return lambda: f"{name} is left out: start its server and name it, as in --peer http://localhost:8080."


def _offload(share: float, expert_bytes: int) -> Mapping[str, Any]:
    """vLLM's zero-copy offload of as many bytes as are not to be on the device."""
    return {"cpu_offload_gb": (1 - share) * expert_bytes / 2**30, "cpu_offload_params": ["experts"]}


def _prefetched(share: float, expert_bytes: int) -> Mapping[str, Any]:
    """vLLM's prefetch of whole layers: of each group of ten so many are not on the device."""
    away = max(1, min(9, round(10 * (1 - share))))
    return {"offload_group_size": 10, "offload_num_in_group": away, "offload_params": ["experts"]}


PEERS: dict[str, Peer] = {
    "vllm": Peer(_ENGINE),
    "vllm-offload": Peer(_ENGINE, _needs_cuda("vLLM's --cpu-offload-gb"), _offload, takes_budgets=True),
    "vllm-prefetch": Peer(_ENGINE, _needs_cuda("vLLM's prefetch offloader"), _prefetched, takes_budgets=True),
    "accelerate": Peer("vllm_dymoe.bench.peers.accelerate", _needs("accelerate", "accelerate")),
    "llama.cpp": Peer(
        "vllm_dymoe.bench.peers.llama_cpp",
        lambda: None if shutil.which("llama-bench") else "llama.cpp is left out: llama-bench is not on the PATH.",
        takes_budgets=True,
    ),
    "freetoken": Peer("", _served("FreeToken")),
    "ktransformers": Peer("", _served("ktransformers")),
}
_SERVER = Peer("vllm_dymoe.bench.peers.server")


def find_peer(name: str) -> Peer | None:
    """By name, or a server by its address; None if nothing of the name is known."""
    return _SERVER if name.startswith(("http://", "https://")) else PEERS.get(name)


__all__ = ["PEERS", "Peer", "find_peer"]
