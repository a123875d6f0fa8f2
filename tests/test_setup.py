"""``make setup``: a line for each step, and where to read on if one fails.

Nothing is downloaded.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_dymoe.kernels import native

SOURCE = Path(__file__).resolve().parent.parent / "tools" / "setup.py"
# Replaces the environment's Python; recognizes pip and the import check by their command lines.
PYTHON = """#!/bin/sh
case "$*" in
*uninstall*--[!y]*) echo "no such option" >&2; exit 2 ;;
*impossible*) echo "Looking in indexes"; echo "ERROR: No matching distribution found for impossible" >&2; exit 1 ;;
*--index-url*) ;;
*--no-deps*torch==*) echo "ERROR: No matching distribution found for torch" >&2; exit 1 ;;
*import*) echo "a warning"; echo "vLLM 0.0 torch 0.0" ;;
*) for i in $(seq 100); do echo "Requirement already satisfied: $i"; done ;;
esac
"""


@pytest.fixture
def setup(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("make_setup", SOURCE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_setup", module)
    spec.loader.exec_module(module)

    def create_environment():
        python = module.VENV / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)

    monkeypatch.setattr(module, "VENV", tmp_path / "venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / "venv" / "setup-stamp")
    monkeypatch.setattr(module, "LOG", tmp_path / "build" / "setup.log")
    monkeypatch.setattr(module, "create_environment", create_environment)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    monkeypatch.setattr(module.shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(sys, "argv", ["setup.py", "--device", "cpu"])
    return module


def test_each_step_is_one_line_and_pip_s_own_are_in_a_file(setup, capsys):
    assert setup.main() == 0
    *steps, last = capsys.readouterr().out.splitlines()
    assert len(steps) == 8
    for line in steps:
        assert re.fullmatch(r"make setup: [A-Z].* \.\.\.( not there,)? \d+ s", line), line
    assert [line for line in steps if "not there" in line] == [line for line in steps if "+cpu ..." in line]
    assert re.fullmatch(r"make setup: \.venv has vLLM 0\.0 torch 0\.0; done in \d+ s\.", last)
    log = setup.LOG.read_text()
    assert log.count("Requirement already satisfied: 100") == 5
    assert log.count(f"$ {setup.VENV}/bin/python -m pip install") == 6


def test_a_second_run_finds_that_nothing_changed(setup, capsys):
    assert setup.main() == 0
    capsys.readouterr()
    assert setup.main() == 0
    assert capsys.readouterr().out == "make setup: .venv is up to date (cpu build of vLLM).\n"


def test_a_failure_shows_the_last_lines_and_names_the_file(setup, monkeypatch, capsys):
    monkeypatch.setattr(setup, "CPU_VLLM", "impossible==99")
    assert setup.main() == 1
    out, err = capsys.readouterr()
    assert re.search(r"Installing impossible==99 \.\.\. failed, \d+ s\n", out)
    assert out.endswith("  | Looking in indexes\n  | ERROR: No matching distribution found for impossible\n")
    assert "impossible==99" in err
    assert str(setup.LOG) in err
    assert "No matching distribution found for torch" in setup.LOG.read_text()
    assert not setup.STAMP.exists(), "the next run would find it up to date"


def test_an_interruption_is_said_and_leaves_no_stamp(setup, monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "create_environment", interrupted)
    assert setup.main() == 130
    assert capsys.readouterr().err == "make setup: interrupted; the next one begins again.\n"
    assert not setup.STAMP.exists()


def test_two_at_once_take_turns(setup, capsys):
    with ThreadPoolExecutor(1) as pool:
        with setup.alone():
            second = pool.submit(setup.main)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.3)
            assert not setup.VENV.exists()
        assert second.result() == 0
    assert "waiting for it" in capsys.readouterr().out


def test_a_clone_that_is_the_working_directory_finds_its_kernels():
    """Only the two folders tell where they are, as with an installed package."""
    code = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
    code += "import vllm_dymoe.kernels.native as found; print(found.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=SOURCE.parents[1], capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()) == SOURCE.parents[1] / "kernels" / "native.py"


@pytest.mark.skipif(native.load() is None, reason="the native library was not built")
def test_a_library_of_other_sources_is_refused(tmp_path, monkeypatch):
    """A checkout that moved on gave wrong answers with the library of before."""
    built = native.SOURCES.with_name("_cpu.so")
    native.Library(built, "AVX2")
    moved = shutil.copytree(native.SOURCES, tmp_path / "cpu")
    (moved / "planner.h").write_text((moved / "planner.h").read_text() + "// another line\n")
    monkeypatch.setattr(native, "SOURCES", moved)
    with pytest.raises(OSError, match="other sources"):
        native.Library(built, "AVX2")


def test_a_source_distribution_has_every_header_of_the_native_library():
    """If a header is missing, the compiler fails, and no library is installed."""
    root = Path(__file__).parents[1]
    (module,) = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    assert sorted(module["depends"]) == sorted(str(path.relative_to(root)) for path in root.glob("kernels/cpu/*.h"))


def test_image_processors_can_be_imported_beside_a_cpu_build_of_torch():
    """torch calls the entry point; without it, torchvision's CUDA build fails."""
    torchvision = pytest.importorskip("torchvision")
    import torch
    from torchvision.transforms.v2 import functional

    picture = torch.zeros(3, 8, 8, dtype=torch.uint8)
    assert functional.resize(picture, [4, 4]).shape == (3, 4, 4)
    if not torchvision.extension._has_ops():  # operators are declared, but cannot compute
        boxes, scores = torch.zeros(1, 4), torch.zeros(1)
        with pytest.raises(NotImplementedError, match="nms"):
            torch.ops.torchvision.nms(boxes, scores, 0.5)
