"""A container's limits: this process's control groups, cores and threads."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# CPU quota in microseconds of all cores per period: control groups version 2 ("max 100000"), then version 1.
_QUOTA = "cpu.max"
_QUOTA_AND_PERIOD = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def usable_cores(cores: int | None = None) -> int:
    """Return the number of cores that this process may keep busy.

    A container's limit bounds the cores of the process's affinity, or ``cores`` instead.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    for group in groups():
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            if (group / _QUOTA).exists():
                quota, period = map(int, (group / _QUOTA).read_text().split())
            else:
                quota, period = (int((group / name).read_text()) for name in _QUOTA_AND_PERIOD)
            if quota > 0 and period > 0:  # -1 means no limit
                cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def threads_set() -> str:
    """Return what the user has set of a CPU server's threads; empty if nothing.

    VLLM_CPU_OMP_THREADS_BIND names cores, or is "nobind" with OMP_NUM_THREADS. Without it vLLM itself sets
    OMP_NUM_THREADS in each worker.
    """
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    return {"auto": "", "nobind": os.environ.get("OMP_NUM_THREADS", "")}.get(binding, binding)


def threads_within_quota(threads: int, ranks: int = 1) -> int:
    """Return how many of its threads a rank on a CPU keeps.

    A container that has used up its share of a period stalls until the next one, so its ranks share its ``cpu.max``.
    A user's own setting is kept.
    """
    return threads if threads_set() else max(1, usable_cores(threads * ranks) // ranks)


def cores_of_process() -> set[int]:
    """Return the cores on which any thread of this process may run.

    vLLM's CPU worker binds each of its threads to one core, and threads that it starts would inherit that core.
    """
    cores = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                cores |= os.sched_getaffinity(int(task))
    return cores


def groups() -> Iterator[Path]:
    """Yield the control groups that may limit this process.

    These are its own groups and their ancestors, as far as they are mounted.
    """
    mounted = {"": _CGROUP} | {name: _CGROUP / name for name in ("memory", "cpu", "cpu,cpuacct")}
    yield from mounted.values()
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        root = mounted.get(controllers)
        if root is not None:
            own = root / path.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(root) and group != root)
