"""A pytest plugin (``-p tests.support.triton_on_cpu``) under which vLLM's CPU build serves with Model Runner V2.

V2 is vLLM's default wherever Triton is active, so on every GPU. A CPU build asks Triton for a backend called "cpu",
which only a fork of Triton has, and falls back to V1 without one. Triton's interpreter runs every kernel in NumPy,
though, ours and vLLM's, and never asks a backend to compile: an entry of that name is all that is missing. It has to be
there before vLLM is imported, as a plugin of pytest is. The kernels are slow, and right.
"""

import os
import sys

assert "vllm" not in sys.modules, "vLLM has looked at Triton's backends already"
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

from triton.backends import backends  # noqa: E402


class NoDriver:
    @staticmethod
    def is_active() -> bool:
        """Triton has no active driver to choose."""
        return False


backends["cpu"] = type(next(iter(backends.values())))(compiler=None, driver=NoDriver)
