"""Limit a process to AVX2, as on a processor without AVX-512.

    PYTHONPATH=<this folder> python ...

This limits torch, oneDNN, numba, and vLLM's choice of a build. The native library still uses AVX2 with VNNI if the CPU
has it, as on Intel's processors for desktops. Python itself imports this file in every process, child
processes included.
"""

import importlib.abc
import importlib.util
import os
import sys
import tempfile

os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "NUMBA_CPU_NAME": "haswell"}
os.environ["NUMBA_CPU_FEATURES"] = ""
# Code that vLLM compiled for one instruction set must not run with the other: it would return NaN.
for _variable, _folder in (("VLLM_CACHE_ROOT", "vllm"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
    os.environ.setdefault(_variable, os.path.join(tempfile.gettempdir(), f"without-avx512-{os.getuid()}", _folder))


class _TorchCpu(importlib.abc.MetaPathFinder):
    """Make torch.cpu report that the CPU has no instruction set above AVX2."""

    def find_spec(self, name, path, target=None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for ask in [ask for ask in dir(module) if ask.startswith(("_is_avx512", "_is_amx", "_is_vnni"))]:
                setattr(module, ask, lambda: False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _TorchCpu())
