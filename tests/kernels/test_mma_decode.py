"""Decode on tensor cores against float64 and its plain twin.

Gluon has no interpreter, so what runs here, on the host, is the PTX that the installed Triton makes for a card.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.benchmarks import modules_of
from vllm_dymoe.experts.encoding import E8, E8_NESTED, FP8, MXFP4, NESTED, NVFP4, STEPS, encoding_of
from vllm_dymoe.kernels import Activation, Curve, Decode

pytest.importorskip("triton")

from vllm_dymoe.experts.format import DownFormat, ExpertFormat
from vllm_dymoe.kernels.cpu_queue import QueueShape
from vllm_dymoe.kernels.lattice import rotate
from vllm_dymoe.kernels.triton import TritonKernel
from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue
from vllm_dymoe.kernels.triton.launch import fastest_decode
from vllm_dymoe.kernels.triton.mma_twin import mma_rows_plain
from vllm_dymoe.kernels.triton.start import Overlap
from vllm_dymoe.kernels.triton.tiles import choose_tiles
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.table import Table

TWIN = 1e-3
"""Of a norm: sums that differ in their last bits round to another 16-bit number here and there, most often at 8 bits,
whose operands are 2,176 larger than their codes."""

ENCODINGS = [*STEPS.values(), *NESTED.values(), MXFP4, NVFP4, FP8, E8, E8_NESTED]
LOW = [NESTED[4], NESTED[8], E8_NESTED]


@pytest.fixture(scope="module")
def host():
    with modules_of("gpu"):
        import launched

        yield launched


def as_its_twin(launch, ran):
    """Return the relative distance from the plain twin."""

    def products(x, packed):
        encoding, group = packed.format.encoding, packed.format.group_size
        strip = min(group, 32 if encoding is FP8 else 128 if encoding is STEPS[2] else 64)
        sums = mma_rows_plain(x, packed, split=launch.split, warps=launch.warps, strip=strip)
        return sums if packed.bias is None else sums + packed.bias.float()

    gate, up, down = ran.expert
    x = rotate(ran.x.float(), up.format.rotation).to(ran.x.dtype) if up.format.rotation else ran.x
    inner = launch.activation.gated(products(x, gate), products(x, up))
    if down.format.rotation:
        inner = rotate(inner, down.format.rotation)
    want = products(inner.to(ran.x.dtype), down).to(ran.x.dtype) * (0.5 if launch.weighted else 1.0)
    return float((ran.out.float() - want.float()).norm() / want.norm())


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
def test_every_encoding_is_right_fetched_weighted_and_in_parts(host, encoding):
    launch = host.Launch(encoding, 3, split=2, fetch=True, weighted=True, tensor_cores=8)
    ran = host.ran(launch, host.Host(90))
    assert ran.error < host.TOLERANCE
    assert as_its_twin(launch, ran) < TWIN


@pytest.mark.parametrize("encoding", LOW, ids=lambda encoding: encoding.name)
def test_base_slices_alone_are_right(host, encoding):
    launch = host.Launch(encoding, 2, tensor_cores=8, low=True)
    ran = host.ran(launch, host.Host(90))
    assert ran.error < host.TOLERANCE
    assert as_its_twin(launch, ran) < TWIN


@pytest.mark.parametrize(
    "options",
    [
        {"group": 32, "encoding": STEPS[2], "sizes": (96, 40)},
        {"group": 32, "encoding": NESTED[4]},
        {"group": 128, "encoding": STEPS[4], "warps": 8},
        {"group": 256, "encoding": STEPS[2], "sizes": (512, 72)},
        {"group": 256, "encoding": NESTED[8], "sizes": (264, 64)},
        {"dtype": torch.float16},
        {"dtype": torch.float16, "encoding": FP8},
        {"dtype": torch.float16, "encoding": NVFP4},
        {"dtype": torch.float16, "encoding": STEPS[8]},
        {"dtype": torch.float16, "encoding": E8_NESTED},
        {"bias": True, "act_order": True, "integer_zeros": True},
        {"down": DownFormat(STEPS[4], 128, integer_zeros=True, act_order=True), "fetch": True, "bias": True},
        {"down": DownFormat(STEPS[8], 32), "weighted": True},
        {"activation": Activation(Curve.GELU_TANH), "sizes": (256, 512)},
    ],
    ids=str,
)
def test_other_formats_are_right(host, options):
    launch = host.Launch(**{"encoding": STEPS[4], "tokens": 2, "tensor_cores": 8, **options})
    ran = host.ran(launch, host.Host(90))
    assert ran.error < host.TOLERANCE
    assert as_its_twin(launch, ran) < TWIN


@pytest.mark.parametrize("encoding", [STEPS[4], NESTED[4], E8], ids=lambda encoding: encoding.name)
def test_a_token_has_the_same_bits_alone_and_beside_others(host, encoding):
    launch = host.Launch(encoding, 1, tensor_cores=8)
    alone = host.ran(launch, host.Host(90)).out
    for tokens, most in ((5, 8), (8, 16), (11, 16), (16, 16), (17, 16)):
        beside = host.ran(replace(launch, tokens=tokens, tensor_cores=most, fetch=tokens > 8), host.Host(90))
        assert beside.error < host.TOLERANCE
        assert torch.equal(beside.out[:1], alone), (tokens, most)


def swapped_bytes(ptx):
    return ptx.replace("0x5410;", "0x5140;")


def another_level(ptx):
    return ptx.replace("0x43004300", "0x43044300")  # 132 for 128 in upper halves


def no_rest(ptx):
    """Leave out the product that subtracts the offset of the operands' encoding."""
    lines, found = ptx.splitlines(), [at for at, line in enumerate(ptx.splitlines()) if "mma.sync" in line]
    del lines[found[0]]
    return "\n".join(lines)


def another_row(ptx):
    """Swap fragments, so that rows are wrong."""
    return re.sub(r"(mma\.sync\S+\s+\{[^}]*\}, \{ )(\S+), (\S+),", r"\1\3, \2,", ptx)


@pytest.mark.parametrize("fault", [swapped_bytes, another_level, no_rest, another_row])
def test_faults_in_the_compiled_code_are_found(host, fault):
    def changed(ptx):
        assert fault(ptx) != ptx, "the compiler writes this otherwise now"
        return fault(ptx)

    assert not host.ran(host.Launch(STEPS[4], 1, tensor_cores=8), host.Host(90, changed)).error < host.TOLERANCE


def ordered(host, kernel, overlap, changed=str, **options):
    """Return the order of a kernel's accesses, and its early ones that are wrong.

    These are of what the launch before writes.
    A planner is the launch before gate and up, and gate and up are the one before down.
    """
    options = {**host.SHARED, "dependent": True, "overlap": overlap, **options}

    def fault(ptx):
        return changed(ptx) if f".entry {kernel}_kernel" in ptx else ptx

    memory = host.Host(90, fault)
    ran = host.ran(host.Launch(STEPS[4], 3, tensor_cores=8, **options), memory)
    assert ran.error < host.TOLERANCE
    order, written = memory.order[kernel], ran.written if kernel == "mma_down" else ran.planned
    return order, {at for at in order.early for some in written if at in some}


WAIT = r"griddepcontrol\.wait\s*;"


def no_wait(ptx):
    return re.sub(WAIT, "", ptx)


def late_wait(ptx):
    """Wait at the end only."""
    return re.sub(r"\bret;", "griddepcontrol.wait;\nret;", no_wait(ptx))


def wait_in_first_item(ptx):
    skipping = "mov.u32 %r99999, %ctaid.y;\nsetp.ne.u32 %p99999, %r99999, 0;\n@%p99999 bra $past;\n"
    return re.sub(WAIT, f"{skipping}griddepcontrol.wait;\n$past:", ptx)


def test_down_fetches_and_touches_nothing_else_before_gate_and_up_have_ended(host):
    order, early = ordered(host, "mma_down", Overlap.START)
    assert order.waits
    assert not early
    assert ordered(host, "mma_down", Overlap.START, no_wait)[1], "a wait that is missing is not seen"


@pytest.mark.parametrize(("tokens", "most"), [(3, 8), (11, 16)])
def test_down_loads_codes_of_resident_experts_before_gate_and_up_have_ended(host, tokens, most):
    memory = host.Host(90)
    launch = host.Launch(NESTED[4], tokens, split=2, weighted=True, tensor_cores=most, dependent=True)
    ran = host.ran(launch, memory)
    assert ran.error < host.TOLERANCE
    order = memory.order["mma_down"]
    assert order.waits
    for section in ran.packed:
        assert any(at in section for at in order.early)
    assert not any(at in some for some in ran.written for at in order.early)


def test_gate_and_up_access_nothing_before_their_plan_is_complete(host):
    """They also keep down from beginning, because it reads the plan before it waits."""
    order, _ = ordered(host, "mma_gate_up", Overlap.START)
    assert order.waits
    assert not order.releases_first
    assert not order.early


def test_gate_and_up_wait_at_their_end_for_a_launch_that_writes_nothing_of_theirs(host):
    order, planned = ordered(host, "mma_gate_up", Overlap.WHOLE)
    assert order.waits
    assert planned, "the plan was complete before"


@pytest.mark.parametrize(
    ("fault", "waits", "releases_first", "reads_early"),
    [(no_wait, False, True, True), (late_wait, True, True, True), (wait_in_first_item, False, True, True)],
)
def test_faults_in_the_order_of_launches_are_found(host, fault, waits, releases_first, reads_early):
    order, planned = ordered(host, "mma_gate_up", Overlap.START, fault)
    assert (order.waits, order.releases_first, bool(planned)) == (waits, releases_first, reads_early)


def test_the_reader_multiplies_fragments_as_the_isa_says(host):
    """One mma of one warp, whose fragments are written lane by lane here.

    They are laid out as in PTX ISA 9.7.14.5.8.
    """
    loads = "\n".join(f"ld.global.b32 %r{n}, [%rd1+{128 * n}];" for n in range(6))
    sums = "\n".join(f"ld.global.b32 %r{n}, [%rd1+{128 * n}];" for n in range(6, 10))
    stores = "\n".join(f"st.global.b32 [%rd1+{128 * n}], %r{n + 4};" for n in range(6, 10))
    name = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    ptx = f""".entry k(
ld.param.b64 %rd0, [k_param_0];
mov.u32 %r20, %tid.x;
mul.wide.u32 %rd2, %r20, 4;
add.s64 %rd1, %rd0, %rd2;
{loads}
{sums}
{name} {{ %r10, %r11, %r12, %r13 }}, {{ %r0, %r1, %r2, %r3 }}, {{ %r4, %r5 }}, {{ %r6, %r7, %r8, %r9 }};
{stores}
ret;
// -- End"""
    generator = np.random.default_rng(0)
    a, b, c = (generator.integers(-8, 9, shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    memory = np.zeros(1 << 12, np.uint8)
    words = memory.view(np.uint32).reshape(-1, 32)
    halves = lambda low, high: (low.view(np.uint32) >> 16) | (high.view(np.uint32) >> 16 << 16)  # noqa: E731
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for n, (row, column) in enumerate(((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
            words[n, lane] = halves(a[row, column], a[row, column + 1])
        for n, row in enumerate((2 * t, 2 * t + 8)):
            words[4 + n, lane] = halves(b[row, g], b[row + 1, g])
        for n, (row, column) in enumerate(((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1))):
            words[6 + n, lane] = c[row, column].view(np.uint32)
    host.Program(ptx, memory, [0], 32).run()
    want = a @ b + c
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for n, (row, column) in enumerate(((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1))):
            assert words[6 + n, lane].view(np.float32) == want[row, column]


def test_tiles_say_how_many_positions_are_computed_at_a_time():
    tiles = choose_tiles(90, 2048, 768)
    assert (tiles.gate_up.positions, tiles.gate_up.tensor_cores) == (2, 0)
    for tokens, most in ((1, 8), (8, 8), (9, 16), (16, 16)):
        of_tensor_cores = tiles.on_tensor_cores(tokens)
        assert of_tensor_cores.gate_up.positions == of_tensor_cores.down.positions == most
        assert of_tensor_cores.decode_tokens == most
    with pytest.raises(ValueError, match="tensor_cores is 4"):
        replace(tiles.down, tensor_cores=4)


@pytest.mark.parametrize(
    ("bits", "tensor_cores"), [((4, 2), True), ((16, 4), False)], ids=["integers", "beside 16 bits"]
)
def test_a_step_takes_the_fastest_kernels_that_all_its_experts_have(bits, tensor_cores):
    formats = [ExpertFormat(128, 64, encoding_of(some), 32, torch.bfloat16).matrices for some in bits]
    step = TritonKernel("cpu", decode=Decode.TENSOR_CORES).small_batch_step(formats, Activation.SILU)
    assert bool(step.tiles.gate_up.tensor_cores) == bool(step.tiles.down.tensor_cores) == tensor_cores
    assert step.decode is (Decode.TENSOR_CORES if tensor_cores else Decode.PLAIN)


class Enqueued(TorchDispatchMode):
    """Note what a step enqueues: kernels, and operations of torch that compute."""

    def __init__(self):
        super().__init__()
        self.launches = []

    def start(self, kernel, grid, tensors, constants, options):
        self.launches.append((kernel.__name__.removesuffix("_kernel"), constants, options))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in function.__name__:
            self.launches.append((function.__name__, {}, {}))
        return function(*args, **(kwargs or {}))


def enqueued(decode, tokens=1, encoding=STEPS[4], *, on_cpu=False, from_disk=False, weights_on_input=False):
    """Return the launches of a step: names, constants and options."""
    hidden, intermediate, top_k, experts = 128, 64, 2, 4
    kernel, fmt = TritonKernel("cpu", decode=decode), ExpertFormat(hidden, intermediate, encoding, 32, torch.bfloat16)
    turn, present = torch.zeros(3).long(), torch.zeros(tokens * top_k).int()
    queue = DeviceQueue(QueueShape(2, tokens, top_k, experts, hidden, torch.bfloat16), turn, present)
    step = kernel.small_batch_step([fmt.matrices], Activation.SILU, queue if from_disk else None)
    table = vars(Table.allocate(1, experts, rows=tokens, top_k=top_k, depth=1, device="cpu"))
    plan = LayerPlan.allocate(tokens, top_k, experts, "cpu").tensors
    x, ids, rows = torch.zeros(tokens, hidden).bfloat16(), torch.zeros(tokens, top_k).int(), torch.ones(1).int()
    given = table, 0, x, ids, torch.zeros(tokens, top_k), rows, plan, x.clone(), queue if on_cpu else None
    with Enqueued() as mode:
        step.run(*given, weights_on_input=weights_on_input, start=mode.start)
    return mode.launches


@pytest.mark.parametrize("decode", Decode)
@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_a_small_batch_launches_what_was_chosen(decode, tokens):
    launches = enqueued(decode, tokens)
    names = [name for name, *_ in launches]
    if decode is Decode.PLAIN:
        assert names == ["decide", "gate_up", "down"]
        return
    assert names == ["decide", "mma_gate_up", "mma_down"]
    for _, constants, _ in launches[1:]:
        assert constants["MOST"] == (8 if tokens <= 8 else 16)
        assert constants["DEPENDENT"] == (decode >= Decode.DEPENDENT)
    overlaps = [options.get("launch_pdl", False) for *_, options in launches]
    assert overlaps == [False, decode is Decode.CHAINED, decode >= Decode.DEPENDENT]


@pytest.mark.parametrize("weights_on_input", [False, True])
@pytest.mark.parametrize("encoding", [STEPS[4], E8], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize(
    ("misses", "before", "overlap"),
    [
        ({}, ["decide"], Overlap.START),
        ({"on_cpu": True}, ["decide", "post"], Overlap.WHOLE),
        ({"from_disk": True}, ["decide", "ask", "wait", "take_sources"], Overlap.START),
        ({"on_cpu": True, "from_disk": True}, ["decide", "ask", "wait", "take_sources", "post"], Overlap.WHOLE),
    ],
)
def test_only_adjacent_launches_overlap(misses, before, overlap, encoding, weights_on_input):
    launches = enqueued(Decode.CHAINED, encoding=encoding, weights_on_input=weights_on_input, **misses)
    names = [name for name, *_ in launches]
    first = names.index("decide")
    last = first + len(before)
    assert names[first : last + 2] == [*before, "mma_gate_up", "mma_down"]
    alone, followed = [False] * len(before), [False] * (len(before) - 1)
    assert [options.get("launch_pdl", False) for *_, options in launches[first : last + 2]] == [*alone, True, True]
    assert [constants.get("FOLLOWED", False) for _, constants, _ in launches[first:last]] == [*followed, True]
    assert launches[last][1]["OVERLAP"] == overlap


@pytest.mark.parametrize(
    ("precisions", "architecture", "fastest"),
    [
        ({4, 2}, 75, Decode.PLAIN),
        ({4, 2}, 80, Decode.TENSOR_CORES),
        ({4, 2}, 89, Decode.TENSOR_CORES),
        ({E8.tag}, 90, Decode.CHAINED),
        ({16, 4}, 90, Decode.PLAIN),
    ],
)
def test_cards_and_codes_without_such_a_kernel_have_none(precisions, architecture, fastest):
    assert fastest_decode(precisions, architecture) is fastest
