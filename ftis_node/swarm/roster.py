"""The roster of a private run: the members that this node knows, its own certificate, and what it has issued.

Members pass on chains and removals with their exchanges, each once to each peer, so every member comes to know all
others. All of it proves itself (`swarm.certificates`); nobody's word is taken. Each inviter has room of its own, so it
crowds out nobody else's members and removals; each peer has a budget of its own for what it shows, and a signature that
does not hold is its lie.
"""

import logging
import random
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from ftis_node.errors import UsageError, UserError
from ftis_node.host.clocks import Clock, boot_seconds, unix_seconds
from ftis_node.host.files import replace_bytes
from ftis_node.swarm.certificates import Certificate, Chain, MembersBook, Removal, decode, encode
from ftis_node.swarm.ftis_pb2 import Handshake
from ftis_node.swarm.handshake import PROTOCOL_MAJOR, plain, polite_refusal
from ftis_node.swarm.identity import Identity, author_of, is_author, peer_id
from ftis_node.swarm.invitation import Invitation, read
from ftis_node.swarm.limits import Budgets
from ftis_node.swarm.open_run import OpenRun
from ftis_node.swarm.signed import Malformed

NO_MEMBER = "Ask a member for an invitation and start with `ftis-node join ftis:…`; after a removal, with a new --home."
RECORDS_MAX = 512  # certificates of one issuer, and as many removals; all removals by the founder are kept
RECORDS_TOLD = 32  # in one message
CHECKS_A_SECOND = 10.0  # of signatures, for each peer, but for removals by the founder
CHECKS_AT_ONCE = 1024.0
NEW_A_SECOND = 0.2  # records of one inviter, whoever tells them
NEW_AT_ONCE = 1024.0

TOO_MANY_CHECKS = "it shows too many certificates at a time"
TOO_MANY_RECORDS = "their issuer issues too many at a time"
LATER = (TOO_MANY_CHECKS, TOO_MANY_RECORDS)

logger = logging.getLogger(__name__)


class Roster(OpenRun):
    """The members of one private run, as far as this node knows them.

    It is the node's alone: commands read its file, and leave orders in a directory (`obey`). Methods that save may
    raise OSError; the records are in memory then, and saved later.
    """

    private = True

    def __init__(
        self,
        run_id: bytes,
        founder: str,
        identity: Identity,
        file: Path | None = None,
        orders: Path | None = None,
        invitation: Invitation | None = None,
        clock: Clock = unix_seconds,
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
        super().__init__()
        self.book = read_book(file) or MembersBook(run_id, author_of(founder))
        self._me = identity.author
        self._identity = identity
        self._clock = clock
        self._file = file
        self._orders = orders
        self._invitation = invitation
        self._checks = Budgets(boot_seconds, CHECKS_A_SECOND, CHECKS_AT_ONCE)
        self._new = Budgets(boot_seconds, NEW_A_SECOND, NEW_AT_ONCE)
        self._warned = ""
        self._unsaved = False
        self._urgent = False  # some of it is the founder's: saved at once, for no other member can make more of that
        self._put_off = set[Path]()  # orders that are in the log as not carried out

    # --- who is a member ------------------------------------------------------------------------------------------

    @property
    def own_chain(self) -> bytes:
        """This node's chain as it shows it: empty for the founder, or before it has one."""
        if self._own is None:
            return b""
        return self.book.as_sent(self._own)

    @property
    def _own(self) -> Certificate | None:
        """This node's certificate, as in its chain on disk; None for the founder, or before it has one."""
        if not self.book.own:
            return None
        return self.book.own[-1]

    def why_no_member(self) -> str:
        """Return why this node is no member now, or "" if it is."""
        if self._me == self.book.founder:
            return ""
        return self.book.why_refused(self._own, self._clock()).replace(self._identity.peer_id, "this node")

    @property
    def shut_out(self) -> str:
        """Why this node is no member, and cannot become one by the invitation that it has; empty if it is, or can."""
        found = self._invitation
        if found is not None and self.book.removal_of(self._me, found.inviter) is None:
            return ""
        return self.why_no_member()

    @property
    def is_member(self) -> bool:
        """Whether this node is a member now."""
        return not self.why_no_member()

    def admits(self, peer: bytes) -> bool:
        """Whether a key is the founder's, or that of a known member whose certificate counts still: it has not expired,
        and no removal has ended it."""
        return not self.book.why_no_member(peer, self._clock())

    def has_left(self, peer: bytes) -> bool:
        """Whether the peer was a member and is none any more. False while this node has an invitation of it to use, so
        that it is greeted."""
        return self.book.has_left(peer, self._clock()) and not self.ticket_for(peer)

    @property
    def may_invite(self) -> bool:
        """Whether this node may invite others now."""
        return self.is_member and self.book.may_invite(self._me, self._clock())

    def meet(self, peer: bytes, shown: bytes) -> str:
        """Take the chain that a peer shows of itself; return why the peer is refused, or ""."""
        chain: Chain = ()
        try:
            if shown:
                chain = decode(shown, Chain)
        except Malformed as error:
            return str(error)
        why = self._take(chain, peer, peer)
        refused = self.book.why_no_member(peer, self._clock())
        if not refused:  # whatever is wrong with what it shows
            return ""
        return why or refused

    def at_the_door(self, request: Handshake, answer: Handshake, peer: bytes) -> str:
        """Return why a caller is refused, or "": it is let in as a member, or by its invitation. A new certificate for
        it goes into the answer. `Membership` calls this for each handshake."""
        if request.major != PROTOCOL_MAJOR:
            return polite_refusal(request.major)
        why = self.meet(peer, request.certificates)
        refused = why
        if request.invitation:
            refused = self._take_ticket(request, answer, peer)
        if not why and not answer.granted:
            answer.granted = self.renewal(peer, request.certificates)
        return why and refused  # one of the two lets it in

    def removal_for(self, peer: bytes) -> bytes:
        """Return the removal that ended a peer's membership, so that it learns of it; else nothing."""
        for issuer in self.book.issuers_of(peer):
            removal = self.book.removal_of(peer, issuer)
            if removal is not None:
                return encode(removal)
        return b""

    # --- invitations ----------------------------------------------------------------------------------------------

    def ticket_for(self, peer: bytes) -> bytes:
        """The invitation to present to its inviter, unless it has nothing to give any more; else nothing.

        It has something to give in three cases: this node is no member; an inviter made it one, and another inviter or
        the founder invites it; the founder made it one, and the founder's invitation makes it an inviter.
        """
        found = self._invitation
        founder = self.book.founder
        if found is None or found.inviter != peer or self._me == founder:
            return b""
        own = self._own
        if own is None or not self.is_member or own.issuer not in (founder, peer):
            return found.encoded
        if peer == founder and found.invites and not own.invites:
            return found.encoded
        return b""

    def why_no_ticket(self, found: Invitation, peer: bytes) -> str:
        """Return why an invitation that a peer presents is refused, or ""."""
        book = self.book
        if found.inviter != self._me or found.run_id != book.run_id or not found.private:
            return "the invitation is not of this node for this run"
        if not self.may_invite:
            return "this node may not invite any more"
        if found.invites and self._me != book.founder:
            return "only the founder can appoint inviters"
        if found.issued_at < book.voided:
            return "the invitation was withdrawn"
        if book.redeemed.get(found.nonce, peer) != peer:
            return "the invitation was used by another key"
        if book.removal_of(peer, self._me) is not None:
            return "this key was removed from the run"
        if self._issued_to(peer) is None and len(book.issued.get(self._me, ())) >= RECORDS_MAX:
            return f"this node has invited {RECORDS_MAX} members, and nodes remember no more of one inviter"
        return ""

    def _take_ticket(self, request: Handshake, answer: Handshake, peer: bytes) -> str:
        """Return why a caller's invitation is refused, or "". It is redeemed only if the caller names the run's id; a
        question for the run file leaves it unused."""
        if not self._checks.take(peer):
            return "too many invitations were to be checked; try again later"
        try:
            found = read(request.invitation, unix_seconds())
        except UsageError as error:
            return plain(error.what, 200)
        why = self.why_no_ticket(found, peer)
        if not why and request.run_id == self.book.run_id:
            answer.granted = self.redeem(found, peer)
        return why

    def redeem(self, found: Invitation, peer: bytes) -> bytes:
        """Issue the certificate of an invitation that `why_no_ticket` accepts; the same again for the same key."""
        if found.nonce not in self.book.redeemed:
            self.book.redeemed[found.nonce] = peer
            self._unsaved = True
        held = self._issued_to(peer)
        if held is None or self.book.why_refused(held, self._clock()) or (found.invites and not held.invites):
            logger.info("%s is now a member, by an invitation", peer_id(peer))
            held = self._issue(peer, found.seconds, invites=found.invites)
        self._save_changes()  # or the invitation could be used again after a power loss
        return self.book.as_sent(held)

    def renewal(self, peer: bytes, shown: bytes) -> bytes:
        """A new chain for a member that this node invited, and whose certificate's time is half over; the same again
        while the chain that it shows is an older one; else nothing."""
        held = self._issued_to(peer)
        now = self._clock()
        if held is None or self.book.why_refused(held, now):
            return b""
        if now >= (held.issued_at + held.expires) / 2:
            held = self._issue(peer, held.expires - held.issued_at, invites=held.invites)
        elif held.signature in shown:
            return b""
        self._save_changes()
        return self.book.as_sent(held)

    def due_at(self, peer: bytes) -> bool:
        """Whether this peer issued this node's certificate, and may renew it now."""
        own = self._own
        if own is None or own.issuer != peer:
            return False
        return self._clock() >= (own.issued_at + own.expires) / 2

    def accept(self, granted: bytes, peer: bytes) -> None:
        """Take the certificate for this node in a peer's answer, if this node asked for it: it showed that peer an
        invitation, or a certificate of that peer's, which is to be renewed. It is saved at once; a wrong one is logged.
        """
        own = self._own
        why = "this node did not ask for it, or it cannot be read"
        if self.ticket_for(peer) or (own is not None and own.issuer == peer):
            with suppress(Malformed):
                why = self._take(decode(granted, Chain), self._me, peer)
        held = self.book.issued.get(peer, {}).get(self._me)
        why = why or self.book.why_refused(held, self._clock())
        if why or held is None:
            logger.warning("A certificate that %s sent is refused: %s", peer_id(peer), why)
        elif held != own:
            self.book.own = self.book.chain(held)
            self.save()

    def _issued_to(self, member: bytes) -> Certificate | None:
        """The latest certificate that this node issued to a key, whether it counts or not."""
        return self.book.issued.get(self._me, {}).get(member)

    def _issue(self, member: bytes, seconds: int, *, invites: bool) -> Certificate:
        """Sign a certificate for so many seconds from now, and put it into the book, which is not saved yet."""
        now = int(self._clock())
        held = self._issued_to(member)
        if held is not None:
            now = max(now, held.issued_at + 1)  # the clock may have been set back
        made = Certificate(
            run_id=self.book.run_id,
            member=member,
            issuer=self._me,
            issued_at=now,
            expires=now + seconds,
            invites=invites,
        ).signed_by(self._identity)
        self.book.issued.setdefault(self._me, {})[member] = made
        self._unsaved = True
        return made

    # --- what members tell one another ------------------------------------------------------------------------------

    def news(self, told: set[bytes]) -> dict[bytes, bytes]:
        """Records that a peer was not told yet, by signature; they count as `told`. The founder's and this node's own
        come first, so an inviter's certificate comes before what it signed; then removals; and what a peer has no room
        for holds up nothing else, for the order is random beyond that."""
        book = self.book
        trees = (tree for kept in (book.ended, book.issued) for tree in kept.values())
        records = {record.signature: record for tree in trees for record in tree.values()}
        if len(told) > 2 * len(records):  # most of them are no records any more
            told.intersection_update(records)

        def later(signature: bytes) -> tuple[bool, bool, float]:
            """What to sort by: False is told before True."""
            record = records[signature]
            of_others = record.issuer not in (book.founder, self._me)
            return of_others, isinstance(record, Certificate), random.random()

        new = sorted((signature for signature in records if signature not in told), key=later)[:RECORDS_TOLD]
        told.update(new)
        return {signature: book.as_sent(records[signature]) for signature in new}

    def hear(self, records: Iterable[bytes], peer: bytes, told: set[bytes] | None = None) -> bool:
        """Take records that a peer tells; wrong ones are left out. They prove themselves, so it may be a stranger.

        Args:
            told: the signatures of the right ones are added: the peer has these records.

        Returns whether a budget left some, which are to be told again.
        """
        left = False
        for record in islice(records, RECORDS_TOLD):
            with suppress(Malformed):
                kept, why = self._hear(record, peer)
                left |= why in LATER
                held = self.book.kept(kept).get(kept.issuer, {}).get(kept.member)
                if not why and told is not None and kept == held:  # no forged older one
                    told.add(held.signature)
        with suppress(OSError):  # a full disk: later, then
            if self._urgent:
                self.save()
        return left

    def _hear(self, record: bytes, peer: bytes) -> tuple[Certificate | Removal, str]:
        """The record, and why it cannot be kept, or ""; of a chain the last certificate. Raises Malformed."""
        try:
            removal = decode(record, Removal)
        except Malformed:
            chain = decode(record, Chain)
            if not chain:
                raise
            return chain[-1], self._take(chain, chain[-1].member, peer)
        return removal, self._keep(removal, peer)

    def _take(self, chain: Chain, member: bytes, peer: bytes) -> str:
        """Keep what is new in a chain for this key, which a peer sent; return why that cannot be, or ""."""
        why = self.book.why_misshapen(chain, member)
        for certificate in chain:
            why = why or self._keep(certificate, peer)
        return why

    def _keep(self, record: Certificate | Removal, peer: bytes | None = None) -> str:
        """Keep what a peer sent, or (None) this node's owner ordered; return why that cannot be, or "", also if a newer
        one is here. Nothing is saved yet."""
        book = self.book
        issuer = record.issuer
        tree = book.kept(record).get(issuer, {})
        held = tree.get(record.member)
        if held is not None and held.issued_at >= record.issued_at:
            return ""
        why = self._why_useless(record, new=held is None)
        if why:
            return why
        first = isinstance(record, Removal) and issuer == book.founder
        if held is None and len(tree) >= RECORDS_MAX and not first:
            return f"nodes remember {RECORDS_MAX} members and {RECORDS_MAX} removals of {peer_id(issuer)}"
        limited = peer is not None and issuer != book.founder
        if limited and self._new.left(issuer) < 1.0:  # before a check, which is the teller's
            return TOO_MANY_RECORDS
        if peer is not None and not first and not self._checks.take(peer):
            return TOO_MANY_CHECKS
        if not record.verify(issuer):
            if peer is not None:
                self.lied(peer, "showed a forged record of members")
            return "a signature in its certificates is wrong"
        if limited:
            self._new.take(issuer)
        book.kept(record).setdefault(issuer, {})[record.member] = record
        self._unsaved = True
        self._urgent |= issuer == book.founder
        if isinstance(record, Removal):
            logger.info("%s was removed from the run by %s", peer_id(record.member), peer_id(issuer))
        return ""

    def _why_useless(self, record: Certificate | Removal, new: bool = False) -> str:
        """Return why a record need not be kept, or "". A key's first certificate (`new`) may be of the future, for
        this clock may be behind. An inviter's that has expired still shows that its removals count."""
        book = self.book
        if isinstance(record, Certificate):
            now = self._clock()
            if new:
                now = max(now, record.issued_at)
            if record.invites and record.issuer == book.founder:
                now = min(now, record.issued_at)
            return book.why_refused(record, now)
        if record.run_id != book.run_id or record.member == book.founder or not is_author(record.member):
            return "it names no member of this run"
        if not book.appointed(record.issuer):
            return "only the founder and its inviters can remove members"
        return ""

    # --- the owner's orders, and the disk -----------------------------------------------------------------------------

    def obey(self) -> None:
        """Carry out what commands left in the directory of orders, and save what peers told of inviters' members: not
        at each message, for they tell it again after a power loss. Warn once when this node is no member any more.

        `Swarm` calls it before it dials anybody, and then every few seconds.
        """
        why = self.why_no_member()
        if why != self._warned:
            self._warned = why
            if why and not (self._invitation and self.ticket_for(self._invitation.inviter)):
                logger.warning("This node is no member of its private run: %s.", why)
        for issuer, tree in self.book.issued.items():
            if len(tree) >= RECORDS_MAX:  # those that are no members any more make room
                self.book.issued[issuer] = {key: one for key, one in tree.items() if not self._why_useless(one)}
        for file in self._waiting_orders():
            try:
                self._carry_out(file)
            except OSError as error:  # it may be read later, or the disk have room; nothing else waits for it
                if file not in self._put_off:
                    self._put_off.add(file)
                    logger.error("The order %s cannot be carried out yet: %s.", file, error)
        with suppress(OSError):  # a full disk: later, then
            self._save_changes()

    def _waiting_orders(self) -> list[Path]:
        """The files of orders, by name; none where the directory cannot be read."""
        if self._orders is None:
            return []
        with suppress(OSError):
            return sorted(file for file in self._orders.iterdir() if file.suffix in (".removal", ".voided"))
        return []

    def _carry_out(self, file: Path) -> None:
        """Carry out one order and remove its file; what is wrong with it goes into the log. Raises OSError."""
        try:
            if file.suffix == ".voided":
                self.book.voided = max(self.book.voided, int(file.stem))  # its name is a time in unix seconds
            else:
                why = self._keep(decode(file.read_bytes(), Removal))
                if why:
                    logger.error("The order %s has no effect: %s.", file, why)
        except (Malformed, ValueError):
            logger.error("The order %s cannot be read and is dropped; give it again.", file)
        self.save()
        file.unlink()

    def _save_changes(self) -> None:
        """Save, if anything has changed."""
        if self._unsaved:
            self.save()

    def save(self) -> None:
        """Write the roster to its file, if it has one, also through a power loss: without it no member starts again.
        Raises OSError."""
        if self._file is not None:
            replace_bytes(self._file, msgspec.msgpack.encode(self.book), durable=True)
        self._unsaved = False
        self._urgent = False


def read_book(file: Path | None) -> MembersBook | None:
    """Read a roster from disk; None if there is no file. Raises UserError if it is damaged or cannot be read."""
    if file is None or not file.exists():
        return None
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=MembersBook)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise UserError(
            f"The list of members {file} cannot be read: {error}.",
            "Remove it, and ask for a new invitation; the founder needs none.",
        ) from error
