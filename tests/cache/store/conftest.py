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
    """The folder in which replicated ranks keep their sockets."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
