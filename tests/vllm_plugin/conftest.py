"""Fixtures of several tests: the plugin's log lines, and a processor without AMX."""

import logging

import pytest
import torch
import vllm.model_executor.kernels.linear as registry

from vllm_dymoe.options import ConfigError
from vllm_dymoe.vllm_plugin import dense_kernels, prepare
from vllm_dymoe.vllm_plugin.announcements import logger


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch):
    """Use the defaults where a test sets no option, without measuring this machine."""

    def choose(*_):
        raise ConfigError("a test measures nothing")

    monkeypatch.setattr(prepare, "choose_here", choose)


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(logger, "handle", lambda record: lines.append((record.levelno, record.getMessage())))
    return lines


@pytest.fixture
def warnings(said):
    return lambda: [text for level, text in said if level == logging.WARNING]


@pytest.fixture
def amx(monkeypatch):
    """Hide AMX from vLLM on any processor, and let a test pretend that there is one.

    AMX would change which kernels are tried first.
    """
    state = {"found": False}
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: state["found"])
    for name, ours in dense_kernels._REGISTERS.items():
        known = getattr(registry, name, {})
        others = {platform: [k for k in kernels if k.__name__ != ours] for platform, kernels in known.items()}
        monkeypatch.setattr(registry, name, others, raising=False)
    dense_kernels.register_kernels()
    return state
