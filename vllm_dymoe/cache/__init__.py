"""Caches of experts in GPU and host memory, and the transfers that fill their slots."""
