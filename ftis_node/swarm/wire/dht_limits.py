"""The DHT's constants without hivemind: the keys and lifetime of records, and the number of nodes to ask."""

MAX_RECORDS = 64  # under one key, and thus in one answer
# Records of a run lie under its first key while it has room, then under one of its 16, 256 or 4,096 shards. So 64
# records per key are enough for 260,000 nodes.
DEPTHS = (0, 1, 2, 3)  # hexadecimal digits of a shard
RECORD_LIFETIME = 240.0
REPLICAS = 5
# A settled node publishes below a full key. Under the full one it publishes one time in sixteen, to serve newcomers and
# to see whether it is still full: a depth has sixteen times the keys of the one above.
FULL_PART = 1 / 16
# A look-up ends only when so many peers have answered with records: one peer alone can invent any number.
REFERRERS_ENOUGH = 3
NEAREST_MAX = 20  # nodes that an answer names for a key: hivemind's bucket
OWN_NODES = 12  # nodes from the own routing table, which have answered or called this node
AT_ONCE = 4  # nodes asked at a time
