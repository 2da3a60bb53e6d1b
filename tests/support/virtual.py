"""A swarm in memory and virtual time, for tests that are marked `virtual_time`: what they wait for costs nothing.

`test_transport` shows that its network does what libp2p does.
"""

import itertools
import random
import time
from contextlib import ExitStack
from functools import cached_property

from ftis_node.host.clocks import Clocks, replaced
from ftis_node.lab.clock import SimulatedLoop
from ftis_node.lab.simulation.network import MemoryTransport, Network
from ftis_node.lab.simulation.scenario import Machine
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.wire.transport import Listening


class VirtualLoop(SimulatedLoop):
    """An event loop whose time the product's clocks show until it is closed."""

    def __init__(self):
        super().__init__()
        began = time.time()
        self._ports = itertools.count(4001)
        self._clocks = ExitStack()
        clocks = Clocks(boot=self.time, unix=lambda: began + self.time(), thread=lambda: 0.0)
        self._clocks.enter_context(replaced(clocks))

    def close(self):
        super().close()
        self._clocks.close()

    @cached_property
    def network(self) -> Network:
        return Network(0.001, random.Random(0))

    def node(self, who: Identity, listening: Listening) -> MemoryTransport:
        """A node of its network. With port 0 it has an address that nobody had."""
        addresses = []
        if listening.listen:
            addresses = [f"/ip4/127.0.0.1/tcp/{listening.port or next(self._ports)}/p2p/{who.peer_id}"]
        node = MemoryTransport(self.network, who.author, Machine(1.0, 1.0, 1e9, False), addresses)
        node.listening = listening
        return node
