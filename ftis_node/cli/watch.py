"""``ftis-node watch``: the swarm as a whole, without a model."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import JsonOption, addresses_in, print_answer
from ftis_node.cli.flags import Given, with_settings
from ftis_node.cli.invitations import invitation_in, keep_invitation, tell_invitation
from ftis_node.errors import UsageError
from ftis_node.host.loading import loading
from ftis_node.observe.api import link, read_token
from ftis_node.observe.logs import log_to
from ftis_node.store.home import Home
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.overview import SwarmFacts
from ftis_node.text import counted, duration, say


@with_settings()
def watch(
    invitation: Annotated[
        str, typer.Argument(help="An invitation, ftis:…; a file that holds it; or - to read it from stdin.")
    ] = "",
    *,
    peers: Annotated[str, typer.Option(help="Addresses of nodes of an open run, separated by commas.")] = "",
    home: Annotated[Path, typer.Option(help="The observer's directory: key, run, history.")] = Path(
        "~/.ftis-node-watch"
    ),
    given: Given,
    export: Annotated[Path | None, typer.Option(help="A directory for the page as files, anew each minute.")] = None,
    seconds: Annotated[float | None, typer.Option("--for", min=1, help="Look so long, print, and end.")] = None,
    json: JsonOption = False,
) -> None:
    """Show a whole swarm on a page: who is there, what they claim, who taught whom. It needs no model.

    The same command goes on with what it knows, also without the invitation.
    """
    if json and seconds is None:
        raise UsageError("--json is for --for: what never ends prints nothing.", "Add --for 60, or ask for swarm.json.")
    place = Home(home)
    if place.store.exists():
        raise UsageError(
            f"The home {place.path} is a node's, and the key of one serves one process.",
            f"`ftis-node page{place.flag}` links to the node's own view; or name another --home.",
        )
    if not invitation and place.invitation.exists():
        invitation = str(place.invitation)
    invited = None
    if invitation and not peers:
        invited = invitation_in(invitation, place)
    addresses = addresses_in(peers)
    if not addresses and invited is None and not place.run_file.exists():
        raise UsageError("No swarm is named.", "Give an invitation, ftis:…, or --peers.")
    settings = given.with_values(listen=False, announce=()).on(place)("arithmetic")[0]
    place.open()
    if invited is not None:
        tell_invitation(invited)
        if invited.private and not place.run_file.exists():
            own = Identity.load_or_create(place.key).peer_id
            lasts = duration(invited.seconds)
            named = f"without a name: {own}, its key in {place.path}"
            say(f"It makes this observer a member for {lasts}, {named}.", error=True)
        keep_invitation(place, invited)
    log_to(place.path, as_json=settings.log_format == "json")
    with loading():
        import msgspec
        import uvloop

        from ftis_node.node.observer import Observer
        from ftis_node.node.options import JoinOptions
        from ftis_node.observe.web import Web

    def tell(server: Web) -> None:
        say(f"Page: {link(server.address, read_token(place.page_token))}", error=True, flush=True)

    observer = Observer(JoinOptions(place, peers=addresses, invitation=invited), settings, export)
    if seconds is not None:
        say(f"Looking for {seconds:g} s.", error=True, flush=True)
    facts, code = uvloop.run(observer.run(tell, seconds or math.inf))
    if seconds is not None:
        print_answer(msgspec.to_builtins(facts), *swarm_lines(facts), json=json)
    sys.exit(code)


def swarm_lines(facts: SwarmFacts) -> Iterator[str]:
    """Yield the nodes that were seen, line by line."""
    yield f"{counted(sum(node.present for node in facts.nodes), 'node')} in run {facts.run} ({facts.task})"
    for node in facts.nodes:
        claims = node.claims or {}
        names = [claims[one] for one in ("name", "model") if claims.get(one)]
        reached = "no pass@1 claimed"
        if claims.get("pass_at_1") is not None:
            reached = f"pass@1 {claims['pass_at_1']:.3f}"
        told = f"step {node.step}, {counted(node.groups, 'group')} announced, {reached}"
        yield "  ".join([node.id, *names, told])
