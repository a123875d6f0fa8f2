"""Every kernel against the float64 reference."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.matrices import (
    ACTIVATIONS,
    KINDS,
    MIXED,
    PackedExpert,
    check_mix,
    compute_experts,
    in_one_section,
    random_expert,
)
from vllm_dymoe.experts.encoding import LATTICES, NESTED, encoding_of
from vllm_dymoe.kernels import Activation, CpuKernel, Decode, Grouped, combine, expert_reference, make_kernel, native
from vllm_dymoe.kernels.cpu import MINIMUM_WORKSPACE_BYTES

# Two roundings of the inner activation and one of the result, with mantissas of 8 bits in bf16 and 11 in fp16.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def runs(isa):
    library = native.load(isa)
    return library is not None and library.isa == native.ISAS[isa][0]


KERNELS = {**{isa: partial(CpuKernel, isa=isa) for isa in native.ISAS}, "torch": partial(CpuKernel, isa="torch")}
NATIVE = [
    pytest.param(isa, marks=pytest.mark.skipif(not runs(isa), reason=f"this processor has no {name}"))
    for isa, (_, name) in native.ISAS.items()
]


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def random_tokens(count, hidden, dtype, seed=0):
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compute(kernel, x, work, pairs, activation=Activation.SILU):
    out = torch.full((pairs, x.shape[1]), float("nan"), dtype=x.dtype)
    compute_experts(kernel, x, work, out, activation)
    return out


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=25, deadline=None)
@given(
    **MIXED,
    codes=st.sampled_from((KINDS, LATTICES)).flatmap(
        lambda known: st.lists(st.sampled_from(list(known.values())), min_size=1, max_size=4)
    ),
    tokens=st.sampled_from([1, 2, 7, 40, 130]),
    act_order=st.booleans(),
)
def test_every_kernel_agrees_with_the_reference(kernel, codes, tokens, activation, act_order, seed, **sizes):
    """One call may mix any codes, but lattice codes only with each other.

    The inputs of lattice codes are rotated.
    """
    made, dtype = KERNELS[kernel](), sizes["dtype"]
    rest = sizes | {"act_order": act_order, "gate": activation.has_gate}
    experts = [random_expert(encoding=encoding, seed=seed + i, **rest) for i, encoding in enumerate(codes)]
    chosen = [[t for t in range(tokens) if (t + i) % (i + 1) == 0] for i in range(len(codes))]
    x = random_tokens(tokens, sizes["hidden"], dtype, seed)
    check_mix(
        lambda work, rows: compute(made, x, work, rows, activation),
        PackedExpert.work, x, experts, chosen, activation, TOLERANCE[dtype],
    )  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("rest", [{}, {"bias": True, "act_order": True}, {"steps": True}], ids=str)
def test_two_sections_give_the_bits_of_one(kernel, bits, group_size, tokens, rest):
    nested = random_expert(150, 100, NESTED[bits], group_size, **rest)
    whole = PackedExpert(*map(in_one_section, (nested.gate, nested.up, nested.down)))
    x, numbers = random_tokens(tokens, 150, torch.bfloat16), list(range(tokens))
    got, want = (compute(KERNELS[kernel](), x, [e.work(numbers, numbers)], tokens) for e in (nested, whole))
    assert torch.equal(got, want)


def test_a_gpu_gets_tritons_kernel(monkeypatch):
    triton = pytest.importorskip("vllm_dymoe.kernels.triton")
    monkeypatch.setattr(triton, "TritonKernel", lambda *arguments, **options: (arguments, options))
    made = make_kernel("cuda:1", 1 << 20, decode=Decode.CHAINED)
    ways = {"decode": Decode.CHAINED, "grouped": Grouped.PLAIN}
    assert made == ((torch.device("cuda:1"),), {**ways, "workspace_bytes": 1 << 20})


@pytest.mark.parametrize("width", [64, 90, 192])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("kernel", ["AVX512", "torch"])
def test_experts_computed_together_get_the_bits_they_get_alone(width, activation, kernel):
    """Residency decides which experts share a call.

    192 x 40 x 12 is more than one call takes.
    """
    kernel, x = KERNELS[kernel](), random_tokens(40, 128, torch.bfloat16)
    for tokens in (1, 3, 40):
        chosen = [list(range(i % 2, tokens, 1 + i % 3)) for i in range(12)]
        work = [
            random_expert(128, width, (16, 8, 4, 2)[i % 4], seed=i, gate=activation.has_gate).work(
                rows, [12 * t + i for t in rows]
            )
            for i, rows in enumerate(chosen)
        ]
        together = compute(kernel, x[:tokens], work, 12 * tokens, activation)
        alone = torch.full_like(together, float("nan"))
        for expert in reversed(work):
            compute_experts(kernel, x[:tokens], [expert], alone, activation)
        assert torch.equal(together.nan_to_num(7.0), alone.nan_to_num(7.0))


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("encoding", [*KINDS.values(), *LATTICES.values()], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("activations", [16, 8])
def test_a_token_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(isa, encoding, activations):
    expert = random_expert(150, 100, encoding, bias=True, act_order=True)
    x, threads = random_tokens(70, 150, torch.bfloat16), torch.get_num_threads()
    make = partial(CpuKernel, isa=isa, activations=activations)
    whole = compute(make(), x, [expert.work(list(range(70)), list(range(70)))], 70)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for size in (1, 2, 3, 4, 8, 31, 70):
                rows = list(range(size))
                part = compute(make(), x[-size:].clone(), [expert.work(rows, rows)], size)
                assert torch.equal(part, whole[-size:]), (number, size)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("encoding", [*KINDS.values(), *LATTICES.values()], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("activations", [16, 8])
def test_two_blocks_in_a_piece_of_work_have_the_bits_of_single_ones(isa, encoding, activations):
    """Pieces of gate and up have two blocks if threads have many pieces.

    So there are many experts. Three blocks of gate and up, and five of down: the last one is by itself.
    """
    x, kernel = random_tokens(1, 300, torch.bfloat16), CpuKernel(isa=isa, activations=activations, threads=1)
    experts = [random_expert(300, 150, encoding, bias=True, seed=seed) for seed in range(6)]
    together = compute(kernel, x, [expert.work([0], [pair]) for pair, expert in enumerate(experts)], 6)
    for pair, expert in enumerate(experts):
        alone = compute(kernel, x, [expert.work([0], [0])], 1)
        assert torch.equal(together[pair], alone[0]), pair


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Return the native library with emulated tiles instead of AMX.

    Its products run on any AVX-512.
    """
    if native.load() is None or not runs("AVX512_BF16"):
        pytest.skip("this processor has no AVX-512 with BF16")
    built = tmp_path_factory.mktemp("amx") / "_cpu.so"
    source = Path(__file__).parents[2] / "kernels/cpu/experts.cpp"
    options = ("-O1", "-std=c++17", "-fno-math-errno", "-shared", "-fPIC", "-DEMULATED_TILES")
    subprocess.run(["g++", *options, source, "-o", built], check=True)
    return partial(native.Library, built)


@pytest.mark.parametrize("encoding", [*KINDS.values(), *LATTICES.values()], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("activations", [16, 8])
def test_tiles_have_the_bits_of_vectors(emulated, monkeypatch, encoding, activations):
    monkeypatch.setattr(native, "load", emulated)
    expert = random_expert(150, 300, encoding, bias=True)
    for tokens in (8, 31, 70):
        x, rows = random_tokens(tokens, 150, torch.bfloat16), list(range(tokens))
        tiles, vectors = (
            compute(CpuKernel(isa=isa, activations=activations), x, [expert.work(rows, rows)], tokens)
            for isa in ("AMX", "AVX512_BF16")
        )
        assert torch.equal(tiles, vectors), tokens


SAME_BITS = {"AVX2_VNNI": "AVX2", "NEON_I8MM": "DEFAULT", "NEON_DOTPROD": "DEFAULT"}


@pytest.mark.parametrize("isa", [isa for isa in NATIVE if isa.values[0] in SAME_BITS])
@pytest.mark.parametrize("encoding", [*KINDS.values(), *LATTICES.values()], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("activations", [16, 8])
def test_instruction_sets_with_vectors_of_one_width_have_the_same_bits(isa, encoding, activations):
    """Both add floats in the same order.

    Sums of integers are exact.
    """
    expert, rows = random_expert(150, 100, encoding, bias=True), list(range(7))
    x, work = random_tokens(7, 150, torch.bfloat16), [expert.work(rows, rows)]
    sets = isa, SAME_BITS[isa]
    got, want = (compute(CpuKernel(isa=some, activations=activations), x, work, 7) for some in sets)
    assert torch.equal(got, want)


def processor_has(*flags):
    known = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return known is not None and set(flags) <= set(known[1].split())


AVX2 = {"avx2", "fma", "bmi2"}
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512vbmi"}


def compiler_version():
    """Return the C++ compiler's major version; 0 if there is none now."""
    try:
        asked = [os.environ.get("CXX", "g++"), "-dumpversion"]
        return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split(".")[0])
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0


@pytest.mark.skipif(native.load() is None or not processor_has(*AVX2), reason="no native library, or no AVX2")
@pytest.mark.skipif("SANITIZED_LIBRARY" in os.environ, reason="it may have the portable kernels only")
@pytest.mark.skipif(compiler_version() < 11, reason="older compilers leave some instruction sets out")
@pytest.mark.parametrize(("isa", "flags"), [("AVX512", AVX512), ("AVX2_VNNI", AVX2 | {"avx_vnni"}), ("AVX2", AVX2)])
def test_an_instruction_set_is_used_where_the_processor_has_it(isa, flags):
    assert runs(isa) == processor_has(*flags)


@pytest.mark.skipif(native.load() is None or not processor_has(*AVX2), reason="no native library, or no AVX2")
def test_without_avx512_the_library_uses_avx2_with_vnni_if_there_is_one():
    """As on Intel's desktop processors since the 12th generation, and on older ones."""
    code = "from vllm_dymoe.kernels import native; print(native.load().name)"
    path = str(Path(__file__).parents[1] / "support/without_avx512")
    command = [sys.executable, "-c", code]
    held = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert held.stdout.strip() == ("AVX2 with VNNI" if processor_has("avx_vnni") else "AVX2")


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("encoding", [*KINDS.values(), *LATTICES.values()], ids=lambda encoding: encoding.name)
def test_activations_of_very_different_sizes_keep_sixteen_bits(isa, encoding):
    """Integers of the native kernel share a power of two per 32 numbers.

    So errors are relative to the largest of them.
    """
    x = random_tokens(9, 256, torch.float16) ** 3 / 64
    expert = random_expert(256, 128, encoding, dtype=torch.float16)
    want = expert_reference(x, expert.gate, expert.up, expert.down, Activation.SILU)
    got = compute(CpuKernel(isa=isa), x, [expert.work(list(range(9)), list(range(9)))], 9)
    rounded = relative_error(want.half(), want)
    assert relative_error(got, want) < 1.1 * rounded + 1e-4


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("encoding", KINDS.values(), ids=lambda encoding: encoding.name)
def test_activations_of_eight_bits_lose_a_percent_and_no_more(isa, encoding):
    """Two roundings in steps of 1/127 of the largest of 32 numbers cost about 1 %.

    With 16-bit and FP8 weights, floats stay floats.
    """
    x, expert = random_tokens(9, 256, torch.bfloat16), random_expert(256, 128, encoding)
    want = expert_reference(x, expert.gate, expert.up, expert.down, Activation.SILU)
    work = [expert.work(list(range(9)), list(range(9)))]
    got, exact = (compute(CpuKernel(isa=isa, activations=bits), x, work, 9) for bits in (8, 16))
    assert relative_error(got, want) < 0.02
    assert torch.equal(got, exact) == (encoding.bits == 16 or encoding.name == "fp8")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_no_number_stays_with_its_token(kernel, value):
    x, expert = random_tokens(3, 64, torch.bfloat16), random_expert(64, 64, 4)
    want = compute(KERNELS[kernel](), x, [expert.work([0, 1, 2], [0, 1, 2])], 3)
    x[1, 5] = value
    got = compute(KERNELS[kernel](), x, [expert.work([0, 1, 2], [0, 1, 2])], 3)
    assert torch.equal(got[::2], want[::2])
    assert not got[1].isfinite().any()


def test_the_native_kernel_uses_torchs_threads():
    """Other packages bring an OpenMP of their own, and two thread pools would compete."""
    pytest.importorskip("sentencepiece")
    address = native._openmp()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            assert Path(torch.__file__).resolve().parent in Path(line.split()[-1]).parents


@pytest.mark.skipif(native.load() is None, reason="no native library was built")
def test_experts_that_are_there_take_one_native_call(monkeypatch):
    calls, run = [], native.Library.experts
    monkeypatch.setattr(native.Library, "experts", lambda *step: calls.append(step[2:]) or run(*step))
    work = [random_expert(64, 64, encoding_of(4), 64, seed=seed).work([0, 2], [seed, 4 + seed]) for seed in range(3)]
    compute(CpuKernel(), random_tokens(3, 64, torch.bfloat16), work, 8)
    assert calls == [(native.READ, native.DOWN)]


def test_experts_whose_activations_have_no_room_are_cut(monkeypatch):
    kernel, x, expert = CpuKernel(), random_tokens(70, 64, torch.bfloat16), random_expert(64, 64, 4)
    work = [expert.work(list(range(70)), list(range(70))), expert.work([3, 1], [70, 71])]
    want = compute(kernel, x, work, 72)
    monkeypatch.setattr("vllm_dymoe.kernels.cpu._MOST_ACTIVATION_BYTES", 20 * 4 * 2048)
    assert torch.equal(compute(kernel, x, work, 72), want)


def test_without_the_library_torch_computes_and_says_so(monkeypatch):
    monkeypatch.setattr(native, "load", lambda isa: None)
    assert "torch" in CpuKernel().name
    assert "install" in CpuKernel().name
    with pytest.raises(ValueError, match="native library"):
        CpuKernel(activations=8)


def test_the_workspace_is_what_the_kernel_says(monkeypatch):
    allocated = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: allocated.append(empty(*a, **k)) or allocated[-1])
    kernel = CpuKernel()
    assert sum(t.numel() * t.element_size() for t in allocated) == kernel.workspace_bytes
    with pytest.raises(ValueError, match=f"expected at least {MINIMUM_WORKSPACE_BYTES}"):
        CpuKernel(workspace_bytes=1000)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda x, out: (x.double(), out), TypeError, "x is torch.float64"),
        (lambda x, out: (x.half(), out.half()), TypeError, "float16"),
        (lambda x, out: (x[:, :32].contiguous(), out[:, :32].contiguous()), ValueError, "32|hidden"),
        (lambda x, out: (x, out[:, :32].contiguous()), ValueError, "out has shape"),
        (lambda x, out: (x.t(), out), ValueError, "x has|out has"),
    ],
)
def test_wrong_arguments_are_named(change, error, sentence):
    expert = random_expert(64, 64, 4)
    x, out = change(random_tokens(2, 64, torch.bfloat16), torch.empty(2, 64, dtype=torch.bfloat16))
    with pytest.raises(error, match=sentence):
        compute_experts(make_kernel("cpu"), x, [expert.work([0], [0])], out, Activation.SILU)


@pytest.mark.parametrize(("tokens", "pairs"), [([2], [0]), ([-1], [0]), ([0], [4]), ([0], [-1])])
@pytest.mark.parametrize("kernel", ["AVX512", "torch"])
def test_rows_that_are_not_there_are_refused(kernel, tokens, pairs):
    expert, out = random_expert(64, 64, 4), torch.zeros(4, 64, dtype=torch.bfloat16)
    kernel, x = KERNELS[kernel](), random_tokens(2, 64, torch.bfloat16)
    with pytest.raises(IndexError):
        compute_experts(kernel, x, [expert.work(tokens, pairs)], out, Activation.SILU)
    assert not out.any()


IDS = torch.tensor([[0, 1, 2], [2, 0, -1], [2, 3, 2]])
WEIGHTS = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.6, 0.3, 0.1]])


def absent_outputs(skipped):
    """Return outputs that are one, and NaN where nothing was computed."""
    out = torch.ones(9, 8).bfloat16()
    out[(IDS < 0).flatten() | torch.isin(IDS, torch.tensor(skipped)).flatten()] = float("nan")
    return out


def test_combine_reads_nothing_of_absent_pairs_and_sums_no_tokens():
    assert not combine(absent_outputs([9]), WEIGHTS, IDS).isnan().any()
    assert combine(torch.zeros(0, 8).half(), torch.zeros(0, 3)).shape == (0, 8)


@pytest.mark.parametrize(
    ("named", "error", "sentence"),
    [
        ({"expert_ids": IDS.float()}, TypeError, "expert_ids is torch.float32"),
        ({"expert_ids": IDS[:2]}, ValueError, "expert_ids has shape"),
        ({"skipped": {1}}, ValueError, "expert_ids is missing"),
    ],
)
def test_combine_names_wrong_arguments(named, error, sentence):
    with pytest.raises(error, match=sentence):
        combine(absent_outputs([9]), WEIGHTS, **named)


def test_no_reduction_whose_order_a_device_may_choose(monkeypatch):
    """Only the CPU's sum is known to add in order, so others add in a loop."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "sum", None)
    assert combine(torch.ones(4, 64).bfloat16(), torch.full((2, 2), 0.5)).float().eq(1).all()
