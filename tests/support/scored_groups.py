"""Groups with rewards, as a pool has them."""

import numpy as np

from ftis_node.packet import Completion, Group
from ftis_node.swarm.pool import Scored
from tests.support.swarm import RUN, content


def scored(author: int, round_: int, slot: int, born: float, rewards: tuple[float, ...] = (1, 0)) -> Scored:
    name = bytes([author]) * 38
    completion = Completion(np.ones(1, np.uint32), np.zeros(1, np.float32), True)
    packet = content(RUN, name, round_, slot, [completion] * len(rewards), prompt_ids=[1])
    return Scored(Group(name, 0, packet, bytes(32), b""), rewards, born)
