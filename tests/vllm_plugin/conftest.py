"""Captures the plugin's log lines, for tests that check them."""

import logging

import pytest

from vllm_dymoe.vllm_plugin.announcements import logger


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(logger, "handle", lambda record: lines.append((record.levelno, record.getMessage())))
    return lines


@pytest.fixture
def warnings(said):
    return lambda: [text for level, text in said if level == logging.WARNING]
