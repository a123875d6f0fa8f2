"""The same layer by kt-kernel: its AMXINT4, one scale for a row, which AVX-512 computes as well; on AVX2 its RAWINT4.

    pip install --no-deps kt-kernel==0.7.2

Importing the package takes much of SGLang's, so its library is loaded by itself.
"""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GROUP = 64  # of RAWINT4
clock: Callable[[], float] = time.perf_counter


def find() -> Path | None:
    """The library of the installed wheel for this processor."""
    found = importlib.util.find_spec("kt_kernel")
    kinds = {"amx": torch.cpu._is_amx_tile_supported(), "avx512_bf16": torch.cpu._is_avx512_bf16_supported()}
    name = next((name for name, there in kinds.items() if there), "avx2")
    places = [] if found is None else found.submodule_search_locations or []
    return next((file for place in places for file in Path(place).glob(f"_kt_kernel_ext_{name}.*.so")), None)


class KtKernel:
    """Experts of random codes, and steps over them. Their shape is experts, experts of a token, width of the model, and
    width of an expert."""

    def __init__(self, library: Path, shape: tuple[int, int, int, int], threads: int) -> None:
        spec = importlib.util.spec_from_file_location("kt_kernel_ext", library)
        module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        pool = module.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        experts, self._top_k, self._hidden, inter = shape
        self._pool, self._experts, self._random = module.CPUInfer(pool), experts, torch.Generator().manual_seed(1)
        elsewhere = torch.zeros(experts, dtype=torch.bool)
        config = module.moe.MOEConfig(*shape, elsewhere.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, self._pool.backend_, 1024
        shapes = {
            "gate_proj": (inter, self._hidden),
            "up_proj": (inter, self._hidden),
            "down_proj": (self._hidden, inter),
        }
        kind = "AMXInt4_MOE" if hasattr(module.moe, "AMXInt4_MOE") else "AVX2RawInt4_MOE"
        self.name, held = f"kt-kernel, {kind}", []
        for name, (rows, columns) in shapes.items():
            if kind == "AMXInt4_MOE":  # from 16 bits
                held.append(torch.empty(experts, rows, columns, dtype=torch.bfloat16).normal_(0, 0.02))
                setattr(config, name, held[-1].data_ptr())
                continue
            codes = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8)
            scales = torch.full((experts, rows, columns // GROUP), 0.01, dtype=torch.bfloat16)
            held += [codes, scales]
            setattr(config, f"{name}s", [[of_one.data_ptr() for of_one in codes]])
            setattr(config, name.replace("proj", "scales"), [[of_one.data_ptr() for of_one in scales]])
        config.quant_config.bits, config.quant_config.group_size = 4, GROUP
        self._layer, order = getattr(module.moe, kind)(config), torch.arange(experts)
        self._run(self._layer.load_weights_task(order.data_ptr()))

    def step(self, tokens: int) -> float:
        """Seconds of a step of so many random tokens."""
        ids = torch.rand(tokens, self._experts, generator=self._random).topk(self._top_k, dim=1).indices.contiguous()
        x = torch.randn(tokens, self._hidden, generator=self._random).bfloat16()
        out, weights = torch.empty_like(x), torch.full((tokens, self._top_k), 1 / self._top_k)
        number, given = torch.tensor([tokens], dtype=torch.int32), (ids, weights, x, out)
        begin = clock()
        self._run(self._layer.forward_task(number.data_ptr(), self._top_k, *(t.data_ptr() for t in given), False))
        return clock() - begin

    def _run(self, task: Any) -> None:
        self._pool.submit(task)
        self._pool.sync()
