"""Which packed experts belong to a rank: the checkpoint's own, an earlier start's or new ones; and where they live.

A store that is made while a model loads is found again by its fingerprint.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tqdm import tqdm
from vllm.config import VllmConfig

from vllm_dymoe.config import Options
from vllm_dymoe.kernels import Activation
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.store import (
    MANIFEST,
    STORE_VERSION,
    FileStore,
    HostMemoryError,
    HostStore,
    Manifest,
    MemoryStore,
    StoreError,
)
from vllm_dymoe.store.page_lock import CudaPageLock
from vllm_dymoe.store.placement import HostPlace, choose_host_place
from vllm_dymoe.store.writer import StoreWriter
from vllm_dymoe.vllm_adapter.checkpoint import local_folder
from vllm_dymoe.vllm_adapter.report import logger

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")


@dataclass(frozen=True)
class LayerSpec:
    """What vLLM says of one MoE layer on this rank.

    Attributes:
        name: prefix in the model, ``model.layers.3.mlp.experts``.
        num_experts: local experts.
        top_k: experts per token.
        hidden: model width.
        intermediate: expert width on this rank.
        dtype: of the weights.
        bias: whether every projection has one.
        rank: tensor-parallel rank, of ``ranks``.
        expert_rank: expert-parallel rank, of ``expert_ranks``.
        activation: of the gate.
        weights_on_input: the router's weights multiply what experts read, and not what they give.
    """

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    bias: bool
    rank: int
    ranks: int
    expert_rank: int
    expert_ranks: int
    activation: Activation = Activation.SILU
    weights_on_input: bool = False


class RankStore:
    """Finds or opens the store of one rank.

    Args:
        vllm_config: vLLM's configuration of this engine.
        options: validated options.
        spec: any layer of the rank.
        experts: of the rank.
        quantizer: name of what packs them.
        packed: the checkpoint is a store itself.
        host_memory: bytes that all ranks of this machine can get.

    Attributes:
        dummy: experts are random, and nothing is read from the checkpoint.
        place: where the experts live.
        seed: of dummy weights.

    Raises:
        StoreError: memory that was asked for cannot be had.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: Options,
        spec: LayerSpec,
        experts: ModelExperts,
        quantizer: str,
        *,
        packed: bool,
        host_memory: int,
    ) -> None:
        self.dummy = vllm_config.load_config.load_format == "dummy"
        self.seed = vllm_config.model_config.seed
        self._vllm_config = vllm_config
        self._options = options
        self._spec = spec
        self._experts = experts
        self._quantizer = quantizer
        self._packed = packed and not self.dummy
        self._packed_for = ""  # fingerprint of the model that the checkpoint's own store was made from
        device, ranks = vllm_config.device_config.device_type, vllm_config.parallel_config.local_world_size
        self.place = choose_host_place(options.host_store, device, experts, host_memory, ranks)

    def existing(self) -> FileStore | None:
        """The checkpoint's own store, or the one that an earlier start has left; None if there is none.

        Raises:
            StoreError: the checkpoint's store is not for this model, dtype or rank.
        """
        if not self._packed:
            return cached_store(self._folder, self._manifest)
        folder = local_folder(self._vllm_config)
        store = FileStore(folder, self._experts.layers)
        _check_belongs(store, self._experts, self._spec, folder)
        self._packed_for = store.manifest.model
        return store

    def writer(self) -> StoreWriter:
        """The way into a new store.

        Raises:
            StoreError: it cannot be written.
        """
        return StoreWriter(self._folder, self._manifest)

    def placed(self, files: HostStore) -> HostStore:
        """The packed experts where they are to live: the files themselves, or memory that is filled from them.

        Raises:
            StoreError: the files cannot be read, or memory that was asked for cannot be had.
        """
        device = torch.device(self._vllm_config.device_config.device)
        asked_for = self._options.host_store != "auto"
        store, self.place = place_experts(files, self.place, device, asked_for=asked_for)
        return store

    @cached_property
    def model_fingerprint(self) -> str:
        """Sixteen hex digits of the model's weights, whatever was made of its experts; what traces are known by."""
        if self.dummy:
            return self._fingerprint
        if self._packed_for:
            return self._packed_for
        folder = local_folder(self._vllm_config)
        try:
            return Checkpoint(folder).fingerprint()
        except CheckpointError:  # vLLM reads more kinds of checkpoints than we do
            return fingerprint(folder, "its routers")

    @property
    def _folder(self) -> Path:
        root = self._options.store_dir or Path.home() / ".cache" / "vllm-dymoe"
        name = Path(self._vllm_config.model_config.model).name
        rank = f"rank-{self._spec.rank}-{self._spec.expert_rank}"
        return root.expanduser() / f"{name}-{self._fingerprint}" / rank

    @cached_property
    def _fingerprint(self) -> str:
        """Of what is packed and how; it looks at every file of the checkpoint."""
        spec = self._spec
        described = (self._experts, self._quantizer, spec.rank, spec.ranks, spec.expert_rank, spec.expert_ranks)
        if self.dummy:  # of the checkpoint, only the shapes count
            return fingerprint(None, f"{described} random with seed {self.seed}")
        return fingerprint(local_folder(self._vllm_config), str(described))

    @property
    def _manifest(self) -> Manifest:
        quantizer = "dummy" if self.dummy else self._quantizer
        return Manifest(self._experts, quantizer, self._fingerprint, (self._spec.rank, self._spec.ranks))


def check_ranks(folder: Path, ranks: int) -> None:
    """Refuse a store that is cut for another number of tensor-parallel ranks, as far as it is on this machine.

    Raises:
        StoreError: it is, or cannot be read.
    """
    if not (folder / MANIFEST).is_file():
        return
    _, packed_for = Manifest.read(folder).tensor_parallel
    if ranks != packed_for:
        raise StoreError(
            f"the experts in {folder} are packed for --tensor-parallel-size {packed_for}, not {ranks}; "
            "serve them with that, or serve the 16-bit checkpoint that they were made from."
        )


def fingerprint(folder: Path | None, purpose: str) -> str:
    """Sixteen hex digits that change with the checkpoint's files, with what is made of them and with our format.

    Files count with name, size and time of change: reading them all would cost a start its speed.
    Without a folder only the purpose counts.
    """
    digest = hashlib.sha256(f"{STORE_VERSION} {purpose}".encode())
    if folder is None:
        return digest.hexdigest()[:16]
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(folder.iterdir()):
        if path.suffix in _WEIGHT_SUFFIXES:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def cached_store(folder: Path, manifest: Manifest) -> FileStore | None:
    """The store of an earlier start, if it is the one that would be written now."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        store = FileStore(folder)
    except StoreError as error:
        logger.warning("vllm-dymoe: %s It is written again now.", error)
        return None
    if store.manifest != manifest:
        logger.warning("vllm-dymoe: the store in %s is another model's; it is replaced", folder)
        store.close()
        return None
    return store


def place_experts(
    files: HostStore, place: HostPlace, device: torch.device, *, asked_for: bool
) -> tuple[HostStore, HostPlace]:
    """Leave experts in their files, or fill memory from them, with progress.

    Args:
        files: the packed experts, a :class:`FileStore`.
        place: where they are to be.
        device: that reads them.
        asked_for: whether it has to be there.

    Returns:
        The store, and where it is: the files again where memory was not asked for and cannot be locked.

    Raises:
        StoreError: the files cannot be read, or memory that was asked for cannot be had.
    """
    if not place.pinned:
        return files, place
    assert isinstance(files, FileStore)
    page_lock = CudaPageLock(device) if device.type == "cuda" else None
    nbytes = files.experts.stored_nbytes
    what = "Reading experts into memory"
    try:
        with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, dynamic_ncols=True) as progress:
            memory = MemoryStore.from_files(files, page_lock, progress.update)
    except HostMemoryError as error:
        if asked_for:
            raise StoreError(f'{error}; use host_store = "file", or "auto".') from error
        return files, HostPlace(False, f"auto: {error}")
    files.close()
    return memory, place


def _check_belongs(store: FileStore, experts: ModelExperts, spec: LayerSpec, folder: Path) -> None:
    held = store.experts
    for what, has, needs in (
        ("tensor-parallel ranks", store.manifest.tensor_parallel, (spec.rank, spec.ranks)),
        ("experts per layer", held.num_experts, experts.num_experts),
        ("expert formats", held.formats, experts.formats),
    ):
        if has != needs:
            store.close()
            raise StoreError(
                f"the experts in {folder} do not fit this model: the store has {what} {has}, the model needs {needs}; "
                "write the checkpoint again with `vllm-dymoe quantize` for this model, dtype and parallel size."
            )


def drafted_by_experts(config: VllmConfig) -> bool:
    """Whether a model with experts of its own proposes tokens."""
    draft = getattr(config.speculative_config, "draft_model_config", None)
    # Methods without a draft model, such as ngram, have the target's own config there.
    with_experts: bool = draft is not None and draft is not config.model_config and draft.get_num_experts() > 0
    return with_experts
