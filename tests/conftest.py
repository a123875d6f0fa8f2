"""Fixtures that several test folders share."""

from pathlib import Path

import hypothesis
import pytest
import torch

from tests.small_model import make_experts, make_store
from tests.support.memory_writer import MemoryStore
from vllm_dymoe.experts.format import ModelExperts

# The tests' matrices are too small to gain from threads, and waiting threads are expensive on a busy machine.
torch.set_num_threads(1)


# How long an example takes means nothing on a busy machine.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

_ENGINES = Path(__file__).parent / "e2e"
_LONGEST = (  # a quarter of a minute and more, the longest ones first
    *("test_interpreter.py", "test_gpu_command.py", "test_house.py"),
    *("test_prefetch.py", "test_bench.py", "test_data_parallel.py", "test_features.py", "test_parallel.py"),
    *("test_serve.py", "test_server.py", "test_models.py", "test_soak.py", "test_model_runner_v2.py", "test_exact.py"),
    *("test_dynaexq.py", "test_drafts.py", "test_dense_fp8.py", "test_graphs.py", "test_quality.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker waits for one of them at the end."""
    elsewhere = [item.nodeid for item in items if item.get_closest_marker("engine") and item.path.parent != _ENGINES]
    if elsewhere:
        raise pytest.UsageError(f"make test looks for tests that start an engine in tests/e2e, not in {elsewhere}")
    order = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def experts() -> ModelExperts:
    return make_experts()


@pytest.fixture(scope="session")
def memory_store(experts: ModelExperts) -> MemoryStore:
    return make_store(experts)


@pytest.fixture(scope="session")
def nested_store() -> MemoryStore:
    """A store whose low versions are nested in the high ones."""
    return make_store(make_experts(nested=True))
