"""The project as a package: version, imports, wheel, and rules of ``make check``."""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import vllm_dymoe

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def run(*command, cwd=ROOT, **environment):
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False,
        env=os.environ | environment,
    )  # fmt: skip


def folder_of(package):
    return ROOT / PROJECT["tool"]["setuptools"]["package-dir"].get(package, package.replace(".", "/"))


def test_the_version_is_the_same_everywhere():
    assert vllm_dymoe.__version__ == PROJECT["project"]["version"]
    assert f"## [{vllm_dymoe.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


SERVING = ("../kernels", "cache", "executor", "planner", "prefetch", "server", "vllm_plugin")


def test_tensors_that_serve_name_their_dtype():
    """While vLLM loads a model, torch's default dtype is the model's.

    A tensor without a dtype would have another size then.
    """
    unnamed = []
    for path in (path for folder in SERVING for path in (ROOT / "vllm_dymoe" / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            makes = ast.unparse(node.func) in {
                f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "rand", "randn")
            }
            empty = any(isinstance(size, ast.Constant) and size.value == 0 for size in node.args)
            if makes and not empty and not any(keyword.arg in (None, "dtype") for keyword in node.keywords):
                unnamed.append(f"{path.resolve().relative_to(ROOT)}:{node.lineno}")
    assert unnamed == []


def test_docstrings_begin_with_a_short_summary():
    """The first line stands alone in editors, listings and the rendered API (PEP 257)."""
    long = []
    folders = ("vllm_dymoe", "kernels", "tests", "benchmarks", "tools")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        helps = path == ROOT / "vllm_dymoe/cli/app.py"  # its docstrings are help texts
        if helps or "build" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                summary, _, rest = (ast.get_docstring(node) or "").partition("\n")
                if len(summary) > 80 or (rest and not rest.startswith("\n")):
                    long.append(f"{path.relative_to(ROOT)}: {summary}")
    assert long == []


def test_importing_the_package_imports_nothing_heavy():
    program = (
        "import sys, vllm_dymoe; print(sorted({'torch', 'vllm', 'transformers', 'pydantic'} & sys.modules.keys()))"
    )
    result = run(sys.executable, "-c", program)
    assert result.stdout == "[]\n", result.stdout + result.stderr


def test_entry_points_are_installed_and_lead_somewhere():
    entries = {entry.name: entry for entry in importlib.metadata.distribution("vllm-dymoe").entry_points}
    assert entries["dymoe"].group == "vllm.general_plugins"
    assert entries["dymoe"].load() is vllm_dymoe.register
    assert entries["vllm-dymoe"].group == "console_scripts"
    assert callable(entries["vllm-dymoe"].load())


def test_every_folder_with_code_is_a_declared_package():
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "vllm_dymoe").rglob("__init__.py")}
    found |= {
        ".".join(("vllm_dymoe", *path.parent.relative_to(ROOT).parts))
        for path in (ROOT / "kernels").rglob("__init__.py")
    }
    assert found == set(PACKAGES)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Build the source distribution, and return its unpacked folder.

    It is built from a copy, because setuptools leaves folders next to the sources.
    """
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("vllm_dymoe", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    made = run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", target, cwd=source)
    assert made.returncode == 0, made.stdout + made.stderr
    (path,) = target.iterdir()
    shutil.unpack_archive(path, target, filter="data")
    path.unlink()
    (folder,) = target.iterdir()
    return folder


def test_the_source_distribution_holds_what_a_compiler_reads(sdist):
    """Without a header, no wheel built from it would have the native library."""
    assert {path.name for path in (sdist / "kernels/cpu").iterdir()} == {
        path.name for path in (ROOT / "kernels/cpu").iterdir()
    }
    assert (sdist / "LICENSE").exists()


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Build the wheel from the source distribution, and return its path."""
    target, compiler = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("compiler") / "c++"
    # Every instruction set at -O3 takes a minute; make setup compiles them the same way for the tests of kernels.
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O1 -DONLY_PORTABLE\n')
    compiler.chmod(0o755)
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", target)
    built = run(sys.executable, "-m", "pip", "wheel", *options, sdist, CXX=str(compiler))
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.iterdir()
    assert "-py3-none-" in path.name, "one wheel serves every Python"
    return path


def test_the_wheel_holds_every_module_and_little_else(wheel):
    """The small model that the demo serves exists only in the repository."""
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename: info.compress_size for info in archive.infolist()}
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    for package in PACKAGES:
        for path in folder_of(package).glob("*.py"):
            assert f"{package.replace('.', '/')}/{path.name}" in names
    assert ("vllm_dymoe/kernels/_cpu.so" in names) == (shutil.which("g++") is not None)
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        data = [path for pattern in patterns for path in folder_of(package).glob(pattern)]
        assert data
        assert all(f"{package.replace('.', '/')}/{path.relative_to(folder_of(package))}" in names for path in data)
    kinds = (".py", ".json", ".html", ".css", ".js", "/_cpu.so")
    assert all(".dist-info/" in name for name in names if not name.endswith(kinds))
    assert all(name.startswith("vllm_dymoe") for name in names)
    assert sum(names.values()) < 2**20
    assert f"Version: {vllm_dymoe.__version__}" in metadata


COMPUTES = """
import shutil
import torch
import vllm_dymoe
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import native, dequantize
from vllm_dymoe.kernels.linear import Linear

assert shutil.which("g++") is None and shutil.which("cc") is None
assert native.load() is not None, "there is no native library"
fmt = MatrixFormat(100, 96, encoding_of(4), 32, torch.bfloat16)
packed = fmt.view(torch.randint(0, 100, (fmt.nbytes,), dtype=torch.uint8))
packed.scales_zeros.uniform_(0.5, 1)
x = torch.randn(3, 96).bfloat16()
error = Linear(packed)(x).double() - x.double() @ dequantize(packed, torch.float64).T
assert error.norm() < 0.01 * x.double().norm() * dequantize(packed, torch.float64).norm()
print(vllm_dymoe.__file__, native.load().name)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="the wheel has no native library without a compiler")
def test_the_wheel_works_where_there_is_no_compiler(wheel, tmp_path):
    """The new environment has this one's dependencies, but not its package."""
    environment = tmp_path / "env"
    python = environment / "bin" / "python"
    made = run(sys.executable, "-m", "venv", "--without-pip", environment)
    assert made.returncode == 0, made.stderr
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    (site,) = environment.glob("lib/python*/site-packages")
    # Python reads no .pth file in a folder that another .pth adds, so the editable package stays out.
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    computed = run(python, "-c", COMPUTES, cwd=tmp_path, PATH=str(python.parent))
    assert computed.returncode == 0, computed.stderr
    assert computed.stdout.startswith(str(site))
    helped = run(environment / "bin" / "vllm-dymoe", "--help", cwd=tmp_path, PATH=str(python.parent))
    assert helped.returncode == 0, helped.stderr
    assert "plan" in helped.stdout


PLANTED = {
    "kernels/__init__.py": ("import vllm_dymoe.server", "vllm_dymoe.kernels is not allowed to import"),
    "server/stats.py": ("import vllm.config", "vllm_dymoe.server is not allowed to import vllm"),
    "vllm_plugin/loading.py": (
        "import vllm_dymoe.vllm_plugin.moe_method", "vllm_plugin.loading is not allowed"
    ),
    "another/__init__.py": ("", "vllm_dymoe.another"),
}  # fmt: skip


@pytest.mark.skipif(not LINT_IMPORTS.exists(), reason="import-linter is not installed")
@pytest.mark.parametrize("paths", [["another/__init__.py"], [path for path in PLANTED if "another" not in path]])
def test_an_import_that_points_upwards_is_found(tmp_path, paths):
    """Test the installed package with kernels, and import-linter's own search.

    A folder that belongs to no layer ends the search, so it is tested alone.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vllm_dymoe", tmp_path / "vllm_dymoe", ignore=ignored)
    shutil.copytree(ROOT / "kernels", tmp_path / "vllm_dymoe" / "kernels", ignore=ignored)
    for path in paths:
        file = tmp_path / "vllm_dymoe" / path
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as stream:
            stream.write(f"\n{PLANTED[path][0]}\n")
    result = run(LINT_IMPORTS, "--config", ROOT / "pyproject.toml", "--no-cache", cwd=tmp_path, COLUMNS="120")
    assert result.returncode == 1
    for path in paths:
        assert PLANTED[path][1] in result.stdout
