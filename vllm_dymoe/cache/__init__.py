"""Caches of experts in GPU and host memory, and transfers that fill their slots."""
