"""Run `make gpu` with the host instead of a card, in small sizes.

This is the whole command with its processes. Those of parts are forked from the command's, because importing torch and
Triton takes 4 s of a core; the short program of the sanitizer's part is started anew. test_gpu_command.py runs the
command with Triton's interpreter. PLANTED may name faults to plant.
"""

import os
import subprocess
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT)]

import torch  # noqa: E402

from tests.kernels import faults, host_card  # noqa: E402

torch.set_num_threads(1)
warnings.simplefilter("ignore")  # NumPy warns about random experts at each launch
sys.modules["vllm"] = None  # tests/e2e covers the part that needs vLLM
MODE = host_card.put_in_place()

import gpu  # noqa: E402
import kernel_speeds  # noqa: E402
import processes  # noqa: E402
from layers import Model  # noqa: E402
from parts import graphs, kernels, runtime, sanitizer, speeds  # noqa: E402

from tests.support.interpreter import quicken  # noqa: E402
from tests.support.launches import decode_as_launches  # noqa: E402
from vllm_dymoe.kernels import Activation, make_kernel  # noqa: E402
from vllm_dymoe.kernels.triton import DecodeTile, ExpertShape  # noqa: E402
from vllm_dymoe.server import expert_server  # noqa: E402

quicken()
gpu.PARTS = {name: replace(part, limit=10 * part.limit) for name, part in gpu.PARTS.items()}
sanitizer.LIMIT = 1000
gpu.README = Path(os.environ.get("GPU_README", gpu.README))
processes.PROGRAM = PROGRAM = [sys.executable, __file__]
kernels.ProcessPoolExecutor = kernel_speeds.ProcessPoolExecutor = host_card.Inline
kernel_speeds.SIDE = 32
kernel_speeds.seconds.__defaults__ = (0.0,)
kernels.REPEATS = 1
kernels.BITS, kernels.COUNTS, kernels.DECODED = ((4,),), (1, 20), (66, 40)
kernels.FORWARD_CASES = [(ExpertShape(66, 40, 32, torch.bfloat16, True), Activation.SILU)]
kernels.DECODE_CASES = [(torch.float16, DecodeTile(4, 2))]
kernel_speeds.LAYERS = (Model(64, 64, 3, 2, name="Mixtral-8x7B"),)
runtime.MODEL = Model(layers=2, experts=6, top_k=2, hidden=72, intermediate=40, group=32)
graphs.MODEL = replace(runtime.MODEL, layers=6, experts=4, hidden=64, intermediate=32)
sanitizer.MODEL = replace(graphs.MODEL, layers=2, experts=2, top_k=1)
runtime.TOKENS, runtime.BUSY_BYTES = (1, 2, 20), 1 << 10
graphs.STEPS, graphs.BATCH, graphs.WIDE = 3, 2, 20
sanitizer.TOKENS = (1, 10)
speeds.KERNEL_LAYERS, speeds.KERNEL_TOKENS = kernel_speeds.LAYERS, (1,)
kernel_speeds.TOKENS, kernel_speeds.run.__defaults__ = (1, 20), (("4",),)
speeds.MODEL = Model(layers=2, experts=8, top_k=2, hidden=64, intermediate=64)
speeds.WARM, speeds.STEPS = 1, {"decode": (1, 3), "prefill": (20, 2)}

faults.plant(os.environ.get("PLANTED"))


def main(arguments):
    # A launch in the interpreter takes a second, so only the short program's server uses Triton.
    if "--part" in arguments and "short" not in arguments:
        expert_server.make_kernel = lambda device, *others, **options: make_kernel("cpu", *others)
        decode_as_launches(setattr, host_card.capturing)
    return gpu.main(arguments)


class Forked:
    """A part's process, like ``subprocess.Popen``."""

    def __init__(self, command, stdout, env):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                for stream in (1, 2):
                    os.dup2(stdout.fileno(), stream)
                os.environ.clear()
                os.environ.update(env)
                torch.set_num_threads(1)  # like the mode, only for the thread that called it
                with host_card.OnTheHost():
                    status = main(command[len(PROGRAM) :])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def poll(self, how=os.WNOHANG):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        return self.poll(0)


def start(command, **how):
    if command[: len(PROGRAM)] != PROGRAM or "short" in command:
        return subprocess.Popen(command, **how)
    return Forked(command, how["stdout"], how["env"])


processes.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
