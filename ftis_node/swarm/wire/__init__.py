"""Peers over libp2p. No other room imports hivemind; the rest of the swarm knows `transport.Transport` only."""
