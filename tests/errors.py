"""Matches errors by their fields, so that tests need not quote sentences."""

import pytest

from vllm_dymoe.options import ConfigError


def refused(match=None, **fields):
    """Expect a ConfigError with these fields.

    Use ``match`` where several reasons share the same fields.
    """
    return pytest.raises(
        ConfigError, match=match, check=lambda error: {name: getattr(error, name) for name in fields} == fields
    )
