"""The kernels that the first call compiles, without a GPU or the interpreter.

Driver and compiler do nothing, but Triton's own runtime is real: it decides what must be compiled for a launch.
"""

import json
import os
import subprocess
import sys

PROGRAM = """
import json
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tests.kernels.matrices import random_expert
from benchmarks.gpu.experts import ExpertWork, compute_experts
from vllm_dymoe.kernels import (Activation)
from vllm_dymoe.kernels.triton import TritonKernel

events = []


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Kernel:
    function = packed_metadata = None

    def __init__(self, name):
        self.name = name

    def launch_metadata(self, *arguments):
        return None

    def run(self, *arguments):
        events.append(("run", self.name))


def compile(source, target, options, **others):
    constants = {source.fn.arg_names[path[0]]: value for path, value in source.constants.items()}
    events.append(("compile", source.fn.__name__ + json.dumps(constants, sort_keys=True)))
    return Kernel(events[-1][1])


triton.compiler.compile = compile
driver.set_active(Driver())
experts = {bits: random_expert(100, 70, bits, steps=bits == 4, act_order=bits == 4) for bits in (4, 2)}
kernel = TritonKernel("cpu", formats=[expert.formats for expert in experts.values()])
calls = []
for activation, bits, counts in (("silu", 2, (1,)), ("silu", 4, (3, 10, 40, 200)), ("gelu", 2, (1, 200))):
    expert = experts[bits]
    x = torch.zeros(200, 100, dtype=torch.bfloat16)
    out = torch.zeros(200, 100, dtype=torch.bfloat16)
    rows = [torch.arange(count) for count in counts]
    work = [ExpertWork(expert.gate, expert.up, expert.down, index, index) for index in rows]
    compute_experts(kernel, x, work, out, Activation.parse(activation))
    calls.append(list(events))
    events.clear()
print(json.dumps(calls))
"""


def test_the_first_call_compiles_what_later_ones_need():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, third = json.loads(done.stdout)
    compiled = [name for kind, name in first if kind == "compile"]
    assert len(compiled) == len(set(compiled)) == 9  # expert placement, two for decode, two for each of three tiles
    assert [kind for kind, _ in first] == ["compile"] * 9 + ["run"] * 2
    assert [kind for kind, _ in second] == ["run"] * 8
    assert {name for _, name in second} == {name for name in compiled if not name.startswith("place_kernel")}
    # For another activation, only kernels that contain it are new.
    assert sorted(name.split("{")[0] for kind, name in third if kind == "compile") == (
        ["gate_up_kernel"] + 3 * ["grouped_gate_up_kernel"]
    )
