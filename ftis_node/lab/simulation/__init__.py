"""A swarm of many nodes on a virtual clock, without models and without a network: what sharing costs and brings.

The daemon's own code runs here: all of `swarm.table.Table` and of `swarm.gossip.Gossip`, on the real bytes of signed
announcements, the protobuf messages of the RPCs, `swarm.fetch.Limit` and `Rests`, `swarm.pool.Pool`, and `Stepper`'s
want, own_quota, step_seconds and patience. Limits and intervals are imported from the modules that own them.

Restated as events, because they are coroutines on libp2p, the event loop or the wall clock:

* `swarm.swarm.Swarm`: _exchange_loop, _exchange, _call, on_exchange (`exchanging`), _pull_loop, _pull, _hand_over,
  _admit, _holders, _pulled, on_fetch (`pulling`), start, _maintain_loop, _settled, _meet_more, _greet, on_handshake,
  _record_loop without its bytes (`contacts`);
* `wire.directory.Directory`: publish and find, apart from the rest and for longer: what the DHT costs (`directory`);
* `swarm.membership.Membership`: hear, strangers, greet, on_handshake, _admit, limits, failed, answered, some_addresses
  (`contacts`);
* `swarm.fetch`: Uploads, fetch (`uploads`, `pulling`);
* `node.stepper.Stepper`: step, generate, train, _gather (`rhythm`).

Not simulated: signatures are made but not verified; packets are names and sizes, so admission has nothing to refuse;
scoring takes no time; libp2p's framing counts for nothing; downlinks are wide enough. A peer
that left is noticed by timeouts only, as if its machine had been switched off.
"""
