"""Errors by their fields, so that a test does not quote sentences."""

import pytest

from vllm_dymoe.options import ConfigError


def refused(match=None, **fields):
    """Expect a ConfigError with these fields; ``match`` where several reasons have the same ones."""
    return pytest.raises(
        ConfigError, match=match, check=lambda error: {name: getattr(error, name) for name in fields} == fields
    )
