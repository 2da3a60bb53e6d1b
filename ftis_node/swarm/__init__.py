"""The swarm: who is there, what they made, and what of it may enter this node."""
