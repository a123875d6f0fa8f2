"""The parts of `make gpu`.

Each is a module with `run(record)`, and runs in its own process.
"""
