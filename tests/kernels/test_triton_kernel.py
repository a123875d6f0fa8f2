"""TritonKernel as the server calls it, against the float64 reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.gpu.experts import ExpertWork, begin_experts, compute_experts, section_of
from tests.kernels.matrices import MIXED, PackedExpert, check_mix, random_expert
from tests.kernels.sections import DEVICE, TOLERANCE, relative_error, some_widths
from vllm_dymoe.kernels import Activation, expert_reference
from vllm_dymoe.kernels.triton import TritonKernel
from vllm_dymoe.kernels.triton.kernel import MINIMUM_WORKSPACE_BYTES


def on_device(packed):
    return packed.format.view(section_of(packed).to(DEVICE))


def work_of(expert, tokens, pairs):
    index = [torch.tensor(rows, dtype=torch.int64, device=DEVICE) for rows in (tokens, pairs)]
    return ExpertWork(on_device(expert.gate), on_device(expert.up), on_device(expert.down), *index)


def make_kernel(workspace_bytes=MINIMUM_WORKSPACE_BYTES):
    kernel = TritonKernel(DEVICE, workspace_bytes)
    kernel._memory.fill_(0xFF)  # NaN, in any dtype
    return kernel


def compute(kernel, x, work, rows, activation=Activation.SILU):
    out = torch.full((rows, x.shape[1]), float("nan"), dtype=x.dtype, device=DEVICE)
    compute_experts(kernel, x, work, out, activation)
    assert not kernel._semaphores.any(), "semaphores are left above zero"
    return out


def random_x(tokens, hidden, dtype=torch.bfloat16, seed=0):
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    **MIXED,
    bits=st.lists(st.sampled_from([16, 8, 4, 2]), min_size=1, max_size=3),
    tokens=st.sampled_from([1, 2, 5, 20]),
    steps=some_widths,
    act_order=some_widths,
)
def test_any_mix_agrees_with_the_reference(bits, tokens, activation, steps, act_order, seed, **sizes):
    rest = sizes | {"gate": activation.has_gate}
    flags = [{"steps": b in steps, "act_order": b in act_order} for b in bits]
    experts = [random_expert(encoding=b, seed=seed + i, **rest, **flags[i]) for i, b in enumerate(bits)]
    chosen = [[t for t in range(tokens) if (t + i) % (3 * i + 1) == 0] for i in range(len(bits))]
    x = random_x(tokens, sizes["hidden"], sizes["dtype"], seed)
    check_mix(
        lambda work, rows: compute(make_kernel(), x, work, rows, activation),
        work_of, x, experts, chosen, activation, TOLERANCE[sizes["dtype"]],
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 20])
def test_projections_of_different_bits(tokens):
    x = random_x(tokens, 96)
    gate, up, down = (random_expert(96, 70, bits, seed=bits) for bits in (8, 4, 2))
    expert = PackedExpert(gate.gate, up.up, down.down)
    rows = list(range(tokens))
    out = compute(make_kernel(), x, [work_of(expert, rows, rows)], tokens)
    want = expert_reference(x.cpu(), expert.gate, expert.up, expert.down, Activation.SILU)
    assert relative_error(out, want) < TOLERANCE[torch.bfloat16]


def prepared(kernel, x, work):
    items = begin_experts(kernel, x, work, x.new_empty(len(x), x.shape[1]), Activation.SILU)
    return kernel.step, kernel.step.launches(items)


def test_tokens_decide_the_class():
    kernel, expert = make_kernel(), random_expert(64, 64, 4)
    counts = [4, 5, 16, 17, 64, 65, 300]
    step, launches = prepared(kernel, random_x(1, 64), [work_of(expert, [0] * count, [0] * count) for count in counts])
    assert step.tiles.decode_tokens == 4
    assert [tile.block_m for tile in step.tiles.grouped_down] == [16, 64, 128]
    found = [(grouped, part.positions) for grouped, part in launches]
    assert found == [(-1, 4), (0, 5 + 16), (1, 17 + 64), (2, 65 + 300)]


@pytest.mark.parametrize(
    ("hidden", "intermediate", "workspace_bytes", "experts"),
    [(2048, 64, MINIMUM_WORKSPACE_BYTES, 150), (64, 2048, MINIMUM_WORKSPACE_BYTES, 150), (640, 2048, 32 << 20, 600)],
)
def test_what_runs_together_fits_the_workspace(hidden, intermediate, workspace_bytes, experts):
    """Split sums need partial sums and semaphores, and either may run out first."""
    kernel, expert = make_kernel(workspace_bytes), random_expert(hidden, intermediate, 4)
    work = [work_of(expert, [0, 1, 2, 3], [0, 1, 2, 3])] * experts
    x, started = random_x(4, hidden), []
    step, launches = prepared(kernel, x, work)
    assert step.tiles.gate_up.split > 1 or step.tiles.down.split > 1
    assert len(launches) > 1
    for grouped, some in launches:
        kernel.launch(
            grouped, x, x, step.table, some, Activation.SILU, step.tiles,
            start=lambda kernel, grid, *rest: started.append(grid),
        )  # fmt: skip
    assert sum(grid[1] for grid in started) == 2 * 2 * len(work)


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ({"group_size": 64}, "different group sizes"),
        ({"intermediate": 96}, "different intermediate sizes"),
        ({"bias": True}, "without a bias"),
        ({"steps": True}, "integer zeros or a column order"),
        ({"act_order": True}, "integer zeros or a column order"),
    ],
)
def test_experts_that_disagree_are_refused(second, sentence):
    arguments = {"hidden": 64, "intermediate": 64, "encoding": 4}
    work = [work_of(random_expert(**arguments), [0], [0]), work_of(random_expert(**arguments | second), [0], [1])]
    out = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match=sentence):
        compute_experts(make_kernel(), random_x(1, 64), work, out, Activation.SILU)


@pytest.mark.parametrize("flag", ["steps", "act_order"])
def test_experts_that_disagree_with_what_was_announced_are_refused(flag):
    """A kernel is compiled once, and would read these matrices like announced ones."""
    announced, other = (random_expert(64, 64, 4, **{flag: value}) for value in (True, False))
    kernel = TritonKernel(DEVICE, formats=[announced.formats])
    out = torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE)
    compute_experts(kernel, random_x(1, 64), [work_of(announced, [0], [0])], out, Activation.SILU)
    with pytest.raises(ValueError, match="integer zeros or a column order"):
        compute_experts(kernel, random_x(1, 64), [work_of(other, [0], [0])], out, Activation.SILU)


def test_wrong_activations_are_refused():
    work = [work_of(random_expert(64, 64, 4), [0], [0])]
    out = torch.zeros(1, 64, dtype=torch.float16, device=DEVICE)
    with pytest.raises(TypeError, match=r"x is torch.float32"):
        compute_experts(make_kernel(), random_x(1, 64).float(), work, out.float(), Activation.SILU)
    with pytest.raises(TypeError, match=r"x is torch.float16"):
        compute_experts(make_kernel(), random_x(1, 64).half(), work, out, Activation.SILU)


def test_a_workspace_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match=f"expected at least {MINIMUM_WORKSPACE_BYTES}"):
        TritonKernel(DEVICE, 1000)
