"""Checks before a start: of the command, the machine, the model and the network."""
