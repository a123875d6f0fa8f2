"""Every variant of the kernels against float64."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from correctness import DECODE_CASES, FORWARD_CASES, check_decode, check_forward
from record import Recorder


def run(record: Recorder) -> None:
    """Compile side by side, which takes longer than computing."""
    pool = ProcessPoolExecutor(min(os.cpu_count() or 1, 8), get_context("spawn"))
    with pool, record.check("every variant agrees with float64, repeats its bits, and fetches true bytes") as wrong:
        found = [pool.submit(check_forward, case) for case in FORWARD_CASES]
        found += [pool.submit(check_decode, case) for case in DECODE_CASES]
        wrong += [sentence for part in found for sentence in part.result()]
