"""Runs a module with the processor time of its main thread as the clock: ``python -m one_thread MODULE ARGUMENTS``.

With one thread of OpenMP that is the time that a step takes on a machine on which nothing else runs.
"""

import runpy
import sys
import time

if __name__ == "__main__":
    time.perf_counter = time.thread_time
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
