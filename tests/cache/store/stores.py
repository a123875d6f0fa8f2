"""Small stores on disk, and helpers that read and damage them."""

import json
import os

import torch

from tests.small_model import fill, make_experts
from vllm_dymoe.cache.store import MANIFEST, FileStore, Manifest
from vllm_dymoe.cache.store.manifest import BLOCK
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker


def write(folder, experts=None):
    experts = experts or make_experts()
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], StoreWriter(folder, Manifest(experts, "rtn", "a model")))
    try:
        fill(packer)
        return packer.finish()
    except BaseException as error:
        packer.stop(error)
        raise


def as_older(folder, experts, version):
    """Write a store in an older format and open it.

    It has no digests of its shards and, with version 5, no aligned slices.
    """
    alignment = 1 if version == 5 else BLOCK
    writer = StoreWriter(folder, Manifest(experts, "rtn", "a model", alignment=alignment))
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], writer)
    fill(packer)
    packer.finish().close()
    manifest = json.loads((folder / MANIFEST).read_text()) | {"version": version}
    for later in ("shards", "alignment")[: 1 + (version == 5)]:
        manifest.pop(later, None)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return FileStore(folder)


def read(store, key):
    packed = torch.full((store.experts.format(key).nbytes,), 0xEE, dtype=torch.uint8)
    store.read_into(key, packed)
    return packed


def damage(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(data)
