"""Record the choices of the shipped model's routers during decode.

Run it with ``python -m tests.support.record_routing``.
"""

import tempfile

import torch
from safetensors.torch import save_file

from tests.e2e.engines import answer, engine, prompts
from tests.support.recorded_routing import FILE
from vllm_dymoe.trace.trace import Trace

LAYERS = [2, 6]
STEPS = 120


def record(asked, max_tokens):
    with tempfile.TemporaryDirectory() as folder:
        with engine(dymoe={"high": 4, "expert_budget": "100%", "trace": folder}) as llm:
            answer(llm, asked, max_tokens=max_tokens, logprobs=None)
            llm.collective_rpc("dymoe_trace")
        return Trace.load(folder)


def main():
    trace, streams = record(prompts()[:2], 40), record(prompts(), STEPS + 1)
    decoded = ~trace.prefill
    of_trace = {"ids": trace.experts, "weights": trace.weights}
    chosen = {name: values[decoded][:, LAYERS].contiguous() for name, values in of_trace.items()}
    decoded = [streams.experts[tokens][~streams.prefill[tokens]][:STEPS] for tokens in streams.by_request()]
    chosen["streams"] = torch.stack(decoded).to(torch.uint8).contiguous()
    save_file(chosen, FILE)
    print({name: tuple(values.shape) for name, values in chosen.items()}, torch.unique(chosen["ids"]).numel())


if __name__ == "__main__":
    main()
