"""The addresses that a home keeps for its next starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ftis_node.config.settings import Settings
from ftis_node.host.clocks import unix_seconds
from ftis_node.host.files import kept, replace_bytes
from ftis_node.swarm.addresses import NetworkScope, peer_at
from ftis_node.swarm.certificates import MembersBook
from ftis_node.swarm.local_networks import LocalNetworks
from ftis_node.swarm.wire.transport import Listening

NAMED_MAX = 16
MET_MAX = 128


class KnownAddresses(msgspec.Struct):
    """Multiaddrs that end in a peer id, the latest first; `NetworkScope` says what may be dialled. `AddressBook` keeps
    the lists within their bounds.

    peers: the owner named them with ``--peers``. given: the owner was given them. met: of the peers met last, as these
    claim.
    """

    peers: list[str] = []
    given: list[str] = msgspec.field(default_factory=list, name="named")  # its name in the files of homes
    met: list[str] = []

    @classmethod
    def read(cls, file: Path | None) -> KnownAddresses:
        """What a home kept; empty lists without a file, or if it is missing or damaged (then the log says so)."""
        if file is None:
            return cls()
        decode = msgspec.json.Decoder(KnownAddresses).decode
        return kept(file, decode, "name peers again with --peers.") or cls()

    def write(self, file: Path) -> None:
        """Keep them, unless the file has the same. Raises OSError; the old file then stands."""
        data = msgspec.json.encode(self)
        if not file.exists() or file.read_bytes() != data:
            replace_bytes(file, data)

    @property
    def all(self) -> list[str]:
        """Each once, the owner's first."""
        return list(dict.fromkeys((*self.peers, *self.given, *self.met)))

    def scope(self, how: Settings | Listening, owners: Iterable[str] = ()) -> NetworkScope:
        """What a start with these options dials, whose owner names these addresses too."""
        named = (*how.announce, *how.relays, *owners, *self.peers)
        return NetworkScope(how.host, named, self.given)

    def tried(
        self,
        settings: Settings,
        book: MembersBook | None,
        owners: Iterable[str] = (),
    ) -> Iterator[tuple[str, str]]:
        """Yield each address, the owner's first, and why a start with these settings does not dial it; "" if it does.
        Nothing is dialled here.

        Args:
            book: of a private run; a start dials nobody who was a member and is none any more. None: the run is open.
            owners: addresses that the owner names besides.
        """
        scope = self.scope(settings, owners)
        local = LocalNetworks(settings.host)
        named = (*owners, *self.peers, *self.given)
        for text in self.all:
            peer = peer_at(text)
            why = scope.why_not(text)
            if why and text in self.met and (book is not None or local.has(peer, named)):
                why = local.why_not(text)
            if book is not None and book.has_left(peer, unix_seconds()):
                why = "its node is no member any more"
            yield text, why
