"""The experts' forward for training on a CPU, registered with transformers as the implementation "permuted".

It computes what transformers' "grouped_mm" computes. That one spends a sixth of a step in the serial `index_put_` of
its gathers' backward, and weights full-width outputs. Here a gather's backward is a gather through the inverse
permutation, and routing weights are applied where a row is narrowest, before the down projection.

    python benchmarks/tiny_moe/cpu_experts.py    # compares the two: gradients and processor time
"""

import json
import time

import torch
from torch.nn import functional
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock


class Dispatch(torch.autograd.Function):
    """Rows of tokens in expert order.  [tokens, hidden] -> [tokens * active, hidden]"""

    @staticmethod
    def forward(context, rows, order, inverse, active):
        context.save_for_backward(inverse)
        context.active = active
        return rows.index_select(0, order // active)

    @staticmethod
    def backward(context, gradient):
        (inverse,) = context.saved_tensors
        rows = gradient.index_select(0, inverse)
        return rows.view(-1, context.active, rows.shape[-1]).sum(1), None, None, None


class Combine(torch.autograd.Function):
    """Sum of each token's expert rows, the transpose of `Dispatch`.  [tokens * active, hidden] -> [tokens, hidden]"""

    @staticmethod
    def forward(context, rows, order, inverse, active):
        context.save_for_backward(order)
        context.active = active
        return rows.index_select(0, inverse).view(-1, active, rows.shape[-1]).sum(1)

    @staticmethod
    def backward(context, gradient):
        (order,) = context.saved_tensors
        return gradient.index_select(0, order // context.active), None, None, None


class GroupedLinear(torch.autograd.Function):
    """rows[group] @ weight[group].T for consecutive groups.  [rows, in], [groups, out, in] -> [rows, out]"""

    @staticmethod
    def forward(context, rows, weight, counts):
        output = rows.new_empty(rows.shape[0], weight.shape[1])
        for part, matrix, target in zip(rows.split(counts), weight, output.split(counts), strict=True):
            torch.mm(part, matrix.t(), out=target)
        context.save_for_backward(rows, weight)
        context.counts = counts
        return output

    @staticmethod
    def backward(context, gradient):
        rows, weight = context.saved_tensors
        rows_gradient, weight_gradient = torch.empty_like(rows), torch.empty_like(weight)
        parts = (tensor.split(context.counts) for tensor in (gradient, rows, rows_gradient))
        for g, part, target, matrix, matrix_gradient in zip(*parts, weight, weight_gradient, strict=True):
            torch.mm(g, matrix, out=target)
            torch.mm(g.t(), part, out=matrix_gradient)
        return rows_gradient, weight_gradient, None


def permuted_experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum of the active experts.

    hidden_states: [tokens, hidden] float32; top_k_index, top_k_weights: [tokens, active]. Returns [tokens, hidden].
    """
    active = top_k_index.shape[-1]
    expert_of_row = top_k_index.reshape(-1)
    order = expert_of_row.argsort()
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    counts = expert_of_row.bincount(minlength=self.num_experts).tolist()
    rows = Dispatch.apply(hidden_states, order, inverse, active)
    gate, up = GroupedLinear.apply(rows, self.gate_up_proj, counts).chunk(2, dim=-1)
    weights = Dispatch.apply(top_k_weights.reshape(-1, 1), order, inverse, 1)
    inner = functional.silu(gate) * (up * weights)
    return Combine.apply(GroupedLinear.apply(inner, self.down_proj, counts), order, inverse, active)


ALL_EXPERTS_FUNCTIONS.register("permuted", permuted_experts_forward)


def compare(tokens: int = 2048, repeats: int = 10) -> None:
    """Run one layer's forward and backward both ways, check that gradients agree, print the times as one JSON line."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 4}
    config = Qwen3MoeConfig(norm_topk_prob=True, **shape)
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    rows, target = torch.randn(1, tokens, 256), torch.randn(1, tokens, 256)
    gradients, seconds = {}, {}
    for name in ("grouped_mm", "permuted"):
        config._experts_implementation = name
        for repeat in range(repeats + 2):  # the first two warm up
            if repeat == 2:
                start = time.process_time()
            block.zero_grad()
            inputs = rows.clone().requires_grad_()
            (block(inputs) * target).sum().backward()
        seconds[name] = (time.process_time() - start) / repeats
        gradients[name] = [inputs.grad, *(parameter.grad.clone() for parameter in block.parameters())]
    errors = [
        ((one - other).abs().max() / one.abs().max()).item()
        for one, other in zip(gradients["grouped_mm"], gradients["permuted"], strict=True)
    ]
    if max(errors) > 1e-4:  # float32 sums of at most a few thousand terms, in another order
        raise ArithmeticError(f"gradients differ by {max(errors):.1e} of their maximum")
    times = {f"{name}_cpu_ms": round(value * 1e3, 1) for name, value in seconds.items()}
    print(json.dumps({"tokens": tokens, **times, "gradient_error_share": max(errors)}))


if __name__ == "__main__":
    compare()
