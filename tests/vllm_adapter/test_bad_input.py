"""What a rank says of a checkpoint or store that it cannot serve, and of a layer that it cannot compute."""

import contextlib
import dataclasses
import logging
import os
from types import SimpleNamespace

import pytest
import torch

from tests.small_model import fill, make_experts, random_weight
from tests.store.stores import write
from tests.vllm_adapter.steps import scheduled
from vllm_dymoe.config import Options
from vllm_dymoe.experts.layout import Projection
from vllm_dymoe.kernels import Activation
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.store import FileStore, Manifest, StoreError
from vllm_dymoe.store.files import file_name
from vllm_dymoe.store.writer import StoreWriter
from vllm_dymoe.transfer import TransferError
from vllm_dymoe.vllm_adapter.checkpoint import cached_store
from vllm_dymoe.vllm_adapter.foresight import Foresight
from vllm_dymoe.vllm_adapter.log import logger
from vllm_dymoe.vllm_adapter.rank_model import LayerSpec, RankModel, _check_belongs
from vllm_dymoe.vllm_adapter.step import RunningStep
from vllm_dymoe.vllm_adapter.step_failures import StepFailures

EXPERTS = make_experts()
SPEC = LayerSpec("layers.1.mlp.experts", 6, 2, 64, 32, torch.bfloat16, False, 0, 1, 0, 1)


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("experts", "spec", "sentence"),
    [
        (EXPERTS, dataclasses.replace(SPEC, ranks=2), r"tensor-parallel ranks \(0, 1\), the model needs \(0, 2\)"),
        (EXPERTS, dataclasses.replace(SPEC, rank=1, ranks=2), r"tensor-parallel ranks \(0, 1\), .* needs \(1, 2\)"),
        (make_experts(num_experts=8), SPEC, "experts per layer 6, the model needs 8"),
        (make_experts(dtype=torch.float16), SPEC, "expert formats"),
        (make_experts(group_size=64), SPEC, "expert formats"),
        (make_experts(bits=(8,)), SPEC, "expert formats"),
        (make_experts(hidden=128), SPEC, "expert formats"),
    ],
)
def test_a_store_for_another_model_is_refused(tmp_path, experts, spec, sentence):
    store = write(tmp_path / "store")
    with pytest.raises(StoreError, match=sentence) as caught:
        _check_belongs(store, experts, spec, store.folder)
    assert str(store.folder) in str(caught.value)
    assert "write the checkpoint again with `vllm-dymoe quantize`" in str(caught.value)


def test_a_store_for_this_model_is_taken(tmp_path):
    store = write(tmp_path / "store")
    _check_belongs(store, EXPERTS, SPEC, store.folder)
    store.close()


def test_a_damaged_store_of_an_earlier_start_is_written_again_with_a_warning(tmp_path, warnings):
    manifest = Manifest(EXPERTS, "rtn", "a model")
    write(tmp_path / "store").close()
    os.truncate(tmp_path / "store" / file_name(2), 5000)
    assert cached_store(tmp_path / "store", manifest) is None
    (warning,) = warnings()
    assert "the file was truncated" in warning
    assert "It is written again now." in warning
    write(tmp_path / "store").close()
    again = cached_store(tmp_path / "store", manifest)
    assert isinstance(again, FileStore)
    again.close()


def test_a_store_of_another_model_in_the_cache_is_replaced_with_a_warning(tmp_path, warnings):
    write(tmp_path / "store").close()
    assert cached_store(tmp_path / "store", Manifest(EXPERTS, "hqq", "a model")) is None
    assert "is another model's; it is replaced" in warnings()[0]


def rank_model(packer=None, runtime=None):
    """A rank in the middle of its life, without the vLLM around it."""
    model = RankModel.__new__(RankModel)
    model._packer, model._store, model.runtime, model.step = packer, None, runtime, RunningStep()
    model.failures = StepFailures(model.step)
    model.foresight, model.prompts = Foresight(Options(system="on-demand")), None
    return model


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_end_the_start_and_leave_nothing(tmp_path, bad):
    packer = ExpertPacker(EXPERTS, make_quantizer("rtn"), StoreWriter(tmp_path / "s", Manifest(EXPERTS, "rtn", "m")))
    model = rank_model(packer)
    model.put(0, 0, Projection.GATE, random_weight(EXPERTS, 0, 0, Projection.GATE))
    weight = random_weight(EXPERTS, 1, 4, Projection.DOWN)
    weight[3, 5] = bad
    with pytest.raises(StoreError) as caught:
        model.put(1, 4, Projection.DOWN, weight)
    assert str(caught.value).startswith("vllm-dymoe: the down projection of expert 4 in layer 2 cannot be quantized")
    assert "1 of its weights are NaN or infinite; download the checkpoint again." in str(caught.value)
    assert not os.listdir(tmp_path)


def test_a_missing_expert_ends_the_start_and_leaves_nothing(tmp_path):
    packer = ExpertPacker(EXPERTS, make_quantizer("rtn"), StoreWriter(tmp_path / "s", Manifest(EXPERTS, "rtn", "m")))
    put = packer.put
    packer.put = lambda *what: None if what[:2] == (0, 5) else put(*what)
    fill(packer)
    model = rank_model(packer)
    model._loaded, model._layers = 0, [SPEC]
    model._vllm_config = type("Config", (), {"load_config": type("Load", (), {"load_format": "auto"})})
    with pytest.raises(StoreError, match=r"vllm-dymoe: .* lacks 3 .* gate projection of expert 5 in layer 1"):
        model.layer_loaded(0, None)
    assert not os.listdir(tmp_path)


class FailingRuntime:
    experts = SimpleNamespace(layers=(0,))
    predictor = None
    unobserved = contextlib.nullcontext

    def __init__(self):
        self.calls = 0

    def forward(self, *arguments, **others):
        self.calls += 1
        raise TransferError("the disk is on fire")


def forward(model):
    x = torch.full((3, 8), torch.nan)
    return model.forward(0, x, x, x.int(), Activation.SILU)


def test_a_layer_that_fails_gives_zeros_and_the_layers_behind_it_do_no_work():
    runtime = FailingRuntime()
    model = rank_model(runtime=runtime)
    for step in range(1, 3):
        model.step.begin(scheduled(3))
        for _ in range(3):
            assert torch.equal(forward(model), torch.zeros(3, 8))
        assert runtime.calls == step
        assert model.failures.sentence == "vllm-dymoe: the disk is on fire"
        model.failures.finish(None)


def test_a_warm_up_decides_nothing_and_nobody_sees_it_before_and_between_requests():
    """Its inputs are whatever was in the memory before."""
    told = []

    class Runtime:
        experts = SimpleNamespace(layers=(0,))

        predictor = None

        def forward(self, layer, x, *others):
            told.append("computed")
            return x

        @contextlib.contextmanager
        def unobserved(self):
            told.append("unobserved")
            yield

    model = rank_model(runtime=Runtime())
    model.foresight.agrees = lambda *_: told.append("gate")
    for warming_up in (True, False, True):
        if not warming_up:
            model.step.begin(scheduled(3))
        forward(model)
        model.step.end()
    assert told == ["unobserved", "computed", "gate", "computed", "unobserved", "computed"]


def test_a_fault_while_vllm_warms_up_ends_the_start_unless_other_ranks_wait(caplog, monkeypatch):
    model = rank_model(runtime=FailingRuntime())
    with pytest.raises(TransferError, match="on fire"):
        forward(model)
    model.failures = StepFailures(model.step, board=object())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(logger, "propagate", True)
    assert torch.equal(forward(model), torch.zeros(3, 8))
    assert set(caplog.messages) == {"vllm-dymoe: the disk is on fire"}
    model.step.begin(scheduled(3))
    assert model.failures.sentence is None, "no request has failed"
