"""Captures the plugin's log lines, for tests that check them."""

import logging

import pytest

from vllm_dymoe.options import ConfigError
from vllm_dymoe.vllm_plugin import prepare
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
