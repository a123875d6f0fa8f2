"""Packed experts outside the device: in files, or in host memory."""

from vllm_dymoe.store.base import HostMemoryError, HostStore, ReadableStore, StoreError, blob_name
from vllm_dymoe.store.files import FileStore
from vllm_dymoe.store.manifest import MANIFEST, STORE_VERSION, ErrorRecord, Manifest
from vllm_dymoe.store.memory import MemoryStore, memory_bytes

__all__ = [
    "MANIFEST",
    "STORE_VERSION",
    "ErrorRecord",
    "FileStore",
    "HostMemoryError",
    "HostStore",
    "Manifest",
    "MemoryStore",
    "ReadableStore",
    "StoreError",
    "blob_name",
    "memory_bytes",
]
