"""Small stores on disk, and ways to read and to damage them."""

import os

import torch

from tests.small_model import fill, make_experts
from vllm_dymoe.cache.store import Manifest, StoreError
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker


def write(folder, experts=None):
    experts = experts or make_experts()
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], StoreWriter(folder, Manifest(experts, "rtn", "a model")))
    try:
        fill(packer)
        return packer.finish()
    except StoreError:
        packer.discard()
        raise


def read(store, key):
    packed = torch.full((store.experts.formats[key.bits].nbytes,), 0xEE, dtype=torch.uint8)
    store.read_into(key, packed)
    return packed


def damage(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(data)
