"""A swarm of many nodes in one process, on simulated time and without models: the costs and gains of sharing.

The daemon's own code runs here: `Swarm` with membership, gossip, pulling, admission and reputation, the limits on
inbound calls, and `Stepper`. `Network` is the `Transport` below them, and an event loop whose clock jumps the time.

Modelled: latency, uplinks, dials and churn; generating and training, which only take time; the directory, which finds
a random part of all records (what it costs is computed apart, in `directory`). Packets are small, pass admission, and
count on the network as `Scenario.packet_bytes`. Each announcement is really signed; the first node that receives it
verifies it for all. Scoring and the search for packets take no time, libp2p's framing is not counted, and downlinks
are wide enough. A peer that left is noticed by timeouts only, as if its machine had been switched off.
"""
