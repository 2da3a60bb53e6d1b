"""The run that nodes share, and a node's own settings with their layers, files and checks."""
