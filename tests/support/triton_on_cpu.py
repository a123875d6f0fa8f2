"""A pytest plugin that makes vLLM's CPU build use Model Runner V2.

Use it with ``-p tests.support.triton_on_cpu``. V2 is vLLM's default wherever Triton is active, so on every GPU. A CPU
build asks Triton for a backend called "cpu", which only a fork of Triton has, and otherwise falls back to V1. But
Triton's interpreter runs every kernel in NumPy, the plugin's and vLLM's, and never asks a backend to compile, so an
entry of that name suffices. It must exist before vLLM is imported, which a pytest plugin can ensure. The kernels are
slow, but correct.
"""

import os
import sys

assert "vllm" not in sys.modules, "vLLM has looked at Triton's backends already"
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

from triton.backends import backends  # noqa: E402

from tests.support.interpreter import quicken  # noqa: E402


class NoDriver:
    @staticmethod
    def is_active() -> bool:
        """Return False, so that Triton finds no active driver."""
        return False


backends["cpu"] = type(next(iter(backends.values())))(compiler=None, driver=NoDriver)
quicken()
