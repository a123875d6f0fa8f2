"""Child processes that begin with vLLM imported, instead of "spawn".

vLLM's CPU build starts its engine core, workers and front ends with "spawn", and each of them imports vLLM again, which
takes 8 s of a core. Here they are forked from a server process that has imported vLLM and does nothing else. As with
"spawn", a child gets its parent's environment, standard output and error, and shares no memory with it.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import context, forkserver, reduction
from typing import Any
from unittest import mock

_PRELOADED = "tests.support.preloaded"
_SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]


class _Surroundings:
    """The parent's environment, outputs and fork server.

    A child that unpickles them adopts them.
    """

    def __init__(self, outputs: tuple[int, int]) -> None:
        self._outputs = outputs

    def __reduce__(self) -> tuple[Any, ...]:
        _SERVER.ensure_running()
        server = {name: value for name, value in vars(_SERVER).items() if name.endswith(("_address", "_authkey"))}
        return _adopt, (dict(os.environ), server, *map(reduction.DupFd, self._outputs))


def _adopt(environment: dict[str, str], server: dict[str, Any], *outputs: Any) -> None:
    if _PRELOADED not in sys.modules:
        raise ImportError(f"the fork server could not import {_PRELOADED}; import it to see why")
    os.environ.clear()
    os.environ.update(environment)
    for number, output in enumerate(outputs, 1):
        descriptor = output.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    vars(_SERVER).update(server, ensure_running=lambda: None)
    instead_of_spawn().start()


def _process(surroundings: None, state: dict[str, Any]) -> "ForkedProcess":
    process = ForkedProcess.__new__(ForkedProcess)
    process.__dict__.update(state)
    return process


class ForkedProcess(context.ForkServerProcess):
    outputs = 1, 2  # descriptors of what becomes the child's standard output and error

    def __reduce__(self) -> tuple[Any, ...]:
        # The environment first: unpickling the state imports modules that read it.
        return _process, (_Surroundings(self.outputs), self.__dict__)


class ForkedContext(context.ForkServerContext):
    _name = "spawn"
    Process = ForkedProcess  # type: ignore[assignment]


FORKED = ForkedContext()
_SERVER.set_forkserver_preload([_PRELOADED])


def instead_of_spawn() -> Any:
    """Return a patch with which multiprocessing forks when asked to spawn."""
    return mock.patch.dict(context._concrete_contexts, {"spawn": FORKED})  # type: ignore[attr-defined]


def started(target: Callable[..., Any], *arguments: Any, output: Any, env: dict[str, str]) -> ForkedProcess:
    """Start a process whose output goes to a file."""
    process = ForkedProcess(target=target, args=arguments)
    process.outputs = output.fileno(), output.fileno()
    with mock.patch.dict(os.environ, env, clear=True):
        process.start()
    return process


def run_module(command: Sequence[str], stdout: Any, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Run ``[python, "-m", module, *arguments]`` like ``subprocess.run``, but forked.

    Standard output and standard error both go to ``stdout``.
    """
    process = started(_run_module, list(command[2:]), output=stdout, env=env)
    process.join()
    return subprocess.CompletedProcess(command, process.exitcode)


def _run_module(words: list[str]) -> None:
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
