"""Benchmarks: ours beside a rival, in the same run."""
