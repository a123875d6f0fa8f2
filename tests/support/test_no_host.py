"""The lint of captured steps finds what it is for, and lets pass what a graph can hold."""

import pytest
import torch

from tests.support.no_host import HostInStepError, NoHost


def on_device():
    return torch.empty(4, 2, dtype=torch.int64, device="meta")


def test_work_that_stays_on_the_device_passes():
    with NoHost():
        values = on_device()
        total = (values * 2 + 1).sum(0)
        torch.where(total > 0, total, 0)
        values.copy_(torch.empty_like(values)).masked_fill_(values < 0, 3)
        torch.zeros(2, device="meta").index_add_(0, values[:, 0], torch.empty(4, device="meta"))


@pytest.mark.parametrize(
    ("planted", "sentence"),
    [
        (lambda values: values.max().item(), "waits for the device"),
        (lambda values: bool(values.any()), "waits for the device"),
        (lambda values: values.nonzero(), "waits for the device"),
        (lambda values: values[values > 0], "by a mask waits for the device"),
        (lambda values: values.unique(), "waits for the device"),
        (lambda values: values.cpu(), "moves values between cpu and meta"),
        (lambda values: values.copy_(torch.zeros(4, 2, dtype=torch.int64)), "moves values between cpu and meta"),
        (lambda values: torch.zeros(4).copy_(values[:, 0]), "moves values between cpu and meta"),
    ],
)
def test_what_is_planted_is_found(planted, sentence):
    with pytest.raises(HostInStepError, match=sentence), NoHost():
        planted(on_device())


def test_on_a_cpu_it_finds_what_waits():
    with pytest.raises(HostInStepError, match="_local_scalar_dense"), NoHost():
        torch.arange(3).sum().item()
