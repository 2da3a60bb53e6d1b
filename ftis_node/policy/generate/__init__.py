"""Decoders: how completions are sampled from a policy."""
