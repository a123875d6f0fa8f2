"""A predictor's file: its contents, and what is refused."""

import json
import os
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.prefetch.made_up import SIZES, WIDE, made_up, residual_stream
from vllm_dymoe.prefetch import RoutedModel, TrainedPredictor
from vllm_dymoe.prefetch.checkpoint import PredictorCard, PredictorError, load_predictor, read_card, save_predictor
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES, Architecture
from vllm_dymoe.prefetch.folded import FoldedMLP, fold
from vllm_dymoe.prefetch.training import Recipe, train

FOLDED = fold(train(made_up(inputs=True), Architecture((8,), 2, True, True), Recipe(epochs=1)).model)
CARD = PredictorCard(SIZES, {"name": "small"}, {"path": "t"}, {"trained": {"all_k": 0.5}}, 3)

SAVED = FOLDED.tensors


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "folder" / "predictor.safetensors"
    save_predictor(path, CARD, FOLDED)
    return path


def test_card_and_network_come_back(file):
    card, network = load_predictor(file)
    assert card == read_card(file) == CARD
    for name, tensor in FOLDED.tensors.items():
        assert torch.equal(network.tensors[name], tensor.half())
    assert [path.name for path in file.parent.iterdir()] == [file.name], "something half-written was left"


def test_it_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "predictor.safetensors"
    save_predictor(path, CARD, FOLDED)
    before = path.read_bytes()

    def disk_full(file, data, offset):
        os.pwrite(file, data[:100], offset)
        raise OSError("no space left")

    monkeypatch.setattr("vllm_dymoe.durable.write_at", disk_full)
    with pytest.raises(PredictorError, match=r"no space left"):
        save_predictor(path, CARD, FOLDED)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def rewritten(file, card=None, **tensors):
    """Write the file again with another card or other tensors; None removes one."""
    with safe_open(file, framework="pt") as opened:
        found = {name: opened.get_tensor(name) for name in SAVED} | tensors
        described = json.loads(opened.metadata()["card"]) | (card or {})
    metadata = {"kind": "vllm-dymoe predictor", "card": json.dumps(described)}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, file, metadata)


DAMAGES = {
    "missing": lambda file: file.unlink(),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "empty": lambda file: file.write_bytes(b""),
    "a pickle": lambda file: file.write_bytes(pickle.dumps({"tables": [1]})),
    "not ours": lambda file: save_file({"tables": torch.zeros(2)}, file, {"kind": "a trace"}),
    "no metadata": lambda file: save_file({"tables": torch.zeros(2)}, file),
    "of another format": lambda file: rewritten(file, {"format": 2}),
    "a card with more": lambda file: rewritten(file, {"mood": "good"}),
    "sizes that are words": lambda file: rewritten(file, {"header": vars(SIZES) | {"top_k": "many"}}),
    "another card": lambda file: rewritten(file, {"header": vars(replace(SIZES, num_experts=9))}),
    "no tables": lambda file: rewritten(file, tables=None),
    "no gates' rows": lambda file: rewritten(file, gates=torch.zeros(1, 5, 8).half()),
    "a matrix too narrow": lambda file: rewritten(file, **{"matrix.0": torch.zeros(1, 7, 8).half()}),
    "a flat table": lambda file: rewritten(file, tables=torch.zeros(3).half()),
    "not a number": lambda file: rewritten(file, **{"bias.0": torch.full((1, 8), torch.nan).half()}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_sentence_that_names_it(file, damage):
    DAMAGES[damage](file)
    with pytest.raises(PredictorError) as caught:
        load_predictor(file)
    sentence = str(caught.value)
    assert str(file) in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    ours = "is a safetensors file, but not a predictor" not in sentence
    assert ours == (damage not in ("not ours", "no metadata"))


def test_a_linear_predictor_keeps_its_layers_ahead_and_its_correction(tmp_path):
    path, trace = tmp_path / "linear", residual_stream()
    network = train(trace, ARCHITECTURES["linear+input"], Recipe(look_ahead=3)).network
    network = FoldedMLP(network.tensors | {"correction.sigmoid": torch.rand(WIDE.num_layers, WIDE.num_experts)})
    save_predictor(path, PredictorCard(WIDE), network)
    _, loaded = load_predictor(path)
    assert (loaded.look_ahead, loaded.nearest(2).look_ahead, loaded.scoring) == (3, 2, "sigmoid")
    ids, x = trace.experts[:9, 0].long(), trace.router_inputs[:9, 0]
    for ahead in (1, 2, 3):
        ours = loaded.to(torch.device("cpu"), torch.float32).logits(ahead, ids, x, ahead)
        # Half precision rounds by 2^-11; sigmoids reduce that.
        assert torch.allclose(ours, network.logits(ahead, ids, x, ahead), atol=0.02)
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    save_file(tensors | {"gates.3": tensors["gates.2"].clone()}, path, metadata)
    with pytest.raises(PredictorError):
        load_predictor(path)


@pytest.mark.parametrize(("gate", "refused"), [(0.7, True), (0.5, False), (None, False)])
def test_a_predictor_that_names_less_than_the_next_gate_is_refused_with_both_numbers(tmp_path, gate, refused):
    metrics = {"trained": {"accuracy": 0.615}} | ({} if gate is None else {"next gate": {"accuracy": gate}})
    path = tmp_path / "predictor"
    save_predictor(path, replace(CARD, metrics=metrics), FOLDED)
    if not refused:
        assert build(path).network.num_layers == SIZES.num_layers
        return
    with pytest.raises(PredictorError, match=r"61\.5%.*70\.0%"):
        build(path)


def build(file, **changes):
    model = RoutedModel(SIZES.num_layers, SIZES.num_experts, SIZES.top_k, hidden=SIZES.hidden, predictor=file)
    return TrainedPredictor.load(replace(model, **({"fingerprint": SIZES.fingerprint} | changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 5}, "4 MoE layers, but this model has 5"),
        ({"num_experts": 4}, "8 experts in a layer, but this model has 4"),
        ({"top_k": 4}, "2 experts for each token, but this model has 4"),
        ({"hidden": 12}, "6 hidden features, but this model has 12"),
        (
            {"fingerprint": "f" * 16},
            "weights 0123456789abcdef",
        ),
        ({"predictor": None}, "needs its file"),
    ],
)
def test_another_model_is_refused_by_name(file, changes, words):
    assert build(file).network.num_layers == SIZES.num_layers
    with pytest.raises(PredictorError, match=words):
        build(file, **changes)
