"""``ftis-node invite``, ``members`` and ``remove``: who may take part in a run."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption, JsonOption, nobody_to_ask, print_json, seconds_in
from ftis_node.cli.local import ask_daemon
from ftis_node.config.run import Run, load_run_file, run_file_from_json
from ftis_node.errors import UsageError, UserError
from ftis_node.host.clocks import unix_seconds
from ftis_node.host.files import replace_bytes
from ftis_node.observe.answers import Peers, Status
from ftis_node.observe.api import ask
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.swarm.certificates import MembersBook, Removal, day, decode, encode
from ftis_node.swarm.chronicle import names_in, read_chronicle
from ftis_node.swarm.identity import Identity, author_of, peer_id
from ftis_node.swarm.invitation import CHARACTERS_MAX, PREFIX, Invitation, read_line
from ftis_node.swarm.invitation import invite as make_invitation
from ftis_node.swarm.roster import RECORDS_MAX, read_book
from ftis_node.swarm.signed import Malformed
from ftis_node.text import called, say, with_names

DAYS_OF_AN_INVITATION = "7d"
DAYS_OF_A_CERTIFICATE = "180d"


def invite(
    home: HomeOption = DEFAULT_HOME,
    expires: Annotated[str, typer.Option(help="How long it may be used: 30m, 12h, 7d.")] = DAYS_OF_AN_INVITATION,
    name: Annotated[str, typer.Option(help="How you call yourself to the invited.")] = "",
    address: Annotated[list[str] | None, typer.Option(help="To join at, repeatable; default: this node's own.")] = None,
    membership: Annotated[str, typer.Option(help="Private runs: how long one lasts.")] = DAYS_OF_A_CERTIFICATE,
    may_invite: Annotated[bool, typer.Option("--may-invite", help="Private runs: to invite others.")] = False,
    qr: Annotated[bool | None, typer.Option("--qr/--no-qr", help="As a QR code; default: on a terminal.")] = None,
    json: JsonOption = False,
) -> None:
    """Print a line for `ftis-node join` that invites to this node's run. The node must run meanwhile."""
    place, identity, run = _of(home)
    if run.founder and not _book(place, run).may_invite(identity.author, unix_seconds()):
        raise UserError("This node may not invite to its run.", "Join by the founder's invitation with --may-invite.")
    if may_invite and run.founder not in ("", identity.peer_id):
        raise UserError("Only the founder can appoint inviters.", f"Leave out --may-invite, or ask {run.founder}.")
    valid = seconds_in(expires)
    stays = 0
    if run.founder:
        stays = seconds_in(membership)
    at = address or ask_daemon(home, "/status", Status).addresses
    now = unix_seconds()
    made = make_invitation(
        identity, run.id, at, now=now, seconds=valid, name=name, membership=stays, invites=may_invite
    )
    if not made.dial:
        raise UserError(
            "The invitation would have no address at which this node can be reached.",
            f"Name one with --address, of a port from 1024 on or 443, ending in /p2p/{identity.peer_id}.",
        )
    if json:
        print_json({"invitation": made.text, "run": run.id.hex(), "private": made.private, "expires": made.expires})
        return
    say(made.text)
    if qr is None:
        qr = sys.stdout.isatty()
    if qr:
        import segno

        segno.make(made.text, error="l").terminal(compact=True)
    if made.private:
        say("note: whoever uses it first becomes a member; send it by a way that only they can read.", error=True)
    if run.task.endswith((".jsonl", ".csv")):
        files = f"they also need {run.task}, and your held-out file if you named one, or pass@1 differs"
        say(f"note: {files}: `join ftis:… --task {run.task} --eval-data FILE`.", error=True)


def members(home: HomeOption = DEFAULT_HOME, json: JsonOption = False) -> None:
    """List the members of a private run that this node knows, and those removed."""
    place, identity, run = _of(home)
    book = _book(place, run)
    heard = _heard(place, run)
    now = unix_seconds()
    rows = []
    names = heard.names
    for key in book.keys:
        held = book.best(key, now)
        member = peer_id(key)
        row = {
            "id": member,
            "founder": key == book.founder,
            "invited_by": held and peer_id(held.issuer),
            "expires": held and min(one.expires for one in book.chain(held)),
            "may_invite": book.may_invite(key, now),
            "observer": member in heard.observers,
            "why": book.why_no_member(key, now) or None,
            "name": names.get(member),
        }
        rows.append(row)
    if json:
        print_json({"run": run.id.hex(), "own": identity.peer_id, "members": rows})
        return
    for row in rows:
        told = ""
        if row["id"] == identity.peer_id:
            told = "this node; "
        if row["founder"]:
            told += "the founder"
        else:
            if row["why"]:
                told += f"no member: {row['why']}"
            else:
                told += f"until {day(int(str(row['expires'])))}"
            told += f"; invited by {row['invited_by']}"
            if row["may_invite"]:
                told += ", may invite"
            if row["observer"]:
                told += ", an observer"
        say(with_names(f"{row['id']}  {told}", names))


def remove(
    peer: Annotated[str, typer.Argument(help="The peer id or name to remove, with all whom it has invited.")] = "",
    invitations: Annotated[bool, typer.Option("--invitations", help="Withdraw this node's unused ones.")] = False,
    home: HomeOption = DEFAULT_HOME,
    json: JsonOption = False,
) -> None:
    """Remove a member from a private run. What it has received already stays with it."""
    place, identity, run = _of(home)
    book = _book(place, run)
    if not peer and not invitations:
        raise UsageError("Nobody is named.", "Give a peer id that `ftis-node members` lists, or --invitations.")
    now = int(unix_seconds())
    place.orders.mkdir(mode=0o700, exist_ok=True)
    if peer:
        names = _heard(place, run).names
        if not book.appointed(identity.author):
            raise _no_remover(book.founder, names)
        member = _member(peer, book, names)
        peer = peer_id(member)
        _check_removal(book, identity.author, member, names)
        if not json and not nobody_to_ask():
            typer.confirm(f"Remove {called(peer, names)} for good? Its key stays out, and whom it invited.", abort=True)
        removal = Removal(run_id=run.id, member=member, issuer=identity.author, issued_at=now).signed_by(identity)
        replace_bytes(place.orders / f"{peer}.removal", encode(removal), durable=True)
        book.ended.setdefault(identity.author, {})[member] = removal
        still = None
        if not book.why_no_member(member, now):
            still = book.best(member, now)
    if invitations:
        replace_bytes(place.orders / f"{now + 1}.voided", b"", durable=True)
    if json:
        print_json({"removed": peer or None, "invitations_withdrawn": invitations})
        return
    if peer:
        effect = "is removed"
        if still is not None:
            effect = f"stays a member by {called(peer_id(still.issuer), names)}'s word"
        say(f"{called(peer, names)} {effect}; members hear of this order as they meet this node.")
        if still is None:
            say("That is for good. It comes back with another key: a new invitation, `join` with a new --home,")
            say("and the weights that it has by `ftis-node export` there, then `--model FOLDER`.")
    if invitations:
        say("Invitations that were not used yet are void.")
    if not place.in_use():
        say(f"note: this takes effect when the node on {place.path} runs.", error=True)


def invitation_in(text: str, home: Home) -> Invitation:
    """The invitation in an argument of `join`: itself, a file that holds it, or - for stdin. It may have expired if the
    home has its run already, so that the same command goes on for ever.

    Raises:
        UsageError: there is none, or it cannot be used.
    """
    if not text.strip():
        raise UsageError("The invitation is empty.", "Set the variable behind it, or leave it out to start a run.")
    if text == "-":
        text = sys.stdin.readline(2 * CHARACTERS_MAX)
    elif not text.startswith(PREFIX):
        try:
            with Path(text).expanduser().open(encoding="utf-8-sig") as file:
                text = file.read(2 * CHARACTERS_MAX)
        except (OSError, UnicodeDecodeError):
            fix = "Give the line that begins with ftis:, a file with it, or - to read it from stdin."
            if "/p2p/" in text:
                fix = "Name an address with --peers."
            raise UsageError(f"{text!r} is no invitation, and no file that holds one.", fix) from None
    found = read_line(text, 0.0)
    if home.run_file.exists() and load_run_file(home.run_file).run.id == found.run_id:
        return found
    return read_line(text, unix_seconds())


def tell_invitation(invited: Invitation) -> None:
    """Print who invites to which run, and where this node dials for it; before it does."""
    inviter = peer_id(invited.inviter)
    kind = "run"
    if invited.private:
        kind = "the private run"
    told = f"Invited to {kind} {invited.run_id.hex()} by {called(inviter, {inviter: invited.name})}."
    say(told, f"This invitation names: {', '.join(invited.dial)}.", error=True, flush=True)


def keep_invitation(home: Home, invitation: Invitation) -> None:
    """Write an invitation into the home, for a daemon in the background, in a file that its owner alone can
    read. Makes the home if need be. Raises OSError."""
    home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_bytes(home.invitation, invitation.text.encode())
    home.invitation.chmod(0o600)


def _of(home: Path) -> tuple[Home, Identity, Run]:
    place = Home(home)
    if place.run_file.exists():
        found = load_run_file(place.run_file)
    else:  # the node may be loading for the first time
        found = run_file_from_json(ask_daemon(home, "/run", dict[str, str], order={})["run_file"])
    return place, Identity.load(place.key), found.run


def _book(place: Home, run: Run) -> MembersBook:
    if not run.founder:
        raise UsageError("The run is open: it has no members.", "Begin a private one with `ftis-node join --private`.")
    book = read_book(place.members) or MembersBook(run.id, author_of(run.founder))
    for file in place.orders.glob("*.removal"):  # which the node has not carried out yet
        with contextlib.suppress(Malformed, OSError):  # the node's log says so
            removal = decode(file.read_bytes(), Removal)
            book.ended.setdefault(removal.issuer, {})[removal.member] = removal
    return book


def _check_removal(book: MembersBook, own: bytes, member: bytes, names: Mapping[str, str]) -> None:
    """Raises UserError if a removal of this member by this node, the founder or an inviter, would have no effect."""
    if member == book.founder:
        raise UserError("The founder cannot be removed.", "Begin another run: `ftis-node join --private`.")
    if own != book.founder and member not in book.issued.get(own, {}):
        asked = book.founder
        held = book.best(member, unix_seconds())
        if held is not None:
            asked = held.issuer
        raise _no_remover(asked, names)
    if own != book.founder and len(book.ended.get(own, ())) >= RECORDS_MAX:
        raise UserError(
            f"This node has removed {RECORDS_MAX} members; nodes remember no more removals of one inviter.",
            f"Ask {called(peer_id(book.founder), names)}, the founder, to remove it.",
        )


def _no_remover(asked: bytes, names: Mapping[str, str]) -> UserError:
    return UserError(
        "This node cannot remove that member: only the founder and the member's inviter can.",
        f"Ask {called(peer_id(asked), names)}.",
    )


def _heard(place: Home, run: Run) -> Peers:
    """Return what the daemon knows of others; for a home without one it is the names that it knew."""
    try:
        return ask(place.api_socket(), "/peers", Peers)
    except UserError:
        return Peers([], names=names_in(read_chronicle(place.swarm_history, run)))


def _member(text: str, book: MembersBook, names: Mapping[str, str]) -> bytes:
    """The key of a peer id, or of the one member of this name."""
    try:
        return author_of(text)
    except ValueError as error:
        now = unix_seconds()
        known = book.keys
        named = [one for one in known if names.get(peer_id(one)) == text and not book.why_no_member(one, now)]
        if not named:
            raise UsageError(
                f"No member calls itself {text!r}, and as a peer id it is {error}.",
                "Copy one from `ftis-node members`.",
            ) from None
    if len(named) > 1:
        ids = ", ".join(map(peer_id, named))
        raise UsageError(f"{len(named)} members call themselves {text!r}.", f"Name one of these peer ids: {ids}.")
    return named[0]
