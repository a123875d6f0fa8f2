"""Executors: run the plans of layers on a GPU, on a CPU, or on both."""
