"""The packed experts of a rank: which they are, and where they are kept.

Experts that do not belong to the model, and memory that is missing, are refused.
"""

import dataclasses
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.cache.store.pinners import RecordedPinner
from tests.cache.store.stores import write
from tests.cli.checkpoints import EXPERTS as EXPERTS_OF_MODEL
from tests.cli.checkpoints import HIDDEN, INTERMEDIATE, MOE_LAYERS, expert_tensors, make_model
from tests.errors import refused
from tests.small_model import make_experts
from vllm_dymoe import durable
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import MANIFEST, FileStore, HostPlace, Manifest, StoreError, whole_host_cache
from vllm_dymoe.cache.store import files as model_files_of_store
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.format import Projection, all_keys
from vllm_dymoe.options import Options, store_root
from vllm_dymoe.quantize.checkpoint import Checkpoint, content_fingerprint
from vllm_dymoe.quantize.convert import convert
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.quantize.readers import PLAIN_READER, make_reader
from vllm_dymoe.quantize.readers.base import MixedReader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.vllm_plugin import model_store
from vllm_dymoe.vllm_plugin.model_store import LayerSpec, ModelStore, cached_store, check_belongs, place_experts

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EXPERTS = make_experts()
PINNED = HostPlace(True, "auto: there is room", whole_host_cache(EXPERTS))
SPEC = LayerSpec("layers.1.mlp.experts", 6, 2, 64, 32, torch.bfloat16, False, 0, 1, 0, 1)


@pytest.fixture
def files(tmp_path):
    experts = make_experts()
    store = random_store(experts, StoreWriter(tmp_path / "store", Manifest(experts, "dummy", "a model")), seed=1)
    yield store
    store.close()


@pytest.fixture
def pinner(monkeypatch):
    pinner = RecordedPinner()
    monkeypatch.setattr(model_store, "CudaPinner", lambda device: pinner)
    return pinner


@pytest.mark.parametrize(("device", "pinned"), [(CPU, 0), (CUDA, 2)])
def test_memory_is_filled_and_pinned_where_there_is_a_gpu(files, pinner, device, pinned, capsys):
    with_files = FileStore(files.folder)
    store, place = place_experts(files, PINNED, device, asked_for=False)
    assert isinstance(store, HostCache)
    assert store.whole
    assert store.readable
    assert place == PINNED
    assert len(pinner.pinned) == pinned
    for key in all_keys(store.experts):
        packed = torch.empty(store.experts.formats[key.bits].nbytes, dtype=torch.uint8)
        with_files.read_into(key, packed)
        assert torch.equal(store.packed(key), packed)
    with_files.close()
    assert "Reading experts into memory: 100%" in capsys.readouterr().err
    store.close()


def test_memory_that_cannot_be_pinned_is_refused_where_it_was_asked_for(files, pinner):
    assert place_experts(files, HostPlace(False), CUDA, asked_for=False) == (files, HostPlace(False))
    assert pinner.calls == []
    pinner._refuse = 1
    with pytest.raises(StoreError, match="CUDA error 2"):
        place_experts(files, PINNED, CUDA, asked_for=True)
    assert not pinner.pinned


def test_and_otherwise_it_is_held_behind_buffers_and_the_line_says_why(files, pinner):
    pinner._refuse = 0
    store, place = place_experts(files, PINNED, CUDA, asked_for=False)
    assert isinstance(store, HostCache)
    assert (store.whole, store.readable, store.slots.pinned) == (True, False, 0)
    assert "0 B of it pinned, the rest behind staging buffers: CUDA error 2: out of memory" in store.description
    assert place == PINNED
    store.close()


def test_memory_that_cannot_be_had_is_refused_where_it_was_asked_for_and_a_reason_elsewhere(files, monkeypatch):
    monkeypatch.setattr("vllm_dymoe.cache.host_slots.available_host_memory", lambda: 1000)
    for place in (PINNED, HostPlace(False, "", PINNED.host_cache)):
        with pytest.raises(StoreError, match=f"{PINNED.host_cache} bytes, but 1000 bytes"):
            place_experts(files, place, CPU, asked_for=place.pinned)
    store, place = place_experts(files, PINNED, CPU, asked_for=False)
    assert (store, place.host_cache) == (files, 0)
    assert place.reason.endswith("but 1000 bytes are free")


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
    check_belongs(store, EXPERTS, SPEC)
    with pytest.raises(StoreError, match=sentence) as caught:
        check_belongs(store, experts, spec)
    assert str(store.folder) in str(caught.value)
    assert "write the checkpoint again with `vllm-dymoe quantize`" in str(caught.value)


def test_a_damaged_or_another_models_store_of_an_earlier_start_is_written_again_with_a_warning(tmp_path, warnings):
    manifest = Manifest(EXPERTS, "rtn", "a model")
    write(tmp_path / "store").close()
    os.truncate(tmp_path / "store" / file_name(2), 5000)
    assert cached_store(tmp_path / "store", manifest) is None
    (warning,) = warnings()
    assert "the file was truncated" in warning
    assert "It is being written again." in warning
    write(tmp_path / "store").close()
    again = cached_store(tmp_path / "store", manifest)
    assert isinstance(again, FileStore)
    again.close()
    assert cached_store(tmp_path / "store", dataclasses.replace(manifest, quantizer="hqq")) is None
    assert "is another model's; it is replaced" in warnings()[1]


def vllm_config(model, load_format="auto", **parallel):
    """Return the part of vLLM's configuration that a model's store reads."""
    ranks = {
        "enable_eplb": False, "data_parallel_size": 1, "enable_expert_parallel": False, "local_world_size": 1,
        "data_parallel_size_local": 1,
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), seed=0, revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        parallel_config=SimpleNamespace(**ranks | parallel),
        device_config=SimpleNamespace(device_type="cpu", device="cpu"),
        speculative_config=None,
    )


def load(model, root, *, load_format="auto", weights=None, host_store="file", scattered=(), asked=None, **parallel):
    """Load a model as vLLM does; return its store and whether this start packed it.

    Args:
        scattered: see ``LayerSpec``.
        asked: options other than those of the other tests.
    """
    options = Options(
        **{"high": 4, "low": 2, "group_size": 32, "store_dir": root, "host_store": host_store, **(asked or {})}
    )
    loading = ModelStore(vllm_config(model.folder, load_format, **parallel), options, None, PLAIN_READER, 1 << 30)
    for number in MOE_LAYERS:
        name = f"model.layers.{number}.mlp.experts"
        sizes = EXPERTS_OF_MODEL, 2, HIDDEN, INTERMEDIATE, torch.bfloat16, False
        loading.add(LayerSpec(name, *sizes, 0, 1, 0, 1, scattered=scattered))
    packed = False
    for position in range(len(MOE_LAYERS)):
        for (layer, expert, projection), weight in (weights or model.experts).items():
            if layer == position:
                loading.put(layer, expert, projection, weight)
                packed |= loading._packer is not None
        loading.layer_loaded(position)
    return loading.store, packed


def experts_of(store):
    slices = []
    for key in all_keys(store.experts):
        slices.append(torch.empty(store.experts.formats[key.bits].nbytes, dtype=torch.uint8))
        store.read_into(key, slices[-1])
    return torch.cat(slices)


def doubled(model):
    return {place: weight * 2 for place, weight in model.experts.items()}


@pytest.fixture
def model(tmp_path):
    model = make_model(tmp_path / "models" / "model")
    model.folder.parent.mkdir()
    model.save()
    return model


def test_a_store_is_found_again_and_a_mere_copy_of_the_model_finds_it(model, tmp_path):
    first, packed = load(model, tmp_path / "cache")
    assert packed
    assert not load(model, tmp_path / "cache")[1]
    copy = dataclasses.replace(model, folder=tmp_path / "another-name")
    shutil.copytree(model.folder, copy.folder)
    for path in copy.folder.iterdir():
        os.utime(path, (1, 1))
    store, packed = load(copy, tmp_path / "cache")
    assert not packed
    assert store.folder == first.folder


def test_a_model_in_the_working_folder_has_its_folders_name(model, tmp_path, monkeypatch):
    monkeypatch.chdir(model.folder)
    store, _ = load(dataclasses.replace(model, folder=Path(".")), tmp_path / "cache")
    assert store.folder.parent.name.startswith("model-")


def test_other_weights_with_equal_names_sizes_and_times_have_another_store(model, tmp_path):
    """Times are equal in reproducible images, in Nix and squashfs, or after ``touch``."""
    first, _ = load(model, tmp_path / "cache")
    other = dataclasses.replace(model, experts=doubled(model))
    other.tensors = model.dense | expert_tensors(other.experts, "separate")
    before = (model.folder / "model.safetensors").stat()
    other.save()
    os.utime(model.folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (model.folder / "model.safetensors").stat().st_size == before.st_size
    second, packed = load(other, tmp_path / "cache")
    assert packed
    assert not torch.equal(experts_of(second), experts_of(first))


def test_a_rank_with_other_experts_of_the_model_has_another_store(model, tmp_path):
    """Round-robin placement gives a rank as many experts as linear, but others."""
    first, _ = load(model, tmp_path / "cache")
    other, packed = load(model, tmp_path / "cache", scattered=(0, 2, 4, 6), weights=doubled(model))
    assert packed
    assert other.folder != first.folder
    assert not load(model, tmp_path / "cache", scattered=(0, 2, 4, 6))[1]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


@pytest.mark.parametrize("mixed", [False, True])
def test_weights_that_are_read_in_another_way_have_another_store(model, tmp_path, mixed):
    """The two versions of GPTQ differ in the zero points that the same numbers mean."""

    def identity(version):
        reader = make_reader(GPTQ | {"checkpoint_format": version})
        if mixed:
            reader = MixedReader.of({(layer, of): reader for layer in MOE_LAYERS for of in Projection})
        options = Options(high=4, low=0, group_size=32, store_dir=tmp_path)
        loading = ModelStore(vllm_config(model.folder), options, None, reader, 1 << 30)
        loading.add(dataclasses.replace(SPEC, hidden=HIDDEN, intermediate=INTERMEDIATE))
        return loading._manifest.model

    assert identity("gptq") == identity("gptq")
    assert identity("gptq") != identity("gptq_v2")


def test_after_a_change_of_what_is_packed_stores_of_earlier_versions_are_not_used(model, tmp_path, monkeypatch):
    load(model, tmp_path / "cache")
    monkeypatch.setattr(model_store, "PACKING_VERSION", model_store.PACKING_VERSION + 1)
    assert load(model, tmp_path / "cache")[1]


def test_options_that_change_no_byte_at_16_bits_change_no_store(model, tmp_path):
    first, packed = load(model, tmp_path / "cache", asked={"high": 16, "low": 0, "group_size": 32})
    assert packed
    others = {"high": 16, "low": 0, "group_size": 128, "quantizer": "hqq"}
    store, packed = load(model, tmp_path / "cache", asked=others)
    assert (packed, store.folder) == (False, first.folder)


@pytest.mark.parametrize("checksums", ["first", "always"])
def test_a_warning_says_that_a_checkpoints_own_experts_cannot_be_verified(model, tmp_path, warnings, checksums):
    asked = {"high": 16, "low": 0, "checksums": checksums}
    store, packed = load(model, tmp_path / "cache", host_store="pinned", asked=asked)
    assert (packed, store.files.folder) == (False, model.folder)
    assert ["checksums" in line for line in warnings()] == [True] * (checksums == "always")
    store.close()


@pytest.mark.parametrize("load_format", ["auto", "runai_streamer"])
def test_weights_that_come_from_elsewhere_are_compared_with_those_of_the_store(model, tmp_path, load_format):
    """Weights that do not come from the model's files are compared with the store's.

    They come from an object store's loader or from a custom one. The folder then has only a configuration, or other
    weights.
    """
    if load_format == "auto":
        (model.folder / "model.safetensors").unlink()
    first, packed = load(model, tmp_path / "cache", load_format=load_format)
    assert packed
    again, packed = load(model, tmp_path / "cache", load_format=load_format)
    assert (packed, again.folder) == (False, first.folder)
    with pytest.raises(StoreError, match="vllm-dymoe cache clean"):
        load(model, tmp_path / "cache", load_format=load_format, weights=doubled(model))


def test_weights_that_can_only_be_sampled_as_files_make_a_difference(tmp_path):
    """Files that the plugin cannot read, such as torch's, are sampled."""
    found = set()
    for content in (b"a" * 10_000, b"a" * 5_000 + b"b" + b"a" * 4_999, b"a" * 10_001):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        os.utime(tmp_path / "pytorch_model.bin", (0, 0))
        found.add(content_fingerprint(tmp_path))
    assert len(found) == 3
    (tmp_path / "pytorch_model.bin").unlink()
    assert content_fingerprint(tmp_path) == ""


def test_all_samples_are_asked_for_before_the_first_is_waited_for(model, monkeypatch):
    """A disk that reads one sample at a time would delay every start by seconds."""
    calls, advise, read = [], os.posix_fadvise, os.pread

    def advised(file, begin, nbytes, advice):
        calls.append(("asked", begin, nbytes))
        assert nbytes > 0, "0 would mean the rest of the file"
        advise(file, begin, nbytes, advice)

    def sampled(file, nbytes, begin):
        calls.append(("read", begin, nbytes))
        return read(file, nbytes, begin)

    checkpoint = Checkpoint.open(model.folder)
    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(os, "pread", sampled)
    checkpoint.fingerprint()
    asked = [what for call, *what in calls if call == "asked"]
    assert [what for call, *what in calls if call == "read"] == asked
    assert [call for call, *_ in calls] == ["asked"] * len(asked) + ["read"] * len(asked)


def test_a_link_to_absent_is_a_sentence(model, tmp_path):
    (model.folder / "model.safetensors").rename(tmp_path / "packed")
    (model.folder / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(StoreError, match="download it again"):
        load(model, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_fifo_among_a_models_files_does_not_hang(model, tmp_path, name):
    (model.folder / name).unlink(missing_ok=True)
    os.mkfifo(model.folder / name)
    if name == "model.safetensors":
        with pytest.raises(StoreError):
            load(model, tmp_path / "cache")
    with pytest.raises(CheckpointError):
        Checkpoint.open(model.folder)


def test_a_file_beside_the_weights_that_is_a_link_to_absent_is_named(model, tmp_path):
    (model.folder / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="tokenizer"):
        convert(Checkpoint.open(model.folder), tmp_path / "out", Options(high=4, low=2, group_size=32))


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE])
def test_a_store_that_cannot_be_opened_now_is_left_as_it_is(model, tmp_path, monkeypatch, code):
    store, _ = load(model, tmp_path / "cache")
    before = {path.name: path.stat().st_ino for path in store.folder.iterdir()}
    for failing in (MANIFEST, file_name(1)):
        real = durable.open_regular

        def fail(path, real=real, failing=failing):
            if Path(path).name == failing:
                raise OSError(code, os.strerror(code))
            return real(path)

        for module in (durable, model_files_of_store):
            monkeypatch.setattr(module, "open_regular", fail)
        monkeypatch.setattr(model_store, "StoreWriter", lambda *_, **__: pytest.fail("written again"))
        with pytest.raises(StoreError):
            load(model, tmp_path / "cache")
        monkeypatch.undo()
    assert {path.name: path.stat().st_ino for path in store.folder.iterdir()} == before


def test_an_interrupted_start_goes_on_with_the_layers_that_it_had_not_packed(model, tmp_path, monkeypatch):
    whole, _ = load(model, tmp_path / "whole")
    synced, real = [], StoreWriter.sync

    def sync(writer, layer):
        real(writer, layer)
        synced.append(layer)

    monkeypatch.setattr(StoreWriter, "sync", sync)

    class EndsTheStart(BaseException):
        pass

    def put(packer, layer, expert, *given):
        if (layer, expert) == (1, 1):
            raise EndsTheStart
        real_put(packer, layer, expert, *given)

    real_put = ExpertPacker.put
    monkeypatch.setattr(ExpertPacker, "put", put)
    with pytest.raises(EndsTheStart):
        load(model, tmp_path / "cache")
    monkeypatch.setattr(ExpertPacker, "put", real_put)
    packed = []
    monkeypatch.setattr(
        model_store, "ExpertPacker", lambda *given: packed.append(given[-1].layers.keys()) or ExpertPacker(*given)
    )
    store, now = load(model, tmp_path / "cache")
    assert now
    assert [list(layers) for layers in packed] == [[0]]
    assert synced == [*range(len(MOE_LAYERS))], "each layer once"
    assert torch.equal(experts_of(store), experts_of(whole))
    assert store.manifest.errors == whole.manifest.errors
    assert [path.name for path in store.folder.parent.iterdir()] == [store.folder.name]


def test_every_start_removes_what_ended_ones_left(model, tmp_path):
    store, _ = load(model, tmp_path / "cache")
    left = store.folder.parent.parent / "another-model" / "rank-0-0.partial-"
    for name in (f"{left}{durable._boot()}-0", f"{left}{durable._boot()}-1-replaced"):
        Path(name).mkdir(parents=True)
    living = StoreWriter(left.with_name("rank-0-1"), Manifest(EXPERTS, "rtn", "a model"))
    load(model, tmp_path / "cache")
    assert list(left.parent.iterdir()) == [living.partial]
    living.discard()


@pytest.mark.parametrize("host_store", ["file", "pinned"])
def test_ranks_with_the_same_experts_read_a_store_that_nobody_may_write(model, tmp_path, monkeypatch, host_store):
    many = {"data_parallel_size": 2, "data_parallel_size_local": 2}
    first, packed = load(model, tmp_path / "cache", host_store="file", **many)
    assert packed
    for lock in first.folder.parent.glob("*.lock"):
        lock.unlink()
    real = os.open

    def read_only(path, flags, *mode, **more):
        if str(tmp_path / "cache") in str(path) and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    store, packed = load(model, tmp_path / "cache", host_store=host_store, **many)
    assert not packed
    assert torch.equal(experts_of(store), experts_of(first))
    store.close()


@pytest.mark.parametrize("home", [None, ""])
def test_without_a_home_the_folder_has_to_be_named(monkeypatch, home):
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with refused(option="store_dir"):
        store_root(None)
    with refused(option="store_dir"):
        store_root(Path("~nosuch/x"))
    assert store_root(Path("/there")) == Path("/there")


@pytest.mark.parametrize(("keeps", "bits"), [(True, 16), (False, 4)])
def test_a_drafts_experts_have_their_own_format_or_the_models(tmp_path, keeps, bits):
    """A draft's experts keep 16 bits, or get the bits of the model's.

    They keep 16 bits next to experts that another tool has quantized. Where the plugin quantizes, drafts get its bits.
    """
    options = Options(high=4, low=0, group_size=32, store_dir=tmp_path)
    model = make_experts(bits=(4,), hidden=HIDDEN, intermediate=INTERMEDIATE).formats
    draft = ModelStore(vllm_config(tmp_path), options, None, PLAIN_READER, 1 << 30, 0, model, keeps=keeps)
    spec = LayerSpec("model.layers.9.mlp.experts", 6, 2, HIDDEN, INTERMEDIATE, torch.bfloat16, False, 0, 1, 0, 1)
    draft.add(spec)
    assert draft.experts.formats == model
    assert draft.experts.of_layers[0][4].bits == bits
