"""Stores of packed experts outside the device: files, or host memory."""

from vllm_dymoe.cache.store.base import DamagedStoreError, HostMemoryError, HostStore, StoreError, slice_name
from vllm_dymoe.cache.store.checkpoint import CheckpointStore
from vllm_dymoe.cache.store.files import FileStore
from vllm_dymoe.cache.store.manifest import MANIFEST, READABLE_VERSIONS, STORE_VERSION, ErrorRecord, Manifest
from vllm_dymoe.cache.store.memory import HostPlace, HostRoom, choose_host_place, smallest_host_cache, whole_host_cache
