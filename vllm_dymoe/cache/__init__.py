"""Which experts are in which slots of GPU and host memory, and the transfers that fill these."""
