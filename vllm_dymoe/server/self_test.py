"""A self-test of the kernels on the card that serves.

One layer of random experts is compared with float64. The layer has the model's own sizes, formats, activation and
number of experts, so the test runs the kernels that were compiled for this start. It runs once for each card, driver,
Triton and version of the plugin; the result is stored next to the packed experts.
"""

import hashlib
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import pairwise, product
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vllm_dymoe import __version__, kernels
from vllm_dymoe.cache.store import StoreError
from vllm_dymoe.durable import keep_beside, kept_beside
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import Activation, Decode, Grouped, expert_reference, native
from vllm_dymoe.options import ConfigError, ExpertBudget, Options
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.large_batch import crowded_tokens
from vllm_dymoe.quantize.dummy import RandomStore
from vllm_dymoe.server.expert_server import ExpertServer, Parts

RESULTS = "self-test.json"  # file name, next to a store
_DISTINCT = 2  # number of distinct random experts; the others of the layer share their bytes
_MANY_ROWS = 5 * SMALL_BATCH_ROWS  # with them some experts have 65 rows and more
# Rounding happens three times: the dequantized weight of a tile, the hidden state and the result, at 8 or 11 bits of
# mantissa.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
_WAYS = {
    Decode.PLAIN: "without tensor cores",
    Decode.TENSOR_CORES: "on tensor cores",
    Decode.DEPENDENT: "on tensor cores, where down overlaps gate and up",
    Decode.CHAINED: "on tensor cores, where each launch overlaps the one before it",
}
_GROUPED = {
    Grouped.PLAIN: "by way of shared memory",
    Grouped.IN_REGISTERS: "with weights dequantized in registers",
}
_Misses = Literal["fetch", "compute", "disk"]
"""How a step gets the experts that it misses: over the link, computed by the CPU, or from a disk and over the link."""
_COLUMNS = 64  # columns of a program's strip; a wrong strip is off by 1.4 times its values' size
_STRIP_TOLERANCE = 0.4
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class SelfTest:
    """Result of a self-test.

    Attributes:
        steps: number of compared steps.
        failure: the first error in words; empty if there was none.
        seconds: duration, compilation included.
        skipped: why it could not run; such a result is not stored.
    """

    steps: int
    failure: str
    seconds: float
    skipped: str = ""


def self_test(
    experts: ModelExperts,
    options: Options,
    device: torch.device,
    activations: Sequence[Activation],
    *,
    decode: Decode = Decode.PLAIN,
    grouped: Grouped = Grouped.PLAIN,
    from_disk: bool = False,
    kept: Path | None = None,
    parts: Parts | None = None,
) -> SelfTest:
    """Return the stored result for the kernels on this device, or test them now.

    Args:
        activations: those of the model's layers, each once.
        decode: test this way to compute experts of few tokens.
        grouped: test this way to compute experts of more tokens.
        from_disk: the device cannot read all experts directly, so steps ask the CPU for those that they miss.
        kept: file of results; None to test at every start.
        parts: replaces the device's own.
    """
    variant, ways = _Variant(decode, grouped), _misses(options, activations, from_disk=from_disk)
    key = f"{describe_machine(device)}; {_describe(experts, ways, activations, variant)}"
    if kept is not None and (known := kept_beside(kept, key, SelfTest)) is not None:
        return known
    found = _run(experts, options, device, activations, variant, ways, parts=parts)
    if kept is not None and not found.skipped:
        keep_beside(kept, key, found)
    return found


def tested(
    experts: ModelExperts, options: Options, device: torch.device, activations: Sequence[Activation], *,
    kept: Path | None, say: Callable[[str], object], at_most: tuple[Decode, Grouped], from_disk: bool,
) -> tuple[Decode, Grouped]:  # fmt: skip
    """Return the fastest kernels that pass their self-test on this card.

    The faster ways to decode are tried first, and with each of them the faster ways to compute more tokens. If the test
    cannot run, the result is the plain kernels.

    Args:
        say: gets each sentence for the log.
        at_most: the fastest ways to decode, and to compute more tokens, that may be chosen.
        from_disk: see :func:`self_test`.

    Raises:
        ConfigError: the plain kernels are wrong, too.
    """
    matrices = [matrix for fmt in experts.formats.values() for matrix in fmt.matrices]
    for variant, following in pairwise((*_variants(device, matrices, at_most), None)):
        assert variant is not None
        found = self_test(experts, options, device, activations, **vars(variant), from_disk=from_disk, kept=kept)
        if found.skipped:
            say(f"the self-test of the kernels could not run, because {found.skipped}; they are used untested.")
            return Decode.PLAIN, Grouped.PLAIN
        if not found.failure:
            return variant.decode, variant.grouped
        ways = _misses(options, activations, from_disk=from_disk)
        about = f"{describe_machine(device)}; {_describe(experts, ways, activations, variant)}"
        said = f"the kernels failed their self-test on this card: {found.failure}. For a bug report: {about}."
        if following is None:
            raise ConfigError(f"vllm-dymoe: {said} Nothing was served, because answers would be wrong.")
        say(f"{said} Tried next, which is slower: {following.described}.")
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Variant:
    """Kernels that are tested together."""

    decode: Decode
    grouped: Grouped

    @property
    def described(self) -> str:
        """Return how experts are computed, in words."""
        return f"experts of few tokens {_WAYS[self.decode]}, of more tokens {_GROUPED[self.grouped]}"


def _variants(
    device: torch.device, matrices: Sequence[MatrixFormat], at_most: tuple[Decode, Grouped]
) -> Iterator[_Variant]:
    """Yield the variants for some formats that may be chosen, the fastest first."""
    ways = kernels.decode_kernels(device, matrices), kernels.grouped_kernels(device, matrices)
    for decode, grouped in product(*ways):
        if decode <= at_most[0] and grouped <= at_most[1]:
            yield _Variant(decode, grouped)


def describe_machine(device: torch.device) -> str:
    """Return card, driver and versions, for a bug report and for the file of results."""
    named = platform.processor() or platform.machine()
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        named = f"{about.name} (sm_{about.major}{about.minor})"
    try:
        said = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text())
    except OSError:
        said = None
    # A checkout may change them without a new version.
    sources = sorted((Path(kernels.__file__).parent / "triton").glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]
    return (
        f"{named}, driver {said[0] if said else 'unknown'}, Triton {_triton_version()}, torch {torch.__version__}, "
        f"vllm-dymoe {__version__}+{digest}"
    )


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "unknown"


def _describe(
    experts: ModelExperts, ways: Sequence[_Misses], activations: Sequence[Activation], variant: _Variant
) -> str:
    formats = ", ".join(
        f"{fmt.encoding.name}{', integer zeros' * fmt.integer_zeros}{', act-order' * fmt.act_order}"
        f"{', bias' * fmt.bias}{'' if fmt.encoding.group_size else f' in groups of {fmt.group_size}'}"
        f"{'' if fmt.down is None else f', down {fmt.down}'}"
        for fmt in experts.formats.values()
    )
    fmt = next(iter(experts.formats.values()))
    return (
        f"{experts.num_experts} experts of {fmt.hidden} x {fmt.intermediate}, top {experts.top_k}, {formats}, "
        f"{str(fmt.dtype).removeprefix('torch.')}, {', '.join(map(str, activations))}, {variant.described}, "
        f"misses by {' and '.join(ways)}"
    )


def _run(
    experts: ModelExperts, options: Options, device: torch.device, activations: Sequence[Activation],
    variant: _Variant, ways: Sequence[_Misses], *, parts: Parts | None,
) -> SelfTest:  # fmt: skip
    begin, steps, failure = time.perf_counter(), 0, ""
    try:
        layer = replace(experts, layers=experts.layers[:1], draft_layers=0, curves=(), lost={})
        from_disk = "disk" in ways
        store = RandomStore(layer, _DISTINCT, pinned=device.type == "cuda" and not from_disk, readable=not from_disk)
        with closing(store):
            for misses in ways:
                how = _options(options, misses)
                try:
                    server = ExpertServer(
                        store, how, device, parts=parts, decode=variant.decode, grouped=variant.grouped
                    )
                except ConfigError:
                    if misses != "compute":
                        raise
                    break  # the start cannot have a CPU queue either
                try:
                    for activation, high in product(activations, (True, False) if options.low else (True,)):
                        if options.low:
                            server.set_precision(retention=int(high))
                        work = _Work(store, layer.formats[options.high if high else options.low], activation)
                        for rows in _rows(layer)[: 2 if misses == "compute" else None]:
                            failure = failure or _compare(server, work, rows)
                            steps += 1
                finally:
                    server.close(keep_store=True)
    except (ConfigError, StoreError, torch.OutOfMemoryError) as error:
        return SelfTest(steps, "", time.perf_counter() - begin, skipped=str(error))
    except Exception as error:  # whatever a compiler or a driver raises
        first = (str(error).splitlines() or [""])[0]
        failure = failure or f"step {steps + 1} of the self-test ended with {type(error).__name__}: {first}"
    return SelfTest(steps, failure, round(time.perf_counter() - begin, 2))


def _rows(experts: ModelExperts) -> tuple[int, ...]:
    """Return the rows of the steps, each of which uses other kernels."""
    crowded = crowded_tokens(experts.top_k, experts.num_experts)
    return 1, SMALL_BATCH_ROWS, SMALL_BATCH_ROWS + 1, max(_MANY_ROWS, crowded)


def _misses(options: Options, activations: Sequence[Activation], *, from_disk: bool) -> tuple[_Misses, ...]:
    """Return the ways to serve misses that are tested.

    The CPU computes them, too, if the start may have it compute some. It supports one activation function, and computes
    none that come from a disk.
    """
    if from_disk:
        return ("disk",)
    may = options.misses != "fetch" and len(activations) == 1 and native.load() is not None
    return ("fetch", "compute") if may else ("fetch",)


def _options(options: Options, misses: _Misses) -> Options:
    """Return options under which only transfers and the CPU's misses delay a step.

    Every expert has one precision.
    """
    policy = {"policy": "exact", "policy_options": {"look_ahead": 0}}
    if options.low:
        policy = {"policy": "dymoe", "policy_options": {"look_ahead": 0, "retention": 1, "reuse_high": False}}
    return options.model_copy(
        update=policy
        | {"expert_budget": ExpertBudget(slots="top-k"), "host_store": "auto", "trace": None, "predictor": None}
        | {"misses": "compute" if misses == "compute" else "fetch"}
    )


class _Work:
    """Random tokens of a step, and their exact result.

    The result is computed in float64 on the CPU, for experts at one precision.
    """

    def __init__(self, store: RandomStore, fmt: ExpertFormat, activation: Activation) -> None:
        experts, rows, self.fmt, self.activation = store.experts, max(_rows(store.experts)), fmt, activation
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, fmt.hidden, generator=generator, dtype=torch.float32).to(fmt.dtype)
        # Popularity falls with the expert's number, so that experts with few and many tokens occur.
        liked = torch.rand(rows, experts.num_experts, generator=generator, dtype=torch.float32)
        weights, ids = (liked / (1 + torch.arange(experts.num_experts))).topk(experts.top_k)
        self.weights, self.ids = weights / weights.sum(1, keepdim=True), ids.int()
        self.want = torch.zeros(rows, fmt.hidden, dtype=torch.float64)
        for number in range(_DISTINCT):
            share = (self.weights * (self.ids % _DISTINCT == number)).sum(1, keepdim=True).double()
            self.want += share * expert_reference(self.x, *store.view(number, fmt), activation)


def _compare(server: ExpertServer, work: _Work, rows: int) -> str:
    """Run a step twice, with misses and then with hits.

    Returns:
        a description of what is wrong; empty if nothing is.
    """
    fmt, want = work.fmt, work.want[:rows]
    x, weights, ids = (tensor[:rows].to(server.device) for tensor in (work.x, work.weights, work.ids))
    first, second = (_step(server, x, weights, ids, work.activation).cpu() for _ in range(2))
    name = f"a step of {rows} tokens at {fmt.encoding.name}, {work.activation}"
    on_cpu = server.options.computes_misses  # which rounds differently
    name += ", misses computed by the CPU" * on_cpu + ", misses read from disk" * (server.disk_queue is not None)
    if not on_cpu and not torch.equal(first, second):
        return f"{name}, gave different bits when it was repeated"
    wrong = first.double() - want
    error = float(wrong.norm() / want.norm())
    if not error < _TOLERANCE[fmt.dtype]:
        return f"{name}, is {error:.3g} from float64, where {_TOLERANCE[fmt.dtype]:g} is expected"
    strips = torch.nn.functional.pad(wrong, (0, -fmt.hidden % _COLUMNS)).view(rows, -1, _COLUMNS).norm(dim=2)
    strips /= want.norm() * (_COLUMNS / want.numel()) ** 0.5
    if not strips.max() < _STRIP_TOLERANCE:
        row, strip = divmod(int(strips.argmax()), strips.shape[1])
        return f"{name}, is wrong from row {row}, column {_COLUMNS * strip} on"
    return ""


def _step(server: ExpertServer, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation) -> Tensor:
    """Run one layer's step, on the path that the server uses for it."""
    steps = server.small_batches
    assert steps is not None
    steps.settle()
    steps.tell(len(x))
    run: Callable[..., Tensor] = steps.forward if len(x) <= SMALL_BATCH_ROWS else steps.forward_large
    out = run(0, x, weights, ids, activation)
    steps.tell(0)
    return out
