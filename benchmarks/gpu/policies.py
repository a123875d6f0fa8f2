"""Which policies are planned on the device, and what does the host do for a layer?

    python benchmarks/gpu/policies.py [FILE]

Prints a table for each kind of step, and writes it to FILE as JSON. Needs no GPU. Each cell runs on the emulated card
with a link of 8 GB/s, and is refused if its outputs differ from those of the same precisions with every expert
resident. "Waits" are reads, before a layer is enqueued, of a number that only the device has. Launches and host time
are measured in the Triton path with launches that do nothing, for a middle layer of a step or for the draft's.

Prompts have 64 tokens, and a quarter of the experts has slots. DP+EP: the rows of another engine come before this
one's, as after gathering, which counts as one launch. Disk: the store is not in memory, and a thread reads a plan's
misses. Policies that ask gates ask random ones, and the paper's network has random weights.
"""

import json
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from tests.executor.device_planned import device_planned_server
from tests.executor.steps import forward, make_server, random_step
from tests.prefetch.gates import random_gates
from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from tests.support.on_device import OnDevice
from vllm_dymoe.cache.host_cache import join
from vllm_dymoe.executor.plain_kernels import PlainKernels, PlainLargeBatch
from vllm_dymoe.executor.triton_kernels import TritonKernels
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import TritonKernel, large_batch_step
from vllm_dymoe.kernels.triton.popularity import count_and_name_on_gpu
from vllm_dymoe.kernels.triton.prefetch import name_experts_on_gpu
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.policies import POLICIES
from vllm_dymoe.prefetch import Predictor, RoutedModel, TrainedPredictor, on_device
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES, ExpertMLP, States
from vllm_dymoe.prefetch.folded import fold
from vllm_dymoe.server import Parts

LAYERS, EXPERTS = 6, 16
STORE = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS))
SIZES = ModelIdentity("", "", LAYERS, EXPERTS, STORE.experts.top_k, STORE.experts.formats[4].hidden)
GATES, _ = random_gates(LAYERS, EXPERTS, SIZES.hidden)
STEPS, LINK_GBPS = 6, 8.0
_NO_LAUNCH = (
    "empty",
    "view",
    "slice",
    "select",
    "as_strided",
    "alias",
    "detach",
    "unsqueeze",
    "expand",
    "permute",
    "t.",
)


def predictor_of(name: str) -> Predictor | None:
    """Return the predictor of a policy."""
    prefetch = POLICIES[name]().prefetch
    if prefetch is None:
        return None
    if not prefetch.needs_predictor:
        floats = [type(gate)(lambda x, gate=gate: gate.logits(x.float())) for gate in GATES]
        return prefetch.make(RoutedModel(LAYERS, EXPERTS, SIZES.top_k, gates=floats, hidden=SIZES.hidden))
    seen = torch.ones(LAYERS, EXPERTS), torch.ones(LAYERS - 1, EXPERTS, EXPERTS)
    return TrainedPredictor(fold(ExpertMLP(States(SIZES, ARCHITECTURES["paper-shared"], *seen)).eval()), SIZES.top_k)


def options_of(name: str) -> dict:
    """Return the precisions, budget and parameters with which a policy is measured."""
    policy = POLICIES[name]()
    if policy.residency.migrating is not None:
        return {"low": 2, "budget": "75%"}
    if len(policy.precision.precisions) > 1:
        return {
            "low": 2,
            "budget": "25%",
            "parameters": {"retention": 0.5, "high_by": "depth", "reuse_high": False},
        }
    return {"low": 0, "budget": "25%"}


def server_of(name: str, store: Any, **others: Any) -> Any:
    """Return a server whose steps an emulated device plans."""
    given = options_of(name)
    policy = POLICIES[name](**given.pop("parameters", {}))
    return device_planned_server(store, given.pop("budget"), policy, predictor=predictor_of(name), **given, **others)


@dataclass(frozen=True)
class Kind:
    """A kind of steps: its layers, their rows, and where experts come from."""

    tokens: int
    drafts: bool = False
    meets: bool = False  # as many rows of another engine come first; one of them is a token
    on_disk: bool = False

    def store(self) -> Any:
        """Return new experts each time, because a draft's become part of the model's."""
        if self.drafts:
            return join(make_store(STORE.experts), make_store(replace(STORE.experts, layers=(1,))))
        return FaultyStore(STORE) if self.on_disk else STORE

    def layers(self, seed: int) -> list[tuple[int, int, tuple[Tensor, ...]]]:
        """Return each layer of a step, with its number of tokens and its inputs."""
        passes = [(layer, self.tokens) for layer in range(LAYERS)]
        if self.drafts:  # all rows, then one for each request; the graph is not told so
            passes += [(LAYERS, self.tokens), (LAYERS, 1)]
        return [(layer, self.tokens, self.given(seed, rows)) for layer, rows in passes]

    def given(self, seed: int, rows: int) -> tuple[Tensor, ...]:
        """Return x, weights and ids; with two engines, the rows of both."""
        x, weights, ids = random_step(seed, rows, STORE.experts)
        if self.meets:
            others = torch.where(torch.arange(rows).unsqueeze(1) < 1, ids, -1)
            return torch.cat((x, x)), torch.cat((weights, weights)), torch.cat((others, ids))
        return x, weights, ids

    def run(self, server: Any, layer: int, told: int, given: tuple[Tensor, ...]) -> Tensor:
        """Enqueue one layer of a device-planned step."""
        path = server.small_batches
        path.tell(told)
        x, weights, ids = given
        if self.meets:
            ids = torch.cat((ids[: len(ids) // 2], path.own_tokens(ids[len(ids) // 2 :])))  # replaces gathering
            path.meet(ids)
        forward = path.forward if len(x) <= SMALL_BATCH_ROWS else path.forward_large
        out = forward(layer, x, weights, ids, Activation.SILU)
        return out[len(out) // 2 :] if self.meets else out


KINDS = {
    "decode": Kind(1),
    "prefill": Kind(64),
    "drafts": Kind(2, drafts=True),
    "DP+EP": Kind(4, meets=True),
    "disk": Kind(1, on_disk=True),
    "disk, prefill": Kind(64, on_disk=True),
}


def bits_are_equal(name: str, kind: Kind) -> bool:
    """Return whether the emulated card gives the bits of a CPU."""
    given = options_of(name)
    budget, policy = given.pop("budget"), POLICIES[name](**given.pop("parameters", {}))
    everything = budget if POLICIES[name]().residency.migrating is not None else "100%"  # it serves what is resident
    host, server = (
        make_server(replace(kind, on_disk=False).store(), everything, policy, **given),
        server_of(name, kind.store(), link_gbps=LINK_GBPS),
    )
    equal = True
    for seed in range(STEPS):
        for layer, told, step in kind.layers(seed):
            x, weights, ids = step
            if kind.meets:  # the host gets tokens only
                x, weights, ids = (torch.cat((part[:1], part[len(part) // 2 :])) for part in step)
            want = forward(host, layer, x, weights, ids)[-told:]
            equal &= torch.equal(kind.run(server, layer, told, step), want)
    server.check_integrity()
    server.close(keep_store=True)
    return equal


def host_waits(name: str, kind: Kind) -> list[str]:
    """Return which reads on the host wait for the device in a step.

    Kernels do nothing, and only the device has numbers.
    """

    class Nothing(PlainLargeBatch):
        def plan(self, layer, x, *rest):
            self._x = x

        def copy(self, group):
            """Do nothing."""

        compute = copy

        def finish(self):
            return self._x

    nothing = dict.fromkeys(("judge_predicted", "list_predicted", "copy_predicted"), lambda *_: None)
    nothing |= {"forward": lambda self, table, layer, rows, plan, x, *_, **__: x}
    nothing |= {"large_batch_step": lambda *arguments: Nothing(*arguments[:4])}
    with mock.patch.multiple(PlainKernels, **nothing), mock.patch.object(on_device, "name_experts"):
        server = server_of(name, kind.store())
        OnDevice.log = []
        for layer, told, step in kind.layers(0):
            kind.run(server, layer, told, tuple(part.as_subclass(OnDevice) for part in step))
        server.close(keep_store=True)
    return OnDevice.log


class Launches(TorchDispatchMode):
    """Counts torch's own launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if not name.lstrip("_").startswith(_NO_LAUNCH):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class OnTriton(Parts):
    """A GPU's kernels, which are prepared but not launched."""

    def decode_kernel(self, kernel, experts, link_gbps=None):
        """Return a GPU's kernel, with its own scratch."""
        on_card = TritonKernel("cpu", formats=[fmt.matrices for fmt in experts.formats.values()])
        return TritonKernels(on_card, experts, SMALL_BATCH_ROWS)


def name_on_triton(table: Any, *arguments: Any) -> None:
    """Name predicted experts as on a GPU."""
    name_experts_on_gpu(vars(table), *arguments)


def work_of_the_host(name: str, kind: Kind) -> tuple[int, float]:
    """Return the launches of a layer, and the microseconds of Python for it."""
    launched, times = [], []

    def combine(out, weights, ids):
        launched.append("combine")
        return out.new_empty(len(ids), out.shape[1])

    launch = mock.patch.object(JITFunction, "run", lambda self, *_, **__: launched.append(self.__name__))
    popular = mock.patch.object(on_device, "_count_and_name_on", return_value=count_and_name_on_gpu)
    names = mock.patch.object(on_device, "_name_experts_on", return_value=name_on_triton)
    with launch, popular, names, mock.patch.object(large_batch_step, "combine", combine):
        server = server_of(name, kind.store(), parts=OnTriton(torch.device("cpu")))
        server.small_batches.tell(kind.tokens)
        middle = LAYERS if kind.drafts else 2  # the draft's first pass, or a middle layer
        for number in range(12):
            for at, (layer, told, step) in enumerate(kind.layers(number)):
                launched.clear()
                last = number == 11 and at == middle
                with (counted := Launches()) if last else nullcontext():
                    begun = time.perf_counter()
                    kind.run(server, layer, told, step)
                    times.append((at, time.perf_counter() - begun))
                if last:
                    server.close(keep_store=True)
                    of_layer = [1e6 * took for at, took in times[LAYERS:-1] if at == middle]
                    return len(launched) + counted.names.total(), median(of_layer)
    raise AssertionError(name)


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    rows, wrong = [], []
    for name in POLICIES:
        for step, kind in KINDS.items():
            row = {"policy": name, "step": step, "waits": len(host_waits(name, kind))}
            row["launches"], row["host_us"] = work_of_the_host(name, kind)
            row["bits"] = bits_are_equal(name, kind)
            wrong += [] if row["bits"] and not row["waits"] else [f"{name}, {step}"]
            rows.append(row)
    print("| policy | step | host waits a layer | launches a layer | host us a layer | bits |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        numbers = row["waits"], row["launches"], f"{row['host_us']:.0f}", "equal" if row["bits"] else "DIFFERENT"
        print(f"| {row['policy']} | {row['step']} | {' | '.join(map(str, numbers))} |")
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")
    if wrong:
        print(f"policies: outputs differ, or the host waits: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
