"""Experiments and benchmarks that drive the same code as the node."""
