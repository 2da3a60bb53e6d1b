"""The handshake, and the request for a peer's run file that comes before it."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import ftis_node
from ftis_node.config.run import ANY, Run, RunFile, run_file_from_json
from ftis_node.errors import UsageError, UserError
from ftis_node.host.clocks import unix_seconds
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.ftis_pb2 import Handshake
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.invitation import Invitation
from ftis_node.swarm.limits import OWN
from ftis_node.swarm.wire.transport import Transport, Unreachable

logger = logging.getLogger(__name__)

# A node blames the sender for announcements that it cannot read, so another form of announcement needs another major.
PROTOCOL_MAJOR = 3
PROTOCOL_MINOR = 2
MAX_ADDRESSES = 8
HANDSHAKE_SECONDS = 5.0
# A first start waits so long for a peer that is there and serves no run yet: it loads its model.
STARTING_SECONDS = 1800.0


async def fetch_run(
    transport: Transport,
    bootstraps: Sequence[str],
    patience: float,
    invitation: Invitation | None = None,
    starting: float = 0.0,
) -> RunFile:
    """Return the run file of the first of `bootstraps` that sends one; ask all at once, for `patience` seconds, every
    half second; at 0, once. A peer that speaks another protocol or does not let this node in is not asked again.

    Args:
        invitation: to a private run; it is shown to its inviter only, and not redeemed.
        starting: [s] how long to go on if that is longer while a peer is there and serves no run yet.

    Raises:
        UserError: no bootstrap could be reached, or none sent a run file; it says why of each.
        UsageError: one is not a multiaddr with a peer id.
    """
    reasons = dict[str, _NoRun]()
    peers = {text: parse_address(text) for text in bootstraps}
    final = dict[bytes, _NoRun]()  # by peer: it speaks another protocol, or does not let this node in
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        asked = [text for text in bootstraps if peers[text] not in final]
        answers = await asyncio.gather(*(_ask_run(transport, text, invitation) for text in asked))
        longest = patience  # that any peer of this turn is worth
        for text, found in zip(asked, answers, strict=True):
            if isinstance(found, RunFile):
                return found
            if found.fix:  # to ask again brings nothing
                final[peers[text]] = found
                continue
            limit = patience
            if found.connected:
                limit = max(patience, starting)
            if reasons.get(text) != found:
                logger.info("%s: %s; it is asked again for up to %.0f s.", text, found.why, limit)
            reasons[text] = found
            longest = max(longest, limit)
        if final.keys() >= set(peers.values()) or clock() >= began + longest:
            break
        await asyncio.sleep(0.5)
    told = [f"{peer_id(peer)}: {refusal.why}" for peer, refusal in final.items()]
    told += [f"{text}: {reason.why}" for text, reason in reasons.items() if peers[text] not in final]
    if invitation is None:
        fix = "Check the addresses and that those nodes run; give --run FILE; or leave out --peers to start a run."
    else:
        fix = "Check that the inviter's node runs; ask for a new invitation if its addresses have changed."
    if invitation is None or invitation.inviter in final:
        fix = next((refusal.fix for refusal in final.values()), fix)
    raise UserError(f"None of the peers gave their run: {'; '.join(told)}.", fix)


@dataclass(frozen=True)
class _NoRun:
    """Why a peer gave no run when it was asked.

    fix: what a person can do, where asking this peer again brings nothing; else empty. connected: a peer answered the
    dial and not the handshake: it may be loading its model.
    """

    why: str
    fix: str = ""
    connected: bool = False


async def _ask_run(transport: Transport, address: str, invitation: Invitation | None) -> RunFile | _NoRun:
    """The run file of the node at an address, or why it gave none. Dials it, and shakes hands.

    Args:
        address: a multiaddr with a peer id; UsageError if it is not one.
    """
    peer = parse_address(address)
    connected = False
    try:
        await transport.connect(peer, [address])
        connected = True
        hello = greeting()
        if invitation is not None and invitation.inviter == peer:  # whoever else sees it could use it first
            hello.invitation = invitation.encoded
        answer = await shake(transport, peer, hello)
        if answer.major != PROTOCOL_MAJOR:
            return _NoRun(other_protocol(answer.major), "Upgrade ftis-node there or here, so both speak one protocol.")
        if answer.refusal:
            return _NoRun(plain(answer.refusal, 200), "Ask a member for a new invitation: `ftis-node invite` makes it.")
        run_file = run_file_from_json(answer.run_file)
    except Unreachable as error:
        if connected:
            return _NoRun("it is there and serves no run yet; it may be loading its model", connected=True)
        return _NoRun(str(error))
    except UsageError as error:
        return _NoRun(plain(error.what, 200))
    if run_file.run.id == answer.run_id:
        return run_file
    return _NoRun("the run file that it sent is not of the run that it names")


def other_protocol(theirs: int) -> str:
    """Why this node refuses a peer of this major version, and what to do, in one line for this node's owner."""
    todo = "upgrade ftis-node here"
    if theirs < PROTOCOL_MAJOR:
        todo = "its owner has to upgrade ftis-node"
    return f"it speaks protocol {theirs}, this node speaks {PROTOCOL_MAJOR}: {todo}"


def polite_refusal(theirs: int) -> str:
    """Why this node refuses a peer of this major version, as it answers it to the peer: "you" is the peer."""
    todo = ""
    if theirs < PROTOCOL_MAJOR:
        todo = ": upgrade ftis-node"
    return f"this node speaks protocol {PROTOCOL_MAJOR}, you speak {theirs}{todo}"


def plain(text: str, length: int) -> str:
    """A peer's text, shortened to so many characters; those that could control a terminal become question marks."""
    return "".join(character if character.isprintable() else "?" for character in text[:length])


def greeting(run: Run | None = None, addresses: Sequence[str] = ()) -> Handshake:
    """The first message of a node of this run, with the time of now; without a run it requests the peer's run file.

    addresses: where this node may be dialled; none from an observer or a throw-away key.
    """
    hello = Handshake(
        major=PROTOCOL_MAJOR,
        minor=PROTOCOL_MINOR,
        addresses=addresses,
        agent=f"ftis-node/{ftis_node.__version__}",
        limits=OWN.message(),
        time=int(unix_seconds()),
    )
    if run is not None:
        hello.run_id = run.id
        hello.tokenizer = _tokenizer(run)
    return hello


def _tokenizer(run: Run) -> bytes:
    """The run's tokenizer as a handshake names it: 32 bytes, or `any`."""
    if run.text:
        return ANY.encode()
    return bytes.fromhex(run.tokenizer)


async def shake(transport: Transport, peer: bytes, hello: Handshake) -> Handshake:
    """Send a peer to which there is a connection a greeting; return its answer, which nobody has checked. Raises
    Unreachable if none comes within five seconds."""
    try:
        return await transport.handshake(peer, hello, HANDSHAKE_SECONDS)
    except Exception as error:  # see `Transport.handshake`
        raise Unreachable("no answer to the handshake; it may be starting, or ending") from error
