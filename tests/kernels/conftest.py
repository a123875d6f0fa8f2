"""Triton's kernels run on a GPU or in Triton's interpreter, which has to be asked for before triton is imported.

So test_interpreter.py runs the files named test_triton_* in processes of their own, and this process leaves them alone.
"""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_triton_*.py"]
