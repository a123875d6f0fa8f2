"""The kernels that a server compiles before it serves, without a GPU.

Driver and compiler do nothing, but Triton's own runtime is real: it decides what must be compiled for a launch.
"""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from tests.executor.device_planned import decode, device_planned_server, run_large_batch
from tests.executor.steps import random_step
from tests.small_model import make_experts, make_store
from tests.support.no_launches import CardParts, no_launches
from vllm_dymoe.kernels import Activation
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact

# name: policy, precisions, bits of the low version, whether versions are nested
SERVERS = {"4": (Exact(), (4,), 0, False), "8": (Exact(), (8,), 0, False), "4/2": (Dymoe(), (4, 2), 2, True)}
compiled, found = [], {}
with no_launches():
    nothing = JITFunction._do_compile

    def noted(kernel, *rest, **named):
        compiled.append(kernel.__name__)
        return nothing(kernel, *rest, **named)

    with mock.patch.object(JITFunction, "_do_compile", noted):
        for name, (policy, bits, low, nested) in SERVERS.items():
            store = make_store(make_experts(bits=bits, layers=2, num_experts=16, nested=nested))
            options = {"low": low, "high": bits[0], "parts": CardParts(torch.device("cpu"))}
            server = device_planned_server(store, "50%", policy, **options)
            compiled.clear()
            server.small_batches.warm_up(Activation.SILU)
            at_first = list(compiled)
            compiled.clear()
            for tokens in (1, 2, 8, 9, 16, 17, 65, 200):
                run = decode if tokens <= 16 else run_large_batch
                for layer in range(2):
                    run(server, layer, *random_step(tokens, tokens, store.experts))
            found[name] = at_first, list(compiled)
            server.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("precisions", ["4", "8", "4/2"])
def test_no_request_waits_for_the_compiler(compiled, precisions):
    at_first, later = compiled[precisions]
    assert {"mma_gate_up_kernel", "mma_down_kernel"} <= set(at_first)
    assert later == []
