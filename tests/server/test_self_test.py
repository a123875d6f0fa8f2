"""The self-test accepts right kernels, finds broken ones, and keeps its result."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.executor.steps import FAST
from tests.small_model import make_experts
from vllm_dymoe.executor import plain_kernels
from vllm_dymoe.executor.plain_kernels import PlainKernels
from vllm_dymoe.experts.encoding import CODEBOOKS, E8_NESTED
from vllm_dymoe.kernels import Activation, Curve, Decode, Grouped, native
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.server import self_test
from vllm_dymoe.server.expert_server import Parts
from vllm_dymoe.server.self_test import SelfTest

CPU = torch.device("cpu")
NATIVE = pytest.mark.skipif(native.load() is None, reason="there is no native library, and so no CPU queue")
OPTIONS = Options(high=4, low=2, group_size=32, link_gbps=FAST)


def run(experts=None, options=OPTIONS, activation=Activation.SILU, **given):
    experts = make_experts() if experts is None else experts
    return self_test.self_test(experts, options, CPU, [activation], **given)


@pytest.mark.parametrize("nested", [True, False])
def test_right_kernels_pass(nested):
    found = run(make_experts(nested=nested))
    on_cpu = 4 if native.load() is not None else 0
    assert (found.failure, found.skipped, found.steps) == ("", "", 8 + on_cpu)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "fp8", "e8", "without a gate", "one version"])
def test_so_do_those_of_other_experts(kind):
    experts, activation, options = make_experts(bits=(8, 2) if kind == "fp8" else (4, 2)), Activation.SILU, OPTIONS
    high, fmt = max(experts.formats), experts.formats[max(experts.formats)]
    if kind == "without a gate":
        activation = Activation(Curve.RELU2, has_gate=False)
        formats = {bits: replace(of, has_gate=False) for bits, of in experts.formats.items()}
    elif kind == "e8":
        nested = replace(fmt, encoding=E8_NESTED)
        formats = {high: nested, min(experts.formats): nested.base}
    elif kind == "one version":
        formats, options = {high: fmt}, OPTIONS.model_copy(update={"low": 0})
    else:
        formats = experts.formats | {high: replace(fmt, encoding=CODEBOOKS[kind])}
    options = options.model_copy(update={"high": high})
    found = run(replace(experts, formats=formats), options, activation)
    assert (found.failure, found.skipped) == ("", "")


def wrong_strip(out):
    out[-1, :64] = 0


def wrong_everywhere(out):
    out.mul_(1.05)


def not_a_number(out):
    out[0, 0] = float("nan")


BROKEN = pytest.mark.parametrize("spoil", [wrong_strip, wrong_everywhere, not_a_number])


@BROKEN
@pytest.mark.parametrize("rows", [1, 16])
def test_a_broken_kernel_of_the_device_is_found(spoil, rows):
    class Broken(PlainKernels):
        def forward(self, table, layer, real, plan, x, *others, **told):
            out = super().forward(table, layer, real, plan, x, *others, **told)
            if len(x) == rows:
                spoil(out)
            return out

    class BrokenParts(Parts):
        def decode_kernel(self, kernel, experts, link_gbps=None):
            return Broken(kernel, experts.of_layers, link_gbps)

    found = run(parts=BrokenParts(CPU))
    assert f"a step of {rows} tokens" in found.failure


@NATIVE
@pytest.mark.parametrize("misses", ["auto", "share", "fetch"])
def test_misses_that_the_cpu_computes_are_tested_where_it_may_compute_some(misses):
    class Broken(PlainKernels):
        def forward(self, table, layer, real, plan, x, weights, ids, activation, cpu_queue, **told):
            out = super().forward(table, layer, real, plan, x, weights, ids, activation, cpu_queue, **told)
            if cpu_queue is not None:
                wrong_everywhere(out)
            return out

    class BrokenParts(Parts):
        def decode_kernel(self, kernel, experts, link_gbps=None):
            return Broken(kernel, experts.of_layers, link_gbps)

    found = run(options=OPTIONS.model_copy(update={"misses": misses}), parts=BrokenParts(CPU))
    assert found.skipped == ""
    assert ("misses computed by the CPU" in found.failure) == (misses != "fetch")


@NATIVE
@pytest.mark.parametrize("nested", [True, False])
def test_misses_that_come_from_a_disk_are_tested_where_the_device_cannot_read_all_experts(nested, monkeypatch):
    asked = []
    take = plain_kernels.take_plain
    monkeypatch.setattr(plain_kernels, "take_plain", lambda *given: asked.append(take(*given)))
    found = run(make_experts(nested=nested), from_disk=True)
    assert (found.failure, found.skipped, found.steps) == ("", "", 8)
    assert asked


@NATIVE
def test_sources_that_are_mixed_up_are_found(monkeypatch):
    monkeypatch.setattr(plain_kernels, "take_plain", mixed_up(plain_kernels.take_plain))
    assert "misses read from disk" in run(from_disk=True).failure


def mixed_up(take):
    """Return a function that takes a plan's sources, and exchanges the first two."""

    def wrong(queue, turn, table, layer, plan):
        take(queue, turn, table, layer, plan)
        plan.addresses[:, :2] = plan.addresses[:, [1, 0]]

    return wrong


def test_a_start_that_can_have_no_cpu_queue_is_tested_without(monkeypatch):
    def refuse(*given, **named):
        raise ConfigError("no pinned memory", option="misses")

    whole = self_test.ExpertServer
    monkeypatch.setattr(
        self_test, "ExpertServer", lambda store, options, *rest, **named: (
            refuse() if options.computes_misses else whole(store, options, *rest, **named))
    )  # fmt: skip
    found = run()
    assert (found.failure, found.skipped, found.steps) == ("", "", 8)


def test_a_kernel_that_cannot_be_compiled_is_a_failure():
    class NoCompiler(Parts):
        def decode_kernel(self, kernel, experts, link_gbps=None):
            raise RuntimeError("ptxas died\nand said much")

    assert run(parts=NoCompiler(CPU)).failure == "step 1 of the self-test ended with RuntimeError: ptxas died"


def test_a_lack_of_memory_is_no_failure():
    class NoMemory(Parts):
        def pools(self, plan, experts, bits):
            raise torch.OutOfMemoryError("CUDA out of memory")

    found = run(parts=NoMemory(CPU))
    assert (found.failure, found.skipped) == ("", "CUDA out of memory")


def test_a_result_is_kept_for_a_machine_its_versions_and_the_kind_of_experts(tmp_path, monkeypatch):
    tests, kept = [], tmp_path / self_test.RESULTS

    def counted(*given, **named):
        tests.append(given)
        return SelfTest(6, "broken" if len(tests) == 1 else "", 0.1)

    monkeypatch.setattr(self_test, "_run", counted)
    assert run(kept=kept).failure == run(kept=kept).failure == "broken"
    assert len(tests) == 1
    run(kept=kept, decode=Decode.TENSOR_CORES)
    run(make_experts(hidden=96), kept=kept)
    run(kept=kept, from_disk=True)
    monkeypatch.setattr(self_test, "describe_machine", lambda device: "another card")
    run(kept=kept)
    assert len(tests) == 5
    run()
    assert len(tests) == 6, "without a file it is run at every start"


def test_what_could_not_run_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(self_test, "_run", lambda *given, **named: SelfTest(0, "", 0.1, skipped="no memory"))
    run(kept=tmp_path / self_test.RESULTS)
    assert not list(tmp_path.iterdir())


VARIANTS = list(product(reversed(Decode), reversed(Grouped)))
"""In the order in which they are tried."""


@pytest.mark.parametrize("fastest", VARIANTS)
@pytest.mark.parametrize("broken", range(len(VARIANTS) + 1))
def test_the_fastest_kernels_that_pass_are_used(broken, fastest, monkeypatch):
    """Where none does, nothing is served, and the sentence is for a bug report."""
    some = [v for v in VARIANTS if v[0] <= fastest[0] and v[1] <= fastest[1]]
    tried, said, wrong = [], [], some[:broken]

    def found(*given, decode, grouped, from_disk, kept):
        tried.append((decode, grouped))
        return SelfTest(6, "step 3 is wrong" * (tried[-1] in wrong), 0.1)

    def start():
        return self_test.tested(
            make_experts(), OPTIONS, CPU, [Activation.SILU], kept=None, say=said.append,
            at_most=(max(Decode), max(Grouped)), from_disk=False,
        )  # fmt: skip

    monkeypatch.setattr(self_test, "self_test", found)
    monkeypatch.setattr(self_test.kernels, "decode_kernels", lambda *given: tuple(Decode)[fastest[0] :: -1])
    monkeypatch.setattr(self_test.kernels, "grouped_kernels", lambda *given: tuple(Grouped)[fastest[1] :: -1])
    right = [variant for variant in some if variant not in wrong]
    if not right:
        with pytest.raises(ConfigError, match=r"step 3 is wrong\. For a bug report: .*vllm-dymoe \d.*served"):
            start()
        assert tried == some
        return
    assert start() == right[0]
    assert tried == some[: some.index(right[0]) + 1]
    assert len(said) == len(tried) - 1


def test_what_could_not_run_is_said_and_holds_nothing_up(monkeypatch):
    said = []
    monkeypatch.setattr(self_test, "self_test", lambda *given, **named: SelfTest(0, "", 0.1, skipped="no memory"))
    monkeypatch.setattr(self_test.kernels, "decode_kernels", lambda *given: tuple(reversed(Decode)))
    settings = {"kept": None, "say": said.append, "at_most": (max(Decode), max(Grouped)), "from_disk": False}
    chosen = self_test.tested(make_experts(), OPTIONS, CPU, [Activation.SILU], **settings)
    assert chosen == (Decode.PLAIN, Grouped.PLAIN)
    assert "no memory" in said[0]
