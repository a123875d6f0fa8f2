"""Every variant of the kernels against float64, as `make bench-gpu` does before it measures."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from record import Recorder


def run(record: Recorder) -> None:
    """Compile side by side, which takes longer than computing."""
    from bench_gpu import check

    pool = ProcessPoolExecutor(min(os.cpu_count() or 1, 8), get_context("spawn"))
    with pool, record.check("every variant agrees with float64, repeats its bits, and fetches true bytes") as wrong:
        wrong += check(pool)
