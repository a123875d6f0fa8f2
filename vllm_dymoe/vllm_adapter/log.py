"""A logger whose lines appear among vLLM's own."""

from vllm.logger import init_logger

# vLLM configures the hierarchy below "vllm" only.
logger = init_logger("vllm.plugins.dymoe")
