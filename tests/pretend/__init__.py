"""A device that behaves like a GPU on a CPU: see `device`."""
