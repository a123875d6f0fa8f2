"""Packed experts outside the device: in files, or in host memory."""

from vllm_dymoe.store.base import HostMemoryError, HostStore, StoreError, blob_name
from vllm_dymoe.store.files import FileStore
from vllm_dymoe.store.manifest import MANIFEST, READABLE_VERSIONS, STORE_VERSION, ErrorRecord, Manifest
from vllm_dymoe.store.memory import HostPlace, HostRoom, choose_host_place, smallest_level, whole_level
