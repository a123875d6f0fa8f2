"""A measured machine: what ``vllm-dymoe serve`` chooses by.

Its rates are measured, not taken from data sheets.

    python -m vllm_dymoe.plan.machine '{"folder": "/data", "hidden": 2048, "intermediate": 768, "experts": 128}'

prints the rates as JSON. It runs as a process of its own, because a process that has used CUDA cannot start vLLM's.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_dymoe import __version__
from vllm_dymoe.bench.run import rates
from vllm_dymoe.cache.pages import available_host_memory, map_bytes
from vllm_dymoe.cache.store.disk import read_direct, set_direct, storage_of
from vllm_dymoe.cgroups import usable_cores
from vllm_dymoe.durable import close_file, keep_beside, kept_beside, make_folders, read_regular
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat
from vllm_dymoe.kernels import Activation, CpuKernel
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.costs import Costs
from vllm_dymoe.plan.device import Device, ExpertRate, find_device, shares_of_cards
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.routing import group_by_expert
from vllm_dymoe.quantize.dummy import fill_randomly

KEPT = "machines.json"  # file name, in the cache folder
_CARDS, _DRIVER = Path("/proc/driver/nvidia/gpus"), Path("/proc/driver/nvidia/version")
_NODES = Path("/sys/devices/system/node")
_DISK_BYTES, _DISK_PIECE, _DISK_DEPTH = 64 << 20, 1 << 20, 8
_EXPERT_BYTES = 256 << 20  # of random experts at most: more than caches hold
_ROWS = 1, 16, 256  # tokens of the steps that are timed
_MATRIX = 4096  # of the product that shows a GPU's operations per second
_LEFT_SHARE, _LEFT_LEAST = 10, 2 << 30  # of host memory, what stays free, as ``host_store`` "auto" has it


class Gpu(BaseModel):
    """One GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """As its driver names it."""
    memory: int = Field(gt=0)
    """Bytes."""
    link: float = Field(gt=0)
    """Bytes per second of a copy from pinned host memory."""
    bandwidth: float = Field(gt=0)
    """Bytes per second of reading its memory."""
    compute: float = Field(gt=0)
    """Operations per second of a bfloat16 product."""


class Machine(BaseModel):
    """What a start can use, measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    gpus: tuple[Gpu, ...] = ()
    """Those that vLLM sees; none for its CPU build."""
    cores: int = Field(gt=0)
    """Cores that this container may use."""
    numa_nodes: int = Field(default=1, gt=0)
    """Nodes of memory."""
    host_memory: int = Field(gt=0)
    """Bytes that can be allocated without swapping, within the container's limit."""
    memory_rate: float = Field(gt=0)
    """Bytes per second of reading host memory with all cores."""
    kernel: str
    """The CPU's kernel, by its instruction set."""
    experts: tuple[ExpertRate, ...] = Field(min_length=1)
    """What that kernel reaches with 4-bit experts of one size, by tokens of a step."""
    disk: float | None = Field(default=None, gt=0)
    """Bytes per second that the disk of the packed experts reads past the page cache; None in a file system that
    cannot, such as one in memory."""

    @property
    def spare_memory(self) -> int:
        """Bytes of host memory for this project, after what stays free for others."""
        return max(0, self.host_memory - max(_LEFT_LEAST, self.host_memory // _LEFT_SHARE))

    @property
    def costs(self) -> Costs:
        """The host's time in addition to products and copies."""
        return Costs.measured() if self.gpus else Costs.on_cpu()

    def device(self) -> Device:
        """Return the GPU with what the host adds; without a GPU, return the CPU.

        A CPU's experts are in its own memory.
        """
        disk = float("inf") if self.disk is None else self.disk
        if not self.gpus:
            compute = max(rate.compute for rate in self.experts)
            return Device(
                "CPU", self.host_memory, self.memory_rate, compute, float("inf"), disk=disk, rates=self.experts
            )
        gpu = self.gpus[0]
        try:
            card = replace(find_device(gpu.name, None), memory=gpu.memory, link=gpu.link)
        except ConfigError:  # no data sheet: by what was measured
            card = Device(
                gpu.name, gpu.memory, gpu.bandwidth, gpu.compute, gpu.link, decides=True,
                rates=shares_of_cards(gpu.bandwidth, gpu.compute),
            )  # fmt: skip
        return replace(card, disk=disk, host=self.experts[0].read)


@dataclass(frozen=True)
class Probe:
    """What is measured.

    These are the disk of a folder, and the CPU's kernel with experts of one size.
    """

    folder: str
    hidden: int
    intermediate: int
    experts: int  # of the whole model

    @property
    def key(self) -> str:
        """What a measurement is stored under.

        Rates of another machine, card, driver or disk do not apply.
        """
        cards = [path.read_text() for path in sorted(_CARDS.glob("*/information"))] if _CARDS.is_dir() else []
        driver = [_DRIVER.read_text()] if _DRIVER.is_file() else []
        visible, size = os.environ.get("CUDA_VISIBLE_DEVICES", ""), (self.hidden, self.intermediate, self.experts)
        software = f"torch {torch.__version__}, vllm-dymoe {__version__}"
        return " ".join(
            f"{storage_of(Path(self.folder))}; {cards} {driver} {visible}; {usable_cores()} cores; {software}; "
            f"{size}".split()
        )


def machine_here(probe: Probe, kept: Path, *, retune: bool = False) -> Machine:
    """Return this machine.

    Its rates are as an earlier start measured them, or measured now; its memory is as it is now.

    Raises:
        ConfigError: the rates cannot be measured.
    """
    make_folders(Path(probe.folder))
    found = None if retune else kept_beside(kept, probe.key, Machine)
    if found is None:
        command = [sys.executable, "-m", "vllm_dymoe.plan.machine", json.dumps(vars(probe))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"this machine could not be measured:\n{done.stderr[-2000:]}")
        found = Machine.model_validate_json(done.stdout.splitlines()[-1])
        make_folders(kept.parent)
        keep_beside(kept, probe.key, found)
    return found.model_copy(update={"host_memory": available_host_memory()})


def read_machine(path: Path) -> Machine:
    """Read a description of a machine.

    Raises:
        ConfigError: it is none; the message names the first field that is wrong.
    """
    try:
        return Machine.model_validate_json(read_regular(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}).") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ConfigError(f"{path} does not describe a machine: {where}: {first['msg']}.") from error


def measure(probe: Probe) -> Machine:
    """Measure this machine, for a few seconds.

    CUDA is used where there is a GPU.
    """
    told = rates()
    kernel, experts = _kernel_rates(probe)
    cuda = torch.cuda.is_available()
    read, link = float(told["memory_bytes_per_second"]), float(told["link_bytes_per_second"])
    gpus: list[Gpu] = []
    for number in range(torch.cuda.device_count() if cuda else 0):
        about = torch.cuda.get_device_properties(number)
        gpus.append(
            Gpu(name=about.name, memory=about.total_memory, link=link, bandwidth=read, compute=_gpu_compute(number))
        )
    nodes = len(list(_NODES.glob("node[0-9]*"))) or 1
    return Machine(
        gpus=tuple(gpus), cores=usable_cores(), numa_nodes=nodes, host_memory=max(1, available_host_memory()),
        memory_rate=_host_rate() if cuda else read, kernel=kernel, experts=experts, disk=_disk_rate(Path(probe.folder)),
    )  # fmt: skip


def _fastest(action: Callable[[], object], times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _host_rate() -> float:
    memory = torch.ones(_EXPERT_BYTES // 4)
    return memory.nbytes / _fastest(memory.sum)


def _gpu_compute(number: int) -> float:
    one = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=f"cuda:{number}")

    def multiply() -> None:
        torch.mm(one, one)
        torch.cuda.synchronize(number)

    return float(2 * _MATRIX**3 / _fastest(multiply, 10))


def _kernel_rates(probe: Probe) -> tuple[str, tuple[ExpertRate, ...]]:
    """Return the CPU kernel's name and its rates.

    They are measured with random 4-bit experts that are in memory as a model's are.
    """
    fmt = ExpertFormat(probe.hidden, probe.intermediate, encoding_of(4), 64, torch.bfloat16)
    count = max(8, min(probe.experts, _EXPERT_BYTES // fmt.nbytes))
    arena, generator = map_bytes(count * fmt.nbytes).view(count, fmt.nbytes), torch.Generator().manual_seed(0)
    experts = []
    for packed in arena:
        for matrix, place in zip(fmt.matrices, fmt.sections, strict=True):
            fill_randomly(matrix, packed[place], generator)
        experts.append(fmt.view(packed))
    kernel, weights, found = CpuKernel(), 3 * probe.hidden * probe.intermediate, list[ExpertRate]()
    for rows in _ROWS:
        x = torch.randn(rows, probe.hidden, generator=generator).bfloat16()
        out, seconds, active = x.new_empty(rows * 8, probe.hidden), list[float](), 0
        for _ in range(3 if rows > 16 else 20):
            ids = torch.rand(rows, count, generator=generator).topk(8, dim=1).indices
            grouped = group_by_expert(ids.numpy())
            plan = LayerPlan.of_experts(grouped, [experts[expert] for expert in grouped.experts])
            begin = time.perf_counter()
            kernel.begin(x, plan, out, Activation.SILU)
            kernel.compute(range(len(grouped.experts)))
            seconds.append(time.perf_counter() - begin)
            active = len(grouped.experts)
        took = sorted(seconds)[len(seconds) // 2]
        found.append(ExpertRate("cpu", weights, rows, False, active * fmt.nbytes / took, 16 * rows * weights / took))
    return kernel.name, tuple(found)


def _disk_rate(folder: Path) -> float | None:
    """Return the rate in bytes per second at which a disk reads a new file.

    Random pieces are read, several at once, past the page cache. None if the file system cannot bypass it.
    """
    with tempfile.TemporaryFile(dir=folder) as temporary:
        temporary.write(os.urandom(_DISK_BYTES))
        temporary.flush()
        os.fsync(temporary.fileno())
        file = os.dup(temporary.fileno())
        try:
            if not set_direct(file, direct=True):
                return None

            def read(place: int) -> int:
                return read_direct(file, map_bytes(_DISK_PIECE), place)

            with ThreadPoolExecutor(_DISK_DEPTH) as pool:
                seconds = _fastest(lambda: list(pool.map(read, range(0, _DISK_BYTES, _DISK_PIECE))), 2)
        finally:
            close_file(file)
    return _DISK_BYTES / seconds


if __name__ == "__main__":
    asked: dict[str, Any] = json.loads(sys.argv[1])
    print(measure(Probe(**asked)).model_dump_json())
