"""Numbers for people: a unit that fits, for experts of a test and for models of a terabyte."""

import pytest

from vllm_dymoe.units import size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),  # not "1024.0 KiB"
        (15.2 * 2**30, "15.2 GiB"),
        (2**40 - 1, "1.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes_have_a_unit_that_fits(nbytes, text):
    assert size(nbytes) == text
