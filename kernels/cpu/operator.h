// torch's operator for the experts of a layer on a CPU, vllm_dymoe::moe, without Python.
//
// In a native step (see NativeStep in kernels/native.py) the operator computes a layer in one call. Whatever that call
// cannot finish, and every layer outside of such a step, goes to vllm_dymoe::moe_in_python, which has the same
// arguments. torch's stable C interface is used by address, so that the library needs none of torch's headers.
#pragma once
#include <stdexcept>
#include "moe_layer.h"

struct TorchFunctions {
    int (*sizes)(void*, i64**);
    int (*dtype)(void*, int32_t*);
    int (*is_contiguous)(void*, bool*);
    int (*data)(void*, void**);
    int (*empty)(i64, const i64*, const i64*, int32_t, int32_t, int32_t, void**);
    int (*release)(void*);
    int (*call)(const char*, const char*, uint64_t*);
    const char* (*error)();  // message of the last failed call, or null in a torch without this function
    i64 float32, int32, int64;  // torch's numbers of dtypes
};

struct NativeStep {
    MoeLayer* call;
    i64 isa;
    Parallel parallel;
    i64 tokens, threads, layers;
    const uint8_t* ready;  // [layers]: 0 for a layer that Python has not checked yet, else 1 + weights_on_input
};

namespace {

TorchFunctions torch;
thread_local const NativeStep* native_step = nullptr;

// Compute a layer and return its output, a new tensor; null if Python has to run the layer.
void* run_natively(void* x, void* weights, void* ids, i64 layer) {
    const NativeStep* step = native_step;
    if (step == nullptr || layer < 0 || layer >= step->layers || step->ready[layer] == 0) return nullptr;
    MoeLayer& m = *step->call;
    i64 *shape, *chosen;
    int32_t x_dtype, weights_dtype, ids_dtype;
    if (torch.sizes(x, &shape) || torch.sizes(ids, &chosen) || torch.dtype(x, &x_dtype) || torch.dtype(weights, &weights_dtype) ||
        torch.dtype(ids, &ids_dtype))
        return nullptr;
    if (shape[0] == 0 || shape[0] > step->tokens || weights_dtype != torch.float32 || (ids_dtype != torch.int64 && ids_dtype != torch.int32))
        return nullptr;
    void *inputs, *gates, *numbers, *out, *into;
    for (void* tensor : {x, weights, ids}) {
        bool contiguous;
        if (torch.is_contiguous(tensor, &contiguous) || !contiguous) return nullptr;
    }
    const i64 strides[] = {shape[1], 1};
    if (torch.data(x, &inputs) || torch.data(weights, &gates) || torch.data(ids, &numbers)) return nullptr;
    if (torch.empty(2, shape, strides, x_dtype, 0, 0, &out)) return nullptr;  // device type 0 is the CPU
    int outcome = BAD_ROOM;
    if (!torch.data(out, &into)) {
        m.layer = layer, m.tokens = shape[0], m.top_k = chosen[1], m.wide_ids = ids_dtype == torch.int64;
        m.ids = numbers, m.weights = (const float*)gates, m.x = (const uint16_t*)inputs, m.into = (uint16_t*)into;
        m.marks = nullptr, m.actions = nullptr, m.versions = nullptr;
        m.observed = 1, m.weights_on_input = step->ready[layer] - 1, m.threads = step->threads;
        outcome = dymoe_moe_layer(&m, int(step->isa), step->parallel);
        if (outcome == DONE) return out;
    }
    torch.release(out);
    m.planned = outcome == FETCH;  // the step is counted, and must not be again
    return nullptr;
}

}  // namespace

// Keep torch's functions; they must not change.
API void dymoe_use_torch(const TorchFunctions* functions) { torch = *functions; }

// Begin a native step in this thread, or end it with null. The step must live until then.
API void dymoe_native_step(const NativeStep* step) { native_step = step; }

// vllm_dymoe::moe(Tensor x, Tensor topk_weights, Tensor topk_ids, int layer) -> Tensor as torch's stable interface
// calls it: the stack holds the arguments, which are ours to release, and afterwards the result.
API void dymoe_operator(uint64_t* stack, uint64_t, uint64_t) {
    void *x = (void*)stack[0], *weights = (void*)stack[1], *ids = (void*)stack[2];
    if (void* out = run_natively(x, weights, ids, i64(stack[3]))) {
        for (void* tensor : {x, weights, ids}) torch.release(tensor);
        stack[0] = uint64_t(out);
        return;
    }
    if (torch.call("vllm_dymoe::moe_in_python", "", stack))
        throw std::runtime_error(torch.error == nullptr ? "an MoE layer failed; the reason is above" : torch.error());
}
