"""Where vLLM captures CUDA graphs our transfers are paused."""

import ast
import contextlib
import inspect
import textwrap
from functools import partial
from types import SimpleNamespace

import pytest
from vllm.v1.worker.gpu_worker import Worker

from vllm_dymoe.vllm_adapter.patches import PATCHES, _warm_up
from vllm_dymoe.vllm_adapter.quant_config import DymoeConfig

CAPTURES = {"capture_model", "profile_cudagraph_memory"}
PAUSED = {patch.target[1] for patch in PATCHES if patch.replacement is _warm_up}


def reached(names):
    """Methods of vLLM's worker that call one of these, and those that call them, up to whatever is paused."""
    own = {name: inspect.unwrap(method) for name, method in vars(Worker).items() if inspect.isfunction(method)}
    found = {name for name, method in own.items() if calls_of(method) & names}
    while more := {name for name, m in own.items() if calls_of(m) & (found - PAUSED)} - found:
        found |= more
    return found


def calls_of(method):
    """Names of the methods that a method calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    return {n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}


def test_every_way_to_a_capture_is_paused():
    ways = reached(CAPTURES)
    assert ways, "vLLM captures elsewhere by now"
    # What is not paused itself is called by something that is.
    entries = {name for name in ways if not any(name in calls_of(inspect.unwrap(vars(Worker)[o])) for o in ways)}
    assert entries == PAUSED


class Engine:
    """Counts its pauses."""

    def __init__(self):
        self.log = []

    @contextlib.contextmanager
    def paused(self):
        self.log.append("paused")
        try:
            yield
        finally:
            self.log.append("resumed")


def worker(runtime):
    config = DymoeConfig.__new__(DymoeConfig)
    config.loading = None if runtime is None else SimpleNamespace(running=SimpleNamespace(runtime=runtime))
    return SimpleNamespace(vllm_config=SimpleNamespace(quant_config=config))


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_paused_as_long_as_vllm_warms_up(fails):
    engine = Engine()

    def warm_up(self):
        engine.log.append("captures")
        if fails:
            raise RuntimeError("no memory")
        return 7

    patched, ours = partial(_warm_up, warm_up), worker(SimpleNamespace(engine=engine))
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            patched(ours)
    else:
        assert patched(ours) == 7
    assert engine.log == ["paused", "captures", "resumed"]


@pytest.mark.parametrize("somebody", [SimpleNamespace(vllm_config=SimpleNamespace(quant_config=None)), worker(None)])
def test_other_models_are_left_alone(somebody):
    assert _warm_up(lambda self: self, somebody) is somebody
