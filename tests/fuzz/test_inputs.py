"""Damaged or forged input files are refused with a sentence.

These are stores, checkpoints, options, predictors and traces. ``FUZZ_INPUTS=1000000 pytest tests/fuzz -n 8`` tries more
of them. Every input follows from its number, which a failure reports: ``one("options", 4711, folder)`` repeats it.
"""

import contextlib
import itertools
import json
import os
import signal
import traceback
import warnings

import pytest
import torch

from tests.cache.store.stores import write
from tests.cli.checkpoints import make_model
from tests.fuzz.mutations import ODD, odd, odd_file, odd_text, seeded
from tests.prefetch.made_up import SIZES, trained_on_made_up
from tests.small_model import make_experts
from tests.trace.test_trace import make_trace
from vllm_dymoe.cache.store import MANIFEST, FileStore, StoreError
from vllm_dymoe.experts.format import all_keys
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.plan.model import read_shape
from vllm_dymoe.policies import POLICIES
from vllm_dymoe.prefetch.checkpoint import PredictorError, load_predictor, read_card
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError, check_files
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.trace.trace import Trace, TraceError

INPUTS = int(os.environ.get("FUZZ_INPUTS", "10000"))
PARTS = 4  # tests for each kind, so that several processes share the work
SECONDS = 20  # limit for one input; the slowest takes far less than a second
QUANTIZED = (
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "dynamic": {"-:.*x": {}}},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
     "quantized_layers": {"model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}},
    {"quant_method": "quark", "layer_quant_config": {"*experts*": {"weight": {"dtype": "fp4"}}},
     "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}},
    {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {"a.experts": {"bits": 4}}},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}},
    {"quant_method": "dymoe", "format_version": 6, "hi": 4, "lo": 2, "group_size": 64, "quantizer": "rtn",
     "zeros_in_steps": [], "ordered": [], "codebooks": {"4": "mxfp4"}},
)  # fmt: skip


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def exchanged(folder, files, rng, choose=None):
    """Write files with one of them changed."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    name = rng.choice([name for name in files if choose is None or choose(name)])
    change = odd_file if name.suffix == ".safetensors" else lambda data, rng: odd_text(json.loads(data), rng).encode()
    (folder / name).write_bytes(change(files[name], rng))


def of_store(whole, folder, rng):
    exchanged(folder, whole, rng)
    store = FileStore(folder)
    try:
        for key in itertools.islice(all_keys(store.experts), 8):
            store.read_into(key, torch.empty(min(store.experts.formats[key.bits].nbytes, 1 << 24), dtype=torch.uint8))
            store.in_memory(key)
    finally:
        store.close()


def of_checkpoint(whole, folder, rng):
    exchanged(folder, whole, rng, lambda name: name.suffix in (".json", ".safetensors"))
    if rng.random() < 0.5:
        path = folder / "config.json"
        with contextlib.suppress(ValueError, RecursionError):
            config = json.loads(path.read_text())
            if isinstance(config, dict):
                path.write_text(json.dumps(config | {"quantization_config": odd(rng.choice(QUANTIZED), rng)}))
    check_files(folder)
    read_shape(str(folder))
    found = Checkpoint.open(folder)
    found.model_experts((4, 2), 32, torch.bfloat16)
    found.expert(0, 0)
    found.fingerprint()


def of_options(whole, folder, rng):
    policy = rng.choice(list(POLICIES))
    parameters = {name: field.default for name, field in POLICIES[policy].model_fields.items()}
    given = {name: field.default for name, field in Options.model_fields.items()}
    given = json.loads(json.dumps(given, default=str)) | {"policy": policy, "policy_options": parameters, "low": 2}
    given = dict(rng.sample(list(given.items()), rng.randrange(1, len(given))))
    given.setdefault("policy", policy)
    changed = odd(given, rng)
    environment = {f"DYMOE_{rng.choice(list(given)).upper()}": str(rng.choice(ODD)).replace("\0", "")}
    checkpoint = odd(rng.choice(QUANTIZED), rng) if rng.random() < 0.5 else None
    with contextlib.suppress(CheckpointError):
        if isinstance(checkpoint, dict):
            make_reader(checkpoint)
    resolve_options(changed, checkpoint, environment if rng.random() < 0.5 else {})


def of_predictor(whole, folder, rng):
    path = folder / "predictor.safetensors"
    path.write_bytes(odd_file(whole, rng))
    read_card(path).check(path, SIZES)
    load_predictor(path)


def of_trace(whole, folder, rng):
    path = folder / "part.safetensors"
    path.write_bytes(odd_file(whole, rng))
    trace = Trace.load(folder if rng.random() < 0.5 else path)
    list(trace.by_request())


def store_files(folder):
    write(folder / "made", make_experts(layers=2)).close()
    return snapshot(folder / "made")


def checkpoint_files(folder):
    model = make_model(folder / "made")
    model.config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    model.save(shards=2)
    return snapshot(folder / "made")


def trace_file(folder):
    make_trace(inputs=True).save(folder / "made.safetensors")
    return (folder / "made.safetensors").read_bytes()


KINDS = {
    "store": (store_files, of_store, StoreError),
    "checkpoint": (checkpoint_files, of_checkpoint, (CheckpointError, StoreError, ConfigError)),
    "options": (lambda folder: b"", of_options, ConfigError),
    "predictor": (lambda folder: trained_on_made_up(SIZES, folder).read_bytes(), of_predictor, PredictorError),
    "trace": (trace_file, of_trace, TraceError),
}


def too_long(*_):
    raise TimeoutError(f"not ended after {SECONDS} seconds")


def one(kind, number, folder, whole=None):
    """Try an input by its number; return whether it was accepted.

    Refusals return False; all other errors are raised.
    """
    make, attempt, refusals = KINDS[kind]
    if whole is None:
        (folder / "whole").mkdir()
        whole = make(folder / "whole")
    inputs, rng = folder / "input", seeded(kind, number)
    inputs.mkdir(exist_ok=True)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        attempt(whole, inputs, rng)
    except refusals as error:
        if not str(error):
            raise AssertionError("a refusal says why") from error
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_is_refused_with_a_sentence(kind, part, tmp_path):
    before = signal.signal(signal.SIGALRM, too_long)
    (tmp_path / "whole").mkdir()
    whole, count = KINDS[kind][0](tmp_path / "whole"), INPUTS // len(KINDS) // PARTS
    read, unexpected = 0, []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(part * count, (part + 1) * count):
                try:
                    read += one(kind, number, tmp_path, whole)
                except Exception as error:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    unexpected.append(f"{number}: {type(error).__name__}: {str(error)[:150]} ({where.name})")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not unexpected, "\n".join([f"{len(unexpected)} of {count}", *unexpected[:20]])
    assert read < count, "nothing was wrong"
    assert read, "what is whole is refused, so that nothing behind the first check was tried"


def test_a_store_that_is_read_is_not_changed(tmp_path):
    (tmp_path / "whole").mkdir()
    whole, folder = store_files(tmp_path / "whole"), tmp_path / "input"
    folder.mkdir()
    for number in range(60):
        exchanged(folder, whole, seeded("unchanged", number))
        before = snapshot(folder)
        with contextlib.suppress(StoreError):
            store = FileStore(folder)
            for key in itertools.islice(all_keys(store.experts), 4):
                store.in_memory(key)
            store.close()
        assert snapshot(folder) == before
        assert MANIFEST in map(str, before)
