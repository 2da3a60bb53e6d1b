"""A node's data on disk: packets, rounds and checkpoints."""
