"""A small store on disk."""

import pytest

from tests.cache.store.stores import write


@pytest.fixture
def store(tmp_path):
    store = write(tmp_path / "store")
    yield store
    store.close()
