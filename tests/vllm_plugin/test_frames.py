"""Number of Python frames between vLLM's operator and the launch of a kernel."""

import sys
from types import SimpleNamespace

import pytest

from tests.executor.device_planned import device_planned_server
from tests.executor.steps import CPU, make_server, random_step
from tests.vllm_plugin.steps import rank_of, scheduled
from tests.vllm_plugin.test_decode_steps import LAYERS
from vllm_dymoe.cache.transfer import make_engine
from vllm_dymoe.executor.cpu_executor import CpuExecutor
from vllm_dymoe.executor.plain_kernels import PlainKernels
from vllm_dymoe.kernels.cpu import CpuKernel
from vllm_dymoe.kernels.native import Library
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.vllm_plugin import moe_method


def frames_of(monkeypatch, server, owner, launch):
    """Return the functions between the operator and a step's deepest launches."""
    served, found, real = rank_of(server), [], getattr(owner, launch)

    def recorded(*arguments, **options):
        frame, names = sys._getframe(1), []
        while frame.f_code is not moe_method._moe.__code__:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        found.append(["_moe", *reversed(names)])
        return real(*arguments, **options)

    monkeypatch.setattr(owner, launch, recorded)
    method = SimpleNamespace(loading=SimpleNamespace(rank_server=served), layer=LAYERS[0])
    context = SimpleNamespace(no_compile_layers={moe_method._context_key(0): method})
    monkeypatch.setattr(moe_method, "get_forward_context", lambda: context)
    output = scheduled(1)
    served.begin_step(output)
    moe_method._moe(*random_step(0, 1, server.experts), 0)
    served.end_model(None, output, None)
    return max(found, key=len)


def test_on_a_cpu_three_frames_lie_before_the_native_call(monkeypatch, memory_store):
    server = make_server(memory_store, misses="compute")
    if server.host_planned.cpu is None:
        pytest.skip("the native library was not built")
    random = random_step(0, 1, server.experts)
    for _ in range(2):  # the first step fetches
        rank_of(server).forward(LAYERS[0], *random)
    found = frames_of(monkeypatch, server, CpuExecutor, "run")
    assert len(found) <= 3, found


def test_a_layer_on_a_cpu_takes_few_calls_of_python_and_its_routing_few_modules(memory_store):
    server = make_server(memory_store, misses="compute")
    if server.host_planned.cpu is None:
        pytest.skip("the native library was not built")
    rank, (x, weights, ids), calls = rank_of(server), random_step(0, 1, server.experts), []

    def seen(frame, event, argument):
        if event == "call":
            routed = any(value is ids or isinstance(value, Routing) for value in frame.f_locals.values())
            calls.append((frame.f_globals["__name__"].rpartition(".")[2], routed))

    for watch in (None, None, seen):  # the first step fetches
        rank.begin_step(output := scheduled(1))
        sys.setprofile(watch)
        rank.forward(LAYERS[0], x, weights, ids)
        sys.setprofile(None)
        rank.end_model(None, output, None)
    assert len(calls) <= 9, calls
    assert [module for module, routed in calls if routed] == ["rank_server", "routing", "host_planned", "cpu_executor"]


@pytest.mark.parametrize(("budget", "most"), [("100%", 6), ("minimum", 7)])
def test_the_hosts_way_is_short_and_shortest_where_no_expert_is_missing(monkeypatch, memory_store, budget, most):
    server = make_server(memory_store, engine=make_engine(memory_store, CPU, 0))
    if budget == "100%":
        random = random_step(0, 1, server.experts)
        for _ in range(2):  # the first step fetches
            rank_of(server).forward(LAYERS[0], *random)
    else:
        server.resize(server.minimum_budget)
    native = server.kernel.library is not None
    found = frames_of(monkeypatch, server, *((Library, "experts") if native else (CpuKernel, "compute")))
    assert len(found) + (not native) <= most, found


def test_the_devices_way_has_five_frames_before_its_kernel(monkeypatch, memory_store):
    found = frames_of(monkeypatch, device_planned_server(memory_store, "50%"), PlainKernels, "forward")
    assert len(found) <= 5, found  # on a GPU, TritonKernels.forward and SmallBatchStep.run come in addition
