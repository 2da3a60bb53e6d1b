"""The addresses that a home keeps for its next starts."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from ftis_node.host.files import replace_bytes

NAMED_MAX, MET_MAX = 16, 128

logger = logging.getLogger(__name__)


class KnownAddresses(msgspec.Struct):
    """Multiaddrs that end in a peer id.

    named: by the node's owner, the latest first. What was named once stays named: it may be dialled, and says in which
    networks the node is at home. on_lan: found by mDNS, and a peer was met there: they may be dialled, and say nothing
    about others. met: of the peers met last, as these claim.
    """

    named: list[str] = []
    on_lan: list[str] = []
    met: list[str] = []

    @classmethod
    def read(cls, file: Path | None) -> KnownAddresses:
        """What a home kept; nothing if the file is missing or damaged."""
        try:
            data = b"{}" if file is None else file.read_bytes()
            found = msgspec.json.decode(data, type=KnownAddresses | list[str])
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            logger.warning("The addresses in %s cannot be read: %s. Name peers again with --peers.", file, error)
            return cls()
        # The first homes kept one list, of nothing that they might not dial.
        return cls(on_lan=found[:MET_MAX]) if isinstance(found, list) else found

    def write(self, file: Path) -> None:
        """Keep them, unless the file has the same."""
        data = msgspec.json.encode(self)
        if not file.exists() or file.read_bytes() != data:
            replace_bytes(file, data)

    @property
    def all(self) -> list[str]:
        """Each once, the owner's first."""
        return list(dict.fromkeys((*self.named, *self.on_lan, *self.met)))
