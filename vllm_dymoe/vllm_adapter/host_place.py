"""Bringing packed experts to where they are to live."""

import torch
from tqdm import tqdm

from vllm_dymoe.store import FileStore, HostMemoryError, HostStore, MemoryStore, StoreError
from vllm_dymoe.store.page_lock import CudaPageLock
from vllm_dymoe.store.placement import HostPlace


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
    nbytes = sum(map(files.experts.nbytes, files.experts.formats))
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
