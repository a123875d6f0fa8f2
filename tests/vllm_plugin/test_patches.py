"""The register of patches, compared with the installed vLLM and the plugin's code."""

import ast
import contextlib
import inspect
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu_worker import Worker

from vllm_dymoe import vllm_plugin
from vllm_dymoe.vllm_plugin.patches import PATCHES, _determine_available_memory, _warm_up, apply_patches
from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig

OTHER_MODULES = sorted(path for path in Path(vllm_plugin.__file__).parent.glob("*.py") if path.name != "patches.py")
CAPTURES = {"capture_model", "profile_cudagraph_memory"}
PAUSED = {patch.target[1] for patch in PATCHES if patch.replacement in (_warm_up, _determine_available_memory)}


def target_of(patch):
    owner, name = patch.target
    return getattr(resolve_obj_by_qualname(owner), name)


def times_wrapped(function):
    count = 0
    while function is not None:
        count += "dymoe_patched" in vars(function)
        function = getattr(function, "__wrapped__", None)
    return count


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: ".".join(patch.target))
def test_a_patch_is_applied_once_to_what_is_in_the_installed_vllm(patch):
    apply_patches()
    once = target_of(patch)
    assert times_wrapped(once) == 1
    apply_patches()
    assert target_of(patch) is once
    original = inspect.unwrap(once)
    assert original.__module__.startswith("vllm.")
    assert original.__name__ == patch.target[1]
    assert len(patch.why.split()) > 5
    assert patch.removable.strip()


def test_on_a_gpu_the_cpu_s_worker_is_left_alone():
    """Importing the CPU worker's module would replace torch.cuda's events and streams.

    Placeholders would then serve every user of torch in the process.
    """
    program = (
        "import torch; from vllm.platforms import current_platform; events = torch.cuda.Event, torch.Event; "
        "type(current_platform).is_cpu = lambda self: False; "
        "from vllm_dymoe.vllm_plugin.patches import apply_patches; apply_patches(); "
        "print((torch.cuda.Event, torch.Event) == events)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


def test_no_target_is_registered_twice():
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)


def assignments_to_vllm(source):
    """Return the names that a module sets in vLLM.

    By setattr, or as attributes of anything imported from there.
    """
    tree = ast.parse(source)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or "vllm" for alias in node.names if alias.name.split(".")[0] == "vllm"}
    found = []
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name | ast.Attribute) and ast.unparse(called).endswith(("setattr", "__setattr__")):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in imported:
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", OTHER_MODULES, ids=lambda path: path.name)
def test_nothing_in_vllm_is_changed_outside_the_register(path):
    assert assignments_to_vllm(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import vllm\nvllm.envs.X = 1",
        "import vllm.config as c\nc.VllmConfig.y = None",
        "from vllm.config import VllmConfig\nsetattr(VllmConfig, 'a', 1)",
    ],
)
def test_a_change_would_be_found(source):
    assert len(assignments_to_vllm(source)) == 1


def calls_of(name):
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(vars(Worker)[name]))))
    return {n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}


def test_transfers_are_paused_on_every_way_to_a_capture():
    """Follow the calls of methods that capture, up to the methods that are paused."""
    calls = {name: calls_of(name) for name, method in vars(Worker).items() if inspect.isfunction(method)}
    ways = {name for name, called in calls.items() if called & CAPTURES}
    assert ways, "vLLM captures elsewhere by now"
    while more := {name for name, called in calls.items() if called & (ways - PAUSED)} - ways:
        ways |= more
    # The outermost callers are exactly the methods that are paused.
    assert {name for name in ways if not any(name in calls[other] for other in ways)} == PAUSED


def worker(server):
    config = DymoeConfig()
    config.loading = None if server is None else SimpleNamespace(rank_server=SimpleNamespace(server=server))
    return SimpleNamespace(vllm_config=SimpleNamespace(quant_config=config))


@pytest.mark.parametrize("fails", [False, True])
def test_transfers_are_paused_as_long_as_vllm_warms_up(fails):
    log = []

    @contextlib.contextmanager
    def paused():
        log.append("paused")
        try:
            yield
        finally:
            log.append("resumed")

    def warm_up(self):
        log.append("captures")
        if fails:
            raise RuntimeError("no memory")
        return 7

    patched = partial(_warm_up, warm_up, worker(SimpleNamespace(engine=SimpleNamespace(paused=paused))))
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            patched()
    else:
        assert patched() == 7
    assert log == ["paused", "captures", "resumed"]


@pytest.mark.parametrize("other", [SimpleNamespace(vllm_config=SimpleNamespace(quant_config=None)), worker(None)])
def test_other_models_are_left_alone(other):
    assert _warm_up(lambda self: self, other) is other
