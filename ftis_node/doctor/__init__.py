"""What is wrong with a machine, a home or a network, and what to do about it."""
