"""A model's packed experts on this rank.

They are the checkpoint's own, an earlier start's, or made while vLLM loads it.
"""

import contextlib
import hashlib
import json
import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index

from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import (
    MANIFEST,
    CheckpointStore,
    DamagedStoreError,
    FileStore,
    HostMemoryError,
    HostPlace,
    HostRoom,
    HostStore,
    Manifest,
    StoreError,
    choose_host_place,
)
from vllm_dymoe.cache.store.disk import Reading
from vllm_dymoe.cache.store.pinning import CudaPinner
from vllm_dymoe.cache.store.shared import SharedMemory, Turn
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.durable import all_leftovers, clean, leftovers, read_regular, write_synced
from vllm_dymoe.executor.rates import RATES
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, Projection, stored_formats
from vllm_dymoe.kernels import Activation
from vllm_dymoe.options import ConfigError, Options, store_root
from vllm_dymoe.quantize import PACKING_VERSION, QUANTIZERS
from vllm_dymoe.quantize.checkpoint import Checkpoint, content_fingerprint
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.quantize.held import Held, widened
from vllm_dymoe.quantize.packer import FALLBACK, ExpertPacker, Given, Journal, is_journal_of
from vllm_dymoe.quantize.readers import PLAIN_READER, Reader
from vllm_dymoe.quantize.readers.base import format_fields, kept_format, own_formats, quantizer_name
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.vllm_plugin.announcements import logger
from vllm_dymoe.vllm_plugin.model_files import local_folder, ranks_of_machine, replicas_of_machine, replicated

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
_READ_FILES = frozenset(("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral"))
"""Load formats that read the model's files; weights of other formats are compared as they come."""
_SAMPLED = 256  # numbers of a tensor that are compared
LOADED = "weights.sha256"  # next to a store: digest of the weights from which it was made


@dataclass(frozen=True)
class LayerSpec:
    """vLLM's description of one MoE layer on this rank."""

    name: str  # prefix in the model, ``model.layers.3.mlp.experts``
    num_experts: int  # on this rank
    top_k: int
    hidden: int
    intermediate: int  # width of an expert on this rank
    dtype: torch.dtype
    bias: bool  # whether every projection has a bias
    rank: int  # of tensor parallelism
    ranks: int
    expert_rank: int  # of expert parallelism
    expert_ranks: int
    activation: Activation = Activation.SILU
    weights_on_input: bool = False  # the router's weights multiply the experts' inputs instead of their outputs
    all_experts: int = 0  # on all ranks, as routers number them; 0 where the rank has all of them
    scattered: tuple[int, ...] = ()  # numbers of its experts among those of all ranks, unless they are consecutive

    @property
    def kind(self) -> tuple[object, ...]:
        plain = replace(self.activation, has_gate=True) == self.activation
        shared = self.rank, self.ranks, self.expert_rank, self.expert_ranks
        return self.hidden, self.dtype, self.bias, plain, shared


class ModelStore:
    """Collects a model's MoE layers, and fills or opens the store of their experts.

    Layers with fewer or narrower experts than the largest layer are stored at its size: zeros fill them up, which
    changes no result, and every slot fits every expert.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: Options,
        checkpoint: Mapping[str, Any] | None,  # its quantization_config, if it is ours
        reader: Reader,
        host_memory: int,  # bytes available to all ranks of this machine
        taken: int = 0,  # bytes taken by another model's experts on this rank
        formats: Mapping[int, ExpertFormat] | None = None,  # formats of that model, whose slots a draft's experts share
        requantize: bool = False,  # the checkpoint has its experts in other formats; they are rounded to `formats`
        keeps: bool = False,  # the experts keep the formats that they have in the checkpoint
    ) -> None:
        self.layers: list[LayerSpec] = []
        self.place: HostPlace | None = None  # None before the first weight
        self.rates: Path | None = None  # file that stores them; None before the first weight
        self.store: HostStore | None = None  # None before the last layer is loaded
        if checkpoint is None and options.stored_bits == (16,):  # no byte depends on them, and equal stores are one
            usual = Options()
            options = options.model_copy(update={"group_size": usual.group_size, "quantizer": usual.quantizer})
        self._vllm_config, self._options, self.reader, self._formats = vllm_config, options, reader, formats
        self._keeps = keeps or (formats is None and reader.mixed and reader.keeps(options.stored_bits))
        self._requantize = requantize or (reader.mixed and not self._keeps)
        self._checkpoint = checkpoint
        self._host_memory, self._taken = host_memory, taken
        self._packed_for = ""  # fingerprint of the model for which the checkpoint's own store was made
        self._loaded = 0
        self._elsewhere = False  # weights come from elsewhere than the model's files
        self._samples: dict[tuple[int, int, int, bool], bytes] = {}  # samples of those weights
        self._turn: Turn | None = None  # lock among ranks that have the same experts
        self._packer: ExpertPacker | None = None
        self._writer: StoreWriter | None = None
        self._progress: tqdm[Any] | None = None

    @property
    def dummy(self) -> bool:
        return bool(self._vllm_config.load_config.load_format == "dummy")

    def add(self, spec: LayerSpec) -> None:
        """Add one layer; ConfigError if its experts differ in kind from those before it."""
        first = self.layers[0] if self.layers else spec
        if spec.kind != first.kind:
            raise ConfigError(
                f"vllm-dymoe: the experts of {spec.name} differ from those of {first.name} "
                "in hidden size, dtype, biases or gates, which is not supported yet; serve this model without "
                "--quantization dymoe."
            )
        if (self.reader.held or (self.reader.mixed and self._keeps)) and spec.intermediate != first.intermediate:
            raise ConfigError(
                f"vllm-dymoe: the quantized experts of {spec.name} are {spec.intermediate} wide and those of "
                f"{first.name} {first.intermediate}, which is supported for 16-bit checkpoints only; "
                "serve this model without --quantization dymoe."
            )
        self.layers.append(spec)

    def put(
        self,
        layer: int,
        expert: int,
        projection: Projection,
        weight: Given,
        *,
        bias: bool = False,
        parts: Mapping[str, Tensor] | None = None,  # the tensors from which a deferred weight is made
    ) -> None:
        """Pack the weight or bias of one projection, unless a complete store exists."""
        with self.filling() as packer:
            if self._elsewhere:
                raw = parts or ({"": weight} if isinstance(weight, Tensor) else {})
                self._samples[layer, expert, projection, bias] = b"".join(
                    name.encode() + _sample(raw[name]) for name in sorted(raw)
                )
            if packer is None:
                return
            if isinstance(weight, Tensor):
                missing = self._width - self.layers[layer].intermediate
                weight = widened(weight, projection, missing)
                if bias:
                    packer.put_bias(layer, expert, projection, weight)
                    return
            if callable(weight) and self._requantize:
                missing = self._width - self.layers[layer].intermediate
                dtype = self.layers[layer].dtype
                packer.put(layer, expert, projection, lambda: widened(_plain(weight(), dtype), projection, missing))
            else:
                packer.put(layer, expert, projection, weight)

    @property
    def _width(self) -> int:
        """Width of the packed experts: that of the widest layer."""
        if self._formats is not None:
            return next(iter(self._formats.values())).intermediate
        return max(layer.intermediate for layer in self.layers)

    @property
    def experts(self) -> ModelExperts:
        spec, ours, width = self.layers[0], self._checkpoint or {}, self._width
        reader = PLAIN_READER if self.reader.mixed else self.reader
        formats = self._formats or stored_formats(
            self._options.stored_bits,
            lambda bits: ExpertFormat(
                spec.hidden, width, group_size=self._options.group_size, dtype=spec.dtype, bias=spec.bias,
                has_gate=spec.activation.has_gate, **format_fields(reader, ours, bits),
            ),
        )  # fmt: skip
        numbers = layer_numbers([layer.name for layer in self.layers])
        count, top_k = (max(sizes) for sizes in zip(*((s.num_experts, s.top_k) for s in self.layers), strict=True))
        own = {}
        if self._keeps and len(formats) == 1:
            ((bits, usual),) = formats.items()
            if self._formats is None:
                usual = kept_format(self.reader.usual, usual, spec.intermediate, spec.ranks)
                formats = {bits: usual}
            named = {number: extract_layer_index(s.name) for number, s in zip(numbers, self.layers, strict=True)}
            own = own_formats(self.reader, named, usual, spec.intermediate, spec.ranks)
        return ModelExperts(numbers, count, top_k, formats, own=own)

    def layer_loaded(self, layer: int) -> bool:
        self._loaded += 1
        complete = self._loaded == len(self.layers)
        with self.filling() as packer:
            if complete and self._elsewhere:
                self._check_loaded(packed=packer is not None)
            if packer is not None:
                _fill_up(packer, layer, self.layers[layer].num_experts)
                if complete:
                    self.store, self._packer = self._placed(packer.finish()), None
        if complete and self._progress is not None:
            self._progress.close()
        return complete

    def _check_loaded(self, *, packed: bool) -> None:
        """Store a digest of the loaded weights next to the store made from them.

        StoreError if an earlier start made the store from other weights.
        """
        digest = hashlib.sha256()
        for place, sample in sorted(self._samples.items()):
            digest.update(f"{place} {len(sample)} ".encode() + sample)
        if packed:
            assert self._writer is not None
            write_synced(self._writer.partial / LOADED, digest.hexdigest().encode())
            return
        try:
            same = read_regular(self._folder / LOADED).decode() == digest.hexdigest()
        except OSError:
            same = False
        if not same:
            raise StoreError(
                f"the packed experts in {self._folder} were made from other weights than those loaded now; "
                f"remove them with `vllm-dymoe cache clean {self._folder.parent.name}` and start again."
            )

    @contextlib.contextmanager
    def filling(self) -> Iterator[ExpertPacker | None]:
        """Yield the packer to fill, or None.

        It is opened before the first weight, and removed after an error.
        """
        try:
            if self.place is None:
                self._open()
            yield self._packer
        except BaseException as error:
            if self._packer is not None and isinstance(error, Exception):
                self._packer.discard()
            elif self._packer is not None:  # the user, or the system, ends the start
                self._packer.interrupt()
            if self._turn is not None:
                self._turn.end()
            if not isinstance(error, StoreError | CheckpointError):
                raise
            raise StoreError(f"vllm-dymoe: {error}") from error

    @cached_property
    def model_fingerprint(self) -> str:
        """Sixteen hex digits that identify the model's weights.

        They do not depend on how its experts are quantized.
        """
        if self.dummy or self._packed_for:
            return self._packed_for or self._manifest.model
        return self._content or self._manifest.model

    @cached_property
    def _content(self) -> str:
        """The digest of the model's files; empty if its weights come from elsewhere.

        Raises:
            CheckpointError: the files cannot be read.
        """
        if self._vllm_config.load_config.load_format not in _READ_FILES:
            return ""
        return content_fingerprint(local_folder(self._vllm_config))

    def close(self, *, served: bool) -> None:
        """Forget everything, and close the store unless it was ``served``.

        A store that was served is closed by its server.
        """
        if self.store is not None and not served:
            self.store.close()
        vars(self).clear()  # a layer's loader refers to this object

    def unchanged(self) -> bool:
        """Return whether the checkpoint's files are those that were read at start."""
        return self.dummy or self._read == _times(local_folder(self._vllm_config))

    @cached_property
    def _manifest(self) -> Manifest:
        options, spec, experts = self._options, self.layers[0], self.experts
        quantizer = quantizer_name(self.reader, options.stored_bits, options.quantizer, kept=self._keeps)
        ranks = spec.rank, spec.ranks, spec.expert_rank, spec.expert_ranks
        # Each is left out where it is as usual, so that stores of earlier versions are found.
        scattered = [layer.scattered for layer in self.layers if layer.scattered]
        read_as = self.reader.format if self.reader.held or self.reader.mixed else ()
        more = filter(None, (scattered, read_as, PACKING_VERSION))
        described = json.dumps([Manifest(experts, quantizer, "").to_json(), ranks, *more])
        config = self._vllm_config.model_config
        if self.dummy:  # of the checkpoint, only the shapes count
            model = fingerprint(f"{described} random with seed {config.seed}")
        else:  # weights that are not in files are compared when they have come
            model = fingerprint(f"{described} {self._content or f'loaded as {config.model} {config.revision}'}")
        return Manifest(experts, "dummy" if self.dummy else quantizer, model, (spec.rank, spec.ranks))

    @property
    def _folder(self) -> Path:
        root, model, spec = store_root(self._options.store_dir), self._manifest.model, self.layers[0]
        name = f"{Path(os.path.abspath(self._vllm_config.model_config.model)).name}-{model}"
        # Equal weights under another name, such as a copy, have the same store.
        found = sorted(folder.name for folder in root.glob(f"*-{model}")) if root.is_dir() else []
        return root / (name if name in found or not found else found[0]) / f"rank-{spec.rank}-{spec.expert_rank}"

    def _open(self) -> None:
        config, experts = self._vllm_config, self.experts
        device = config.device_config.device_type
        own = self._checkpoint is not None and not self.dummy
        self._read = "" if self.dummy else _times(local_folder(config))
        self.place = choose_host_place(self._options.host_store, device, experts, self._room)
        if own:
            existing: FileStore | None = FileStore(local_folder(config), experts.layers)  # the checkpoint's own
            assert existing is not None
            check_belongs(existing, experts, self.layers[0])
            self._packed_for = existing.manifest.model
        else:
            existing = self._in_checkpoint() or cached_store(self._folder, self._manifest)  # of an earlier start
            self._elsewhere = not self.dummy and not self._content
            # An interrupted start is continued if files prove that it was of the same weights.
            resumable = set(leftovers(self._folder)) if existing is None and self._content else set()
            given_up = [left for left in all_leftovers(store_root(self._options.store_dir)) if left not in resumable]
            if removed := clean(given_up):
                logger.info("vllm-dymoe: removed %d unfinished folders of starts that have ended", len(removed))
        if replicated(config.parallel_config):  # one of them packs, and the others find its store
            self._turn = Turn(self._folder)
            if existing is None:
                self._turn.begin()
                existing = cached_store(self._folder, self._manifest)
        if existing is not None:
            if isinstance(existing, CheckpointStore):
                logger.info("vllm-dymoe: experts stay at 16 bits; reading them from %s", existing.description)
                if self._options.checksums == "always":
                    logger.warning(
                        'vllm-dymoe: checksums is "always", but the checkpoint has none; its experts are not verified'
                    )
            else:
                logger.info("vllm-dymoe: the experts are packed already; reading them from %s", existing.folder)
            if not existing.manifest.binds:
                logger.warning(
                    "vllm-dymoe: this store, of version %d, has no digests of its shards; `vllm-dymoe "
                    "inspect --verify %s` checks the shards once and adds digests", existing.manifest.version,
                    existing.folder,
                )  # fmt: skip
            self.store = self._placed(existing)
            return
        purpose = json.dumps(self._manifest.to_json())
        resume: dict[str, Any] = {"resume": lambda left: is_journal_of(left, purpose)} if self._content else {}
        writer = self._writer = StoreWriter(self._folder, self._manifest, **resume)
        journal = Journal(writer.partial, purpose) if self._content else None
        each = experts.num_experts * len(experts.projections)
        done = 0 if journal is None else len(journal.layers) * each
        # The estimate is by what this start packs, not by what an earlier one has packed.
        what, total = "Making random experts" if self.dummy else "Quantizing experts", len(experts.layers) * each
        self._progress = tqdm(total=total, initial=done, desc=what, unit=" projections", dynamic_ncols=True)
        if self.dummy:
            self.store = self._placed(random_store(experts, writer, config.model_config.seed, self._progress.update))
        else:
            # There is no calibration for a draft's experts.
            quantizer = QUANTIZERS.get(self._options.quantizer, QUANTIZERS[FALLBACK])
            if journal is not None and journal.layers:
                logger.info(
                    "vllm-dymoe: an earlier start was interrupted; of %d layers %d are packed already",
                    len(experts.layers), len(journal.layers),
                )  # fmt: skip
            self._packer = ExpertPacker(experts, quantizer, writer, self._progress.update, journal)

    def _in_checkpoint(self) -> CheckpointStore | None:
        """Return the checkpoint's own files, if a packed copy would have equal bytes.

        That is the case at 16 bits. None on a CPU without ``host_store`` "pinned", which computes from a mapped packed
        copy; and None if a rank has parts of experts or some of the experts, if ranks share a copy, if vLLM moves
        experts between ranks, or with a draft.
        """
        config, spec = self._vllm_config, self.layers[0]
        if self.dummy or not self._content or set(self._options.stored_bits) != {16} or self._formats is not None:
            return None
        parallel = config.parallel_config
        alone = spec.ranks == spec.expert_ranks == 1 and not parallel.enable_eplb and not replicated(parallel)
        if not alone or config.speculative_config is not None:
            return None
        assert self.place is not None
        if not (self._room.separate or self.place.pinned):
            return None
        try:
            checkpoint = Checkpoint.open(local_folder(config))
        except CheckpointError:
            return None  # an unusual checkpoint; vLLM's loader passes its experts
        places = checkpoint.plain_places(self.experts)
        return None if places is None else CheckpointStore(checkpoint.folder, self._manifest, places)

    @cached_property
    def _room(self) -> HostRoom:
        options, parallel = self._options, self._vllm_config.parallel_config
        ranks, replicas = ranks_of_machine(parallel), replicas_of_machine(parallel)
        separate = self._vllm_config.device_config.device_type != "cpu" or options.link_gbps is not None
        available = max(0, self._host_memory - self._taken * ranks)
        return HostRoom(available, ranks, options.host_memory, self._taken, separate, replicas)

    def _placed(self, files: FileStore) -> HostStore:
        assert self.place is not None
        device, self.rates = torch.device(self._vllm_config.device_config.device), files.folder / RATES
        if not self.place.pinned:
            files.reading = self._reading(files)
        options = self._options
        asked, timeout = options.host_store != "auto", options.transfer_timeout_s or None
        shared = None if self._turn is None else SharedMemory(files.folder, self._turn)
        store, self.place = place_experts(files, self.place, device, asked_for=asked, timeout=timeout, shared=shared)
        if self._turn is not None:
            self._turn.end()
        return store

    def _reading(self, files: FileStore) -> Reading:
        """Return how to read the files.

        Reads bypass the page cache if that is faster, or if the page cache may hold nothing.

        A CPU whose page cache can hold all experts computes from it, so no disk's rate matters.
        """
        assert self.place is not None
        options, experts, room = self._options, files.experts, self._room
        rate = options.disk_gbps and options.disk_gbps * 1e9
        plain = Reading(check=options.checksums, bytes_per_second=rate)
        if options.host_store == "file":
            return plain
        mine = room.available // room.ranks
        used = self.place.host_cache
        if not room.separate:  # slots are in host memory: half of it, unless the user says how much
            budget = options.expert_budget
            used = budget.bytes or int((budget.share or 0) * experts.stored_nbytes) or mine // 2 * budget.is_auto
        held = min(1.0, max(0, mine - used) / experts.stored_nbytes) if options.host_memory.is_auto else 0.0
        if held == 1.0 and not room.separate:
            return plain
        rates = files.rates()
        direct = rates.read_past_cache(held)
        return replace(plain, direct=direct, depth=rates.depth, drops=not (direct or options.host_memory.is_auto))


def _plain(weight: Tensor | Held, dtype: torch.dtype) -> Tensor:
    """Return the weights in a dtype; StoreError if it would round their scales."""
    if not isinstance(weight, Held):
        return weight
    try:
        weight.check_scales(dtype)
    except ValueError as error:
        raise StoreError(f"an expert cannot be dequantized: {error}") from error
    return weight.dequantize()


def _fill_up(packer: ExpertPacker, layer: int, first: int) -> None:
    """Store zeros for the experts that a layer lacks.

    No router chooses them.

    Args:
        first: number of the first missing expert.
    """
    experts = packer.experts
    fmt = next(iter(experts.formats.values()))
    for expert in range(first, experts.num_experts):
        for projection in experts.projections:
            form = fmt.matrices[projection]
            packer.put(layer, expert, projection, torch.zeros(form.rows, form.columns, dtype=fmt.dtype))
            if fmt.bias:
                packer.put_bias(layer, expert, projection, torch.zeros(form.rows, dtype=fmt.dtype))


def layer_numbers(names: list[str]) -> tuple[int, ...]:
    """Return indices of layers, which name their files.

    A second stack (images) continues after the highest index.
    """
    stacks: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        stacks.setdefault(re.sub(r"\d+", "", name), []).append(place)
    numbers = [extract_layer_index(name) for name in names]
    used: set[int] = set()
    for places in stacks.values():
        shift = max(used) + 1 if used.intersection(numbers[place] for place in places) else 0
        for place in places:
            numbers[place] += shift
            used.add(numbers[place])
    return tuple(numbers)


def fingerprint(described: str) -> str:
    """Return sixteen hex digits that identify the content of a store."""
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _times(folder: Path) -> str:
    """Return the metadata of a checkpoint's files.

    It changes with every write to one of them.
    """
    said = []
    for path in sorted(folder.iterdir()):
        if path.suffix in _WEIGHT_SUFFIXES or path.name == "config.json":
            try:
                status = path.stat()
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read ({error.strerror}); download it again.") from error
            said.append(f"{path.name} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
    return "\n".join(said)


def _sample(tensor: Tensor) -> bytes:
    """Return a sample that identifies a loader's weights.

    It has the shape, dtype and middle of a tensor, up to 512 bytes.
    """
    while tensor.dim() > 1 and len(tensor):
        tensor = tensor[len(tensor) // 2]
    begin = max(0, tensor.numel() - _SAMPLED) // 2
    part = tensor.flatten()[begin : begin + _SAMPLED].detach().cpu().contiguous()
    return f"{tuple(tensor.shape)} {tensor.dtype}".encode() + part.view(torch.uint8).numpy().tobytes()


def cached_store(folder: Path, manifest: Manifest) -> FileStore | None:
    """Return the store of an earlier start if it is the one that would be written now.

    None if there is none, or if it is proven to be damaged. StoreError if it cannot be opened now, which is no reason
    to write it again.
    """
    if not os.path.lexists(folder / MANIFEST):
        return None
    try:
        store = FileStore(folder)
    except DamagedStoreError as error:
        logger.warning("vllm-dymoe: %s It is being written again.", error)
        return None
    if store.manifest != manifest:
        logger.warning("vllm-dymoe: the store in %s is another model's; it is replaced", folder)
        store.close()
        return None
    return store


def held_bytes(store: HostStore | None) -> int:
    """Return the host memory that a model's experts take, in bytes."""
    return store.slots.nbytes if isinstance(store, HostCache) else 0


def place_experts(
    files: FileStore,
    place: HostPlace,
    device: torch.device,
    *,
    asked_for: bool,
    timeout: float | None = None,
    shared: SharedMemory | None = None,  # for all experts, if other ranks of this machine have the same
) -> tuple[HostStore, HostPlace]:
    """Put host memory between the device and files.

    If it is to hold all experts, it is filled, with progress.

    Returns:
        The store, and where it is. Memory that cannot be pinned as a whole is pinned as far as the system allows,
        unless pinned memory was ``asked_for``. If there is no memory after all, experts stay in files.

    Raises:
        StoreError: the files cannot be read, or memory that was ``asked_for`` cannot be allocated or pinned.
    """
    if not place.host_cache:
        return files, place
    pinner = CudaPinner(device) if device.type == "cuda" else None
    try:
        shares = shared if place.pinned else None
        host_cache = HostCache(files, place.host_cache, pinner, timeout, shares, fills=place.pinned)
        if place.pinned and asked_for and (refused := host_cache.slots.refused) is not None:
            host_cache.release()
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            raise HostMemoryError(
                f"the experts need {place.host_cache} bytes of pinned host memory, but pinning failed ({refused})"
                + f", the limit on locked memory (ulimit -l) is {limit} bytes" * (limit != resource.RLIM_INFINITY)
            )
    except HostMemoryError as error:
        if asked_for or not place.pinned:
            raise StoreError(f'{error}; lower host_memory, or use host_store = "file".') from error
        return files, HostPlace(False, f"auto: {error}")
    if place.pinned:
        total, what = files.experts.stored_nbytes, "Reading experts into memory"
        with tqdm(total=total, desc=what, unit="B", unit_scale=True, dynamic_ncols=True) as progress:
            host_cache.fill(progress.update)
    return host_cache, place


def check_belongs(store: FileStore, experts: ModelExperts, spec: LayerSpec) -> None:
    """Check that a checkpoint's own store is for this model, dtype and rank.

    Raises:
        StoreError: it is not; the store is closed.
    """
    held = store.experts
    for what, has, needs in (
        ("tensor-parallel ranks", store.manifest.tensor_parallel, (spec.rank, spec.ranks)),
        ("experts per layer", held.num_experts, experts.num_experts),
        ("expert formats", held.formats, experts.formats),
    ):
        if has != needs:
            store.close()
            raise StoreError(
                f"the experts in {store.folder} do not fit this model: the store has {what} {has}, the model needs "
                f"{needs}; write the checkpoint again with `vllm-dymoe quantize` for this model, dtype and parallel "
                "size."
            )
