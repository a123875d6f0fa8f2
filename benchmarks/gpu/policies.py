"""Which policy is planned on the device in which kind of step, and what does the host do for a layer?

    python benchmarks/gpu/policies.py [FILE]

Prints a table, and writes it to FILE as JSON. Needs no GPU: each cell runs on the emulated card with a link of 8 GB/s,
and is refused if its outputs differ from those of the same precisions with every expert resident. Waits are uses of a
number that only the device has, before a layer is enqueued. Launches and host time are measured in the Triton path with
launches that do nothing, for a layer in the middle of a step. Prompts have 64 tokens; a quarter of the experts has
slots.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from tests.executor.device_planned import decode, device_planned_server, run_large_batch
from tests.executor.steps import make_server, random_step, run
from tests.executor.test_host_syncs import OnDevice
from tests.small_model import make_experts, make_store
from vllm_dymoe.executor.device_planning import DRAFTED, MET, plans_on_device
from vllm_dymoe.executor.plain_kernels import PlainKernels, PlainLargeBatch
from vllm_dymoe.executor.triton_kernels import TritonKernels
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import TritonKernel, large_batch_step
from vllm_dymoe.kernels.triton.popularity import count_and_name_on_gpu
from vllm_dymoe.options import Options
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.policies import POLICIES, Policy, make_policy
from vllm_dymoe.prefetch import on_device
from vllm_dymoe.server import Parts

LAYERS, EXPERTS = 6, 16
STORE = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS))
TOKENS = {"decode": 1, "prefill": 64}
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


def options_of(name: str) -> dict:
    """Return precisions and budget of a policy's cells."""
    if name == "dynaexq":
        return {"low": 2, "budget": "75%"}
    if name == "dymoe":
        return {
            "low": 2,
            "budget": "25%",
            "policy_options": {"retention": 0.5, "high_by": "depth", "reuse_high": False},
        }
    return {"low": 0, "budget": "25%"}


def bits_are_equal(name: str, tokens: int) -> bool:
    """Return whether a cell on the emulated card gives the bits of host-side planning with every expert resident."""
    given = options_of(name)
    budget = given.pop("budget")
    steps = [(seed, layer, tokens) for seed in range(STEPS) for layer in range(LAYERS)]
    everything = budget if name == "dynaexq" else "100%"  # dynaexq serves what is resident
    want = run(make_server(STORE, everything, name, **given), steps)
    server = device_planned_server(STORE, budget, name, link_gbps=LINK_GBPS, **given)
    step = decode if tokens <= SMALL_BATCH_ROWS else run_large_batch
    got = [step(server, layer, *random_step(seed, tokens, STORE.experts)) for seed, layer, _ in steps]
    return all(map(torch.equal, got, want))


def host_waits(name: str, tokens: int) -> list[str]:
    """Return what waits for the device in a step, when kernels do nothing and only the device has numbers."""
    given = options_of(name)

    class Nothing(PlainLargeBatch):
        def plan(self, layer, x, *rest):
            self._x = x

        def copy(self, group):
            """Nothing."""

        compute = copy

        def finish(self):
            return self._x

    nothing = dict.fromkeys(("judge_predicted", "list_predicted", "copy_predicted"), lambda *_: None)
    nothing |= {"forward": lambda self, table, layer, rows, plan, x, *_: x}
    nothing |= {"large_batch_step": lambda *arguments: Nothing(*arguments)}
    with mock.patch.multiple(PlainKernels, **nothing):
        server = device_planned_server(STORE, given.pop("budget"), name, **given)
        step = decode if tokens <= SMALL_BATCH_ROWS else run_large_batch
        OnDevice.log = []
        for layer in range(LAYERS):
            step(server, layer, *(part.as_subclass(OnDevice) for part in random_step(layer, tokens, STORE.experts)))
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
    """Kernels of a GPU, whose launches are not made."""

    def decode_kernel(self, kernel, experts, link_gbps=None):
        """Return a GPU's kernel, with its own scratch."""
        on_card = TritonKernel("cpu", formats=[m for fmt in experts.formats.values() for m in fmt.matrices])
        return TritonKernels(on_card, experts, SMALL_BATCH_ROWS)


def work_of_the_host(name: str, tokens: int) -> tuple[int, float]:
    """Return launches of a layer, and microseconds of Python for it."""
    given, launched, times = options_of(name), [], []

    def combine(out, weights, ids):
        launched.append("combine")
        return out.new_empty(len(ids), out.shape[1])

    launch = mock.patch.object(JITFunction, "run", lambda self, *_, **__: launched.append(self.__name__))
    popular = mock.patch.object(on_device, "_count_and_name_on", return_value=count_and_name_on_gpu)
    with launch, popular, mock.patch.object(large_batch_step, "combine", combine):
        server = device_planned_server(STORE, given.pop("budget"), name, parts=OnTriton(torch.device("cpu")), **given)
        step = decode if tokens <= SMALL_BATCH_ROWS else run_large_batch
        server.small_batches.tell(tokens)
        path = server.small_batches.forward if tokens <= SMALL_BATCH_ROWS else server.small_batches.forward_large
        counted = Launches()
        for number in range(12):
            for layer in range(LAYERS):
                x, weights, ids = random_step(layer, tokens, STORE.experts)
                launched.clear()
                last = number == 11 and layer == 2
                with counted if last else mock.MagicMock():
                    begun = time.perf_counter()
                    path(layer, x, weights, ids, Activation.SILU)
                    times.append(time.perf_counter() - begun)
                if last:
                    return len(launched) + counted.names.total(), 1e6 * median(times[LAYERS:-1])
    raise AssertionError(step)


def elsewhere(policy: Policy) -> dict[str, str]:
    """Return why other kinds of steps are planned on the host; empty for those that are not."""
    kinds = {"drafts": (True, DRAFTED), "DP+EP": (True, MET), "disk": (False, "")}
    return {
        kind: plans_on_device(Options(low=2), policy, "cuda", readable=readable, obstacle=obstacle)[1]
        for kind, (readable, obstacle) in kinds.items()
    }


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    rows, wrong = [], []
    for name in POLICIES:
        policy = make_policy(Options(policy=name, low=2))
        for kind, tokens in TOKENS.items():
            row = {
                "policy": name,
                "step": kind,
                "on_device": not policy.needs_host,
                "waits": len(host_waits(name, tokens)),
            }
            row["launches"], row["host_us"] = work_of_the_host(name, tokens)
            row["bits"] = bits_are_equal(name, tokens)
            wrong += [] if row["bits"] and not row["waits"] else [f"{name}, {kind}"]
            rows.append(row)
        rows += [
            {"policy": name, "step": kind, "on_device": not reason, "because": reason}
            for kind, reason in elsewhere(policy).items()
        ]
    print("| policy | step | planned on the device | host waits a layer | launches a layer | host us a layer | bits |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if "because" in row:
            continue
        numbers = row["waits"], row["launches"], f"{row['host_us']:.0f}", "equal" if row["bits"] else "DIFFERENT"
        print(f"| {row['policy']} | {row['step']} | {'yes' if row['on_device'] else 'no'} | "
              + " | ".join(map(str, numbers)) + " |")  # fmt: skip
    for kind in ("drafts", "DP+EP", "disk"):
        reasons = {row["because"] for row in rows if row["step"] == kind}
        print(f"\n{kind}: planned on the host for every policy, because {'; '.join(sorted(reasons))}.")
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")
    if wrong:
        print(f"policies: outputs differ, or the host waits: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
