"""The rules of the DHT that need no hivemind: where records lie, for how long, and how many nodes are asked."""

from __future__ import annotations

MAX_RECORDS = 64  # under one key, and thus in one answer
# Records of a run lie under its first key while there is room, and else under one of 16, 256 or 4,096 shards of it:
# 64 records a key are then enough for 260,000 nodes.
DEPTHS = (0, 1, 2, 3)  # hexadecimal digits of a shard
RECORD_LIFETIME = 240.0
REPLICAS = 5
# A settled node publishes below a full key; under the full one only now and then, for newcomers and to see whether it
# is still full. One in sixteen: a depth has sixteen times the keys of the one above.
FULL_PART = 1 / 16
# A look-up reads on until so many peers have named so many nodes between them: one peer alone can make up any number.
TELLERS_ENOUGH = 3
NEAREST_MAX = 20  # nodes that an answer names for a key: hivemind's bucket
OWN_NODES = 12  # of this node's routing table: they have answered it, or called it
AT_ONCE = 4  # nodes asked at a time
