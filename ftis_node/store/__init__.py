"""What a node keeps on disk: packets, rounds and checkpoints."""
