"""The daemon: life cycle, assembly, stepping, checkpointing and the supervision of its compute process."""
