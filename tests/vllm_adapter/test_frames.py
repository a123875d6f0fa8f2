"""How many Python frames lie between vLLM's operator and the launch of a kernel."""

import sys
from types import SimpleNamespace

import pytest

from tests.runtime.decided import decided_runtime
from tests.runtime.steps import make_runtime, random_step
from tests.vllm_adapter.steps import rank_of, scheduled
from tests.vllm_adapter.test_decode_steps import LAYERS
from vllm_dymoe.kernels.cpu import CpuKernel
from vllm_dymoe.kernels.native import Library
from vllm_dymoe.runtime.decode_plain import PlainDecode
from vllm_dymoe.vllm_adapter import moe_method


def frames_of(monkeypatch, runtime, owner, launch):
    """The functions between the operator and a launch, the deepest ones of a step."""
    served, found, real = rank_of(runtime), [], getattr(owner, launch)

    def recorded(*arguments, **options):
        frame, names = sys._getframe(1), []
        while frame.f_code is not moe_method._moe.__code__:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        found.append(["_moe", *reversed(names)])
        return real(*arguments, **options)

    monkeypatch.setattr(owner, launch, recorded)
    method = SimpleNamespace(loading=SimpleNamespace(running=served), layer=LAYERS[0])
    context = SimpleNamespace(no_compile_layers={moe_method._context_key("layer"): method})
    monkeypatch.setattr(moe_method, "get_forward_context", lambda: context)
    output = scheduled(1)
    served.begin_step(output)
    moe_method._moe(*random_step(0, 1, runtime.experts), "layer")
    served.end_model(None, output, None)
    return max(found, key=len)


@pytest.mark.parametrize(("budget", "most"), [("100%", 5), ("minimum", 7)])
def test_the_hosts_way_is_short_and_shortest_where_no_expert_is_missing(monkeypatch, memory_store, budget, most):
    runtime = make_runtime(memory_store)
    if budget == "100%":
        random = random_step(0, 1, runtime.experts)
        for _ in range(2):  # which fetches
            rank_of(runtime).forward(LAYERS[0], *random)
    else:
        runtime.resize(runtime.minimum_budget)
    native = runtime.kernel._library is not None
    found = frames_of(monkeypatch, runtime, *((Library, "experts") if native else (CpuKernel, "compute")))
    assert len(found) + (not native) <= most, found


def test_the_devices_way_has_three_frames_before_its_kernel(monkeypatch, memory_store):
    found = frames_of(monkeypatch, decided_runtime(memory_store, "50%"), PlainDecode, "forward")
    assert len(found) <= 3, found  # and TritonDecode.forward and DecodeStep.run before the launch
