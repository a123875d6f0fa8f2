"""lm-eval where the option ``system`` may name what only benchmarks compare: ``python -m vllm_dymoe.bench.evaluate``.

The arguments are lm-eval's.
"""

import runpy

from vllm_dymoe.bench.systems import make_known

if __name__ == "__main__":
    make_known()
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
