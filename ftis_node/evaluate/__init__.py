"""Greedy pass@1 of a policy on a task's questions."""
