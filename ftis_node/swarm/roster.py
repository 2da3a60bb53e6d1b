"""The roster of a private run: the members that this node knows, its own certificate, and what it has issued.

Members pass on chains and removals with their exchanges, each once to each peer, so every member comes to know all
others. All of it proves itself (`swarm.certificates`); nobody's word is taken.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from ftis_node.errors import UserError
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.host.files import replace_bytes
from ftis_node.swarm.bounded import remember
from ftis_node.swarm.budgets import Budgets
from ftis_node.swarm.certificates import (
    Certificate,
    Chain,
    RecordError,
    Removal,
    decode,
    encode,
    ends,
    may_invite,
    removal_of,
    why_refused,
)
from ftis_node.swarm.identity import Identity, author_of, peer_id
from ftis_node.swarm.invitation import Invitation

MEMBERS_MAX = 512
REMOVALS_MAX = 512  # by others than the founder
REMOVERS_PART = 8  # of these, at most one part in so many by one member
REDEEMED_MAX = 4096
RECORDS_TOLD = 32  # in one message
PEERS_MAX = 256  # for which the roster remembers what it told them
CHECKS_A_SECOND, CHECKS_AT_ONCE = 10.0, 1024.0  # of new records, for each peer

logger = logging.getLogger(__name__)


class Book(msgspec.Struct):
    """What a roster keeps on disk. own: this node's chain. redeemed: the key that used each invitation, by nonce.

    voided: invitations issued before this time, in unix seconds, are refused.
    """

    run_id: bytes
    founder: bytes
    own: Chain = ()
    members: dict[bytes, Chain] = {}
    removals: list[Removal] = []
    redeemed: dict[bytes, bytes] = {}
    voided: int = 0


class Roster:
    """The members of one private run, as far as this node knows them."""

    def __init__(
        self,
        run_id: bytes,
        founder: str,
        identity: Identity,
        file: Path | None = None,
        orders: Path | None = None,
        invitation: Invitation | None = None,
        clock: Callable[[], float] = unix_seconds,
    ) -> None:
        """
        Args:
            founder: the peer id that the run names.
            file: keeps the roster between starts.
            orders: a directory in which commands leave removals and the end of open invitations.
            invitation: the one that this node's owner was given.

        Raises:
            UserError: the file is damaged.
        """
        self._identity, self._clock = identity, clock
        self._file, self._orders = file, orders
        self._invitation = invitation
        self.book = read_book(file) or Book(run_id, author_of(founder))
        self._told: dict[bytes, set[bytes]] = {}  # by peer, the records that it has or gave
        self._checks = Budgets(boot_seconds, CHECKS_A_SECOND, CHECKS_AT_ONCE)
        self._warned: str | None = None
        self._records: dict[bytes, bytes] = {}  # each record by what it is about, in the order of arrival
        for chain in self.book.members.values():
            self._keep_record(chain[-1].member, encode(chain))
        for removal in self.book.removals:
            self._keep_record(b"-" + removal.remover + removal.member, encode(removal))

    # --- who is a member ------------------------------------------------------------------------------------------

    @property
    def own(self) -> bytes:
        """This node's chain as it shows it: empty for the founder, or before it has one."""
        return encode(self.book.own) if self.book.own else b""

    def why_no_member(self) -> str | None:
        """Return why this node is no member now, or None."""
        why = self._why_refused(self.book.own, self._identity.author)
        return why and why.replace(self._identity.peer_id, "this node")

    @property
    def shut_out(self) -> str:
        """Why this node is no member, and cannot become one by the invitation that it has; empty if it is, or can."""
        removed = removal_of(self.book.own, self.book.removals) is not None
        return (self.why_no_member() or "") if removed or self._invitation is None else ""

    @property
    def is_member(self) -> bool:
        """Whether this node is a member now."""
        return self.why_no_member() is None

    def admits(self, peer: bytes) -> bool:
        """Whether a key is known as a member's, and its certificate still counts."""
        return self._why_refused(self.book.members.get(peer, ()), peer) is None

    def meet(self, peer: bytes, shown: bytes) -> str | None:
        """Take the chain that a peer shows of itself; return why it is refused, or None."""
        try:
            chain = decode(shown, Chain) if shown else ()
        except RecordError as error:
            return str(error)
        why = self._why_refused(chain, peer)
        if why is None and chain:
            self._add(chain)
        return why

    def removal_for(self, peer: bytes, shown: bytes) -> bytes:
        """What ended the membership of a peer that shows this chain, so that it learns of it; else nothing."""
        with contextlib.suppress(RecordError):
            chain = decode(shown, Chain)
            removal = removal_of(chain, self.book.removals) if chain and chain[-1].member == peer else None
            return b"" if removal is None else encode(removal)
        return b""

    def learn(self, record: bytes) -> None:
        """Take the removal that a peer sent with its refusal, if it ends this node's membership."""
        with contextlib.suppress(RecordError):
            removal = decode(record, Removal)
            if removal_of(self.book.own, (removal,)) is not None:
                self._remove(removal)
                self.save()

    def _why_refused(self, chain: Chain, peer: bytes) -> str | None:
        book = self.book
        return why_refused(
            chain, peer, run_id=book.run_id, founder=book.founder, now=self._clock(), removals=book.removals
        )

    # --- invitations ----------------------------------------------------------------------------------------------

    def ticket_for(self, peer: bytes) -> bytes:
        """The invitation to present to its inviter, unless this node is a member already; else nothing."""
        found = self._invitation
        return b"" if found is None or found.inviter != peer or self.is_member else found.encoded

    def why_no_ticket(self, found: Invitation, peer: bytes) -> str | None:
        """Return why an invitation that a peer presents is refused, or None."""
        own = self._identity.author
        if found.inviter != own or found.run_id != self.book.run_id or not found.private:
            return "the invitation is not of this node for this run"
        if not self.is_member or not may_invite(self.book.own, own, self.book.founder):
            return "this node may not invite any more"
        if found.issued_at < self.book.voided:
            return "the invitation was withdrawn"
        if self.book.redeemed.get(found.nonce, peer) != peer:
            return "the invitation was used by another key"
        above = {self.book.founder, own, *(certificate.member for certificate in self.book.own)}
        if any(removal.member == peer and removal.remover in above for removal in self.book.removals):
            return "this key was removed from the run"
        return None

    def redeem(self, found: Invitation, peer: bytes) -> bytes:
        """Issue the certificate of an invitation that `why_no_ticket` accepts; the same again for the same key."""
        remember(self.book.redeemed, found.nonce, peer, REDEEMED_MAX)
        if not self.admits(peer):
            logger.info("%s is now a member, by an invitation", peer_id(peer))
            self._add(self._issue(peer, found.seconds, invites=found.invites))
        self.save(durable=True)  # or the invitation could be used again after a power loss
        return encode(self.book.members.get(peer, ()))

    def renewal(self, peer: bytes) -> bytes:
        """A new chain for a member that this node invited and whose time is half over, if it lasts longer; else
        nothing. The time of a chain ends with the first of its certificates."""
        chain = self.book.members.get(peer, ())
        if not chain or chain[-1].issuer != self._identity.author or not self.is_member:
            return b""
        last = chain[-1]
        if self._clock() < (last.issued_at + ends(chain)) / 2:
            return b""
        renewed = self._issue(peer, last.expires - last.issued_at, invites=last.invites)
        if ends(renewed) <= ends(chain):
            return b""
        self._add(renewed)
        self.save()
        return encode(self.book.members[peer])

    def accept(self, granted: bytes) -> None:
        """Take a chain that a peer gave this node; one that is worth less than what it has is left."""
        try:
            chain = decode(granted, Chain)
        except RecordError as error:
            logger.warning("The inviter sent no certificate: %s", error)
            return
        if (why := self._why_refused(chain, self._identity.author)) is not None:
            logger.warning("The inviter's certificate is refused: %s", why)
        elif chain and (not self.is_member or ends(chain) > ends(self.book.own)):
            self.book.own = chain
            self.save()

    def _issue(self, member: bytes, seconds: int, *, invites: bool) -> Chain:
        now = int(self._clock())
        made = Certificate(
            run_id=self.book.run_id,
            member=member,
            issuer=self._identity.author,
            issued_at=now,
            expires=now + seconds,
            invites=invites,
        )
        return (*self.book.own, made.signed_by(self._identity))

    # --- what members tell one another ------------------------------------------------------------------------------

    def news(self, peer: bytes) -> list[bytes]:
        """Records that the peer was not told yet; they count as told."""
        remember(self._told, peer, set(), PEERS_MAX)
        told = self._told[peer] = self._told[peer].intersection(self._records.values())
        new = list(islice((record for record in self._records.values() if record not in told), RECORDS_TOLD))
        told.update(new)
        return new

    def forget(self, peer: bytes) -> None:
        """Tell a peer all again: it has restarted, or a message was lost."""
        self._told.pop(peer, None)

    def hear(self, records: Sequence[bytes], peer: bytes) -> None:
        """Take records from a member; wrong ones are left out."""
        remember(self._told, peer, set(), PEERS_MAX)
        known = set(self._records.values())
        for record in islice(records, RECORDS_TOLD):
            if record not in known and self._checks.take(peer):
                with contextlib.suppress(RecordError):
                    self._hear(record)
        after = set(self._records.values())
        self._told[peer] |= after.intersection(islice(records, RECORDS_TOLD))
        if after != known:
            self.save()

    def _hear(self, record: bytes) -> None:
        try:
            self._remove(decode(record, Removal))
        except RecordError:
            chain = decode(record, Chain)
            if chain and self._why_refused(chain, chain[-1].member) is None:
                self._add(chain)

    def _add(self, chain: Chain) -> None:
        """Keep a valid chain, if it lasts longer than the one that is known.

        Whose membership has ended makes room, else the latest of those whom one member let in, by itself or through
        others, where that are most: who makes up keys displaces these.
        """
        member, members = chain[-1].member, self.book.members
        if member == self.book.founder:
            return  # it needs none, so nothing of this chain was checked
        known = members.get(member)
        if known is not None and self.admits(member) and ends(known) >= ends(chain):
            return
        members[member] = chain
        if len(members) > MEMBERS_MAX:
            gone = next((other for other in members if not self.admits(other)), None)
            if gone is None:
                crowds = Counter(one[0].member for one in members.values())
                fullest = max(crowds, key=lambda first: (crowds[first], first == chain[0].member))
                gone = [other for other, one in members.items() if one[0].member == fullest][-1]
            del members[gone]
            self._records.pop(gone, None)
            if gone == member:
                return
        self._keep_record(member, encode(chain))

    def _remove(self, removal: Removal) -> None:
        book = self.book
        known = any(one.member == removal.member and one.remover == removal.remover for one in book.removals)
        above = {certificate.issuer for certificate in book.own}
        may = removal.remover in {book.founder, *above} or self.admits(removal.remover)
        if known or not may or removal.run_id != book.run_id or not removal.verify(removal.remover):
            return
        if removal.remover != book.founder:
            others = [one.remover for one in book.removals if one.remover != book.founder]
            if others.count(removal.remover) >= REMOVALS_MAX // REMOVERS_PART or len(others) >= REMOVALS_MAX:
                return
        book.removals.append(removal)
        logger.info("%s was removed from the run by %s", peer_id(removal.member), peer_id(removal.remover))
        self._keep_record(b"-" + removal.remover + removal.member, encode(removal))

    def _keep_record(self, about: bytes, record: bytes) -> None:
        self._records.pop(about, None)
        self._records[about] = record

    # --- the owner's orders, and the disk -----------------------------------------------------------------------------

    def obey(self) -> None:
        """Carry out what commands left in the directory of orders; warn once when this node is no member any more."""
        if (why := self.why_no_member()) != self._warned:
            self._warned = why
            if why is not None:
                logger.warning("This node is no member of its private run: %s.", why)
        for file in sorted(self._orders.iterdir()) if self._orders is not None and self._orders.is_dir() else ():
            if file.suffix not in (".removal", ".voided"):
                continue
            try:
                if file.suffix == ".removal":
                    self._hear(file.read_bytes())
                else:
                    self.book.voided = max(self.book.voided, int(file.stem))
            except (RecordError, ValueError):
                logger.error("The order %s cannot be read and is dropped; give it again.", file)
            self.save()
            file.unlink()

    def save(self, *, durable: bool = False) -> None:
        """Write the roster to its file."""
        if self._file is not None:
            replace_bytes(self._file, msgspec.msgpack.encode(self.book), durable=durable)


def read_book(file: Path | None) -> Book | None:
    """What a roster kept; None if there is no file. Raises UserError if it is damaged."""
    if file is None or not file.exists():
        return None
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=Book)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise UserError(
            f"The list of members {file} cannot be read: {error}.",
            "Remove it, and ask for a new invitation; the founder needs none.",
        ) from error
