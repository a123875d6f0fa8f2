"""The register of patches against the installed vLLM, and against what the adapter really does."""

import ast
import inspect
from pathlib import Path

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_dymoe import vllm_adapter
from vllm_dymoe.vllm_adapter.patches import PATCHES, apply_patches

ADAPTER = Path(vllm_adapter.__file__).parent
OTHER_MODULES = sorted(path for path in ADAPTER.glob("*.py") if path.name != "patches.py")


def target_of(patch):
    owner, name = patch.target
    return getattr(resolve_obj_by_qualname(owner), name)


def times_wrapped(function):
    """How many of our wrappers lie around the original."""
    count = 0
    while function is not None:
        count += "dymoe_patched" in vars(function)
        function = getattr(function, "__wrapped__", None)
    return count


@pytest.fixture(params=PATCHES, ids=lambda patch: ".".join(patch.target))
def patch(request):
    return request.param


def test_the_target_is_in_the_installed_vllm(patch):
    assert callable(target_of(patch))


def test_the_target_is_vllms_own_below_our_wrapper(patch):
    apply_patches()
    original = inspect.unwrap(target_of(patch))
    assert original.__module__.startswith("vllm.")
    assert original.__name__ == patch.target[1]


def test_a_patch_is_applied_once_however_often_it_is_asked_for(patch):
    apply_patches()
    once = target_of(patch)
    assert times_wrapped(once) == 1
    apply_patches()
    assert target_of(patch) is once


def test_a_patch_says_why_and_until_when(patch):
    assert len(patch.why.split()) > 5
    assert patch.removable.strip()


def test_no_target_is_registered_twice():
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)


def assignments_to_vllm(source):
    """Names of what a module sets in vLLM: calls of setattr, and attributes of anything imported from there."""
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
        "from vllm.config import VllmConfig\nVllmConfig.__post_init__ = print",
        "from vllm.config import VllmConfig\nsetattr(VllmConfig, 'a', 1)",
    ],
)
def test_a_change_would_be_found(source):
    assert len(assignments_to_vllm(source)) == 1
