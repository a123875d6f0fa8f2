"""The parts of `make gpu`: each is a module with `run(record)`, and runs in its own process."""
