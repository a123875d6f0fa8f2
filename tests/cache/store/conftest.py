"""A small store on disk."""

import pytest

from tests.cache.store.stores import write


@pytest.fixture
def store(tmp_path):
    store = write(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture(autouse=True)
def own_runtime_folder(tmp_path_factory, monkeypatch):
    """Use a socket folder of this test's own for ranks that share a copy."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
