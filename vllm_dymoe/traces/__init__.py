"""What routers chose: a trace in memory and on disk, made-up traces, and what they show."""

from vllm_dymoe.traces.files import TRACE_FORMAT, TraceError, TraceHeader, expert_dtype
from vllm_dymoe.traces.synthetic import MIXTRAL_8X7B, QWEN3_30B_A3B, synthetic_trace
from vllm_dymoe.traces.trace import Trace

__all__ = [
    "MIXTRAL_8X7B",
    "QWEN3_30B_A3B",
    "TRACE_FORMAT",
    "Trace",
    "TraceError",
    "TraceHeader",
    "expert_dtype",
    "synthetic_trace",
]
