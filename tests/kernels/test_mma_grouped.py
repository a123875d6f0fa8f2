"""Large batches with weights in registers, against float64 and a plain sum.

Gluon has no interpreter: what runs here, on the host, is the PTX that the installed Triton makes for a card.
"""

import re
from dataclasses import replace

import pytest
import torch

from tests.support.benchmarks import modules_of
from vllm_dymoe.experts.encoding import E8, E8_NESTED, FP8, MXFP4, NESTED, NVFP4, STEPS
from vllm_dymoe.experts.format import DownFormat
from vllm_dymoe.kernels import Activation, Curve, Grouped, dequantize

pytest.importorskip("triton")

from vllm_dymoe.kernels.triton.launch import fastest_grouped

TWIN = 3e-4
"""Of a norm: sums that differ in their last bit round to another 16-bit number here and there."""
ENCODINGS = [*STEPS.values(), *NESTED.values(), MXFP4, NVFP4, FP8, E8, E8_NESTED]


@pytest.fixture(scope="module")
def host():
    with modules_of("gpu"):
        import launched

        yield launched


def from_rounded_weights(launch, ran):
    """Return the relative distance from float32 sums with weights of 16 bits."""

    def products(x, packed):
        weights, factor = dequantize(packed), torch.ones(())
        if packed.factor is not None:  # multiplies the products
            factor = packed.factor[0] / packed.factor[1]
        sums = x.float() @ (weights / factor).to(x.dtype).float().T * factor
        return sums if packed.bias is None else sums + packed.bias.float()

    gate, up, down = ran.expert
    up_sums = products(ran.x, up)
    activation = launch.activation
    gated = activation.gated(products(ran.x, gate), up_sums) if activation.has_gate else activation.alone(up_sums)
    inner = gated.to(ran.x.dtype)
    want = products(inner, down).to(ran.x.dtype)
    return float((ran.out.float() - want.float()).norm() / want.norm())


def right(host, launch, architecture=90):
    ran = host.ran(launch, host.Host(architecture))
    assert ran.error < host.TOLERANCE
    if not launch.encoding.lattice:  # whose points are exact
        assert from_rounded_weights(launch, ran) < TWIN
    return ran


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
def test_every_encoding_is_right(host, encoding):
    right(host, host.Launch(encoding, 11, grouped=True))


@pytest.mark.parametrize("encoding", [*NESTED.values(), E8_NESTED], ids=lambda encoding: encoding.name)
def test_base_slices_alone_are_right(host, encoding):
    right(host, host.Launch(encoding, 3, grouped=True, low=True))


@pytest.mark.parametrize(
    "options",
    [
        {"group": 32, "sizes": (96, 40), "integer_zeros": True, "bias": True},
        {"group": 256, "encoding": STEPS[2], "sizes": (512, 72)},
        {"group": 128, "sizes": (264, 64), "dtype": torch.float16},
        {"dtype": torch.float16, "encoding": NESTED[4], "low": True},
        {"activation": Activation(Curve.RELU2, has_gate=False), "bias": True, "sizes": (64, 320)},
        {"down": DownFormat(STEPS[2], 128, integer_zeros=True), "bias": True},
        {"encoding": STEPS[8], "group": 32, "dtype": torch.float16, "integer_zeros": True},
        {"encoding": MXFP4, "bias": True, "sizes": (128, 64)},
        {"encoding": NVFP4, "sizes": (128, 64)},
        {"encoding": NVFP4, "dtype": torch.float16, "sizes": (176, 96), "bias": True},
        {"encoding": FP8, "group": 128, "down": DownFormat(STEPS[4], 64)},
    ],
    ids=str,
)
def test_other_formats_are_right(host, options):
    right(host, host.Launch(**{"encoding": STEPS[4], "tokens": 2, "grouped": True, **options}))


def test_a_token_has_the_same_bits_alone_and_beside_others(host):
    launch = host.Launch(STEPS[4], 1, grouped=True, sizes=(136, 72))
    alone = right(host, launch).out
    for tokens in (8, 9, 17, 33, 70):  # tiles of 8, 16, 32 and 64 positions, and a second item
        beside = right(host, replace(launch, tokens=tokens)).out
        assert torch.equal(beside[:1], alone), tokens


@pytest.mark.parametrize("architecture", [80, 89, 120])
def test_other_architectures_are_right(host, architecture):
    right(host, host.Launch(NESTED[4], 20, grouped=True, sizes=(136, 72)), architecture)


def no_barrier(ptx):
    return re.sub(r"\bbar\.sync\s+0;", "", ptx)


def no_wait(ptx):
    return ptx.replace("cp.async.wait_group", "// ")


def another_center(ptx):
    return ptx.replace("0xc308c308", "0xc309c309")  # 137 for 136


def another_column(ptx):
    return ptx.replace("0x5410;", "0x1054;")


def another_center_of_8_bits(ptx):
    return ptx.replace("0xc510c510", "0xc511c511")  # 2320 for 2304


def another_center_of_points(ptx):
    return ptx.replace("0xbfe0bfe0", "0xbfd0bfd0")  # -1.625 for -1.75


def another_level(ptx):  # of e2m1, and of e4m3
    return ptx.replace("0x7e807e80", "0x7f007f00").replace("0x7b807b80", "0x7c007c00")


@pytest.mark.parametrize(
    ("encoding", "fault"),
    [
        *((STEPS[4], fault) for fault in (no_barrier, no_wait, another_center, another_column)),
        (STEPS[8], another_center_of_8_bits),
        (E8, another_center_of_points),
        *((book, fault) for book in (MXFP4, NVFP4, FP8) for fault in (another_level, no_wait)),
    ],
)
def test_faults_in_the_compiled_code_are_found(host, encoding, fault):
    planted = []

    def changed(ptx):
        planted.append(fault(ptx) != ptx)
        return fault(ptx)

    launch = host.Launch(encoding, 1, grouped=True, sizes=(136, 72))
    assert not host.ran(launch, host.Host(90, changed)).error < host.TOLERANCE
    assert sum(planted) == 2, "the compiler writes this otherwise now"  # not in the rotation of inputs


@pytest.mark.parametrize(
    ("precisions", "columns", "architecture", "act_order", "fastest"),
    [
        ({4, 2}, (128, 64), 80, False, Grouped.IN_REGISTERS),
        ({8, 4}, (128, 64), 120, False, Grouped.IN_REGISTERS),
        ({4, 2}, (128, 64), 75, False, Grouped.PLAIN),
        ({4}, (128, 64), 90, True, Grouped.PLAIN),
        ({4}, (128, 36), 90, False, Grouped.PLAIN),
        ({16, 4}, (128, 64), 90, False, Grouped.PLAIN),
        ({MXFP4.tag, NVFP4.tag, FP8.tag}, (128, 64), 90, False, Grouped.IN_REGISTERS),
        ({E8.tag}, (128, 64), 90, False, Grouped.IN_REGISTERS),
    ],
)
def test_cards_and_codes_without_such_a_kernel_have_none(precisions, columns, architecture, act_order, fastest):
    assert fastest_grouped(precisions, columns, architecture, act_order=act_order) is fastest
