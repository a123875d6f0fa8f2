"""Runs the plans of layers: on a GPU, on a CPU, and between both."""
