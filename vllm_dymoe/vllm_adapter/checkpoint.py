"""Where a model's files are on this machine, and which packed store belongs to them."""

import hashlib
from pathlib import Path

from huggingface_hub import snapshot_download
from vllm.config import VllmConfig

from vllm_dymoe.store import MANIFEST, STORE_VERSION, FileStore, Manifest, StoreError
from vllm_dymoe.vllm_adapter.log import logger

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")


def local_folder(vllm_config: VllmConfig) -> Path:
    """The folder of the model's checkpoint: itself if it is a path, else its snapshot in the hub's cache."""
    model = vllm_config.model_config.model
    if Path(model).is_dir():
        return Path(model).resolve()
    # The loader has downloaded the weights by now. What it does not know of is our shards and manifest.
    return Path(
        snapshot_download(
            model,
            revision=vllm_config.model_config.revision,
            cache_dir=vllm_config.load_config.download_dir,
            allow_patterns=["*.json", "dymoe-experts-*.safetensors"],
        )
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
