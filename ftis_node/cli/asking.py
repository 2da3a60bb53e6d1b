"""Asking the daemon on a home."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from ftis_node.errors import UserError
from ftis_node.observe.answers import Kind
from ftis_node.observe.api import NoDaemon, ask
from ftis_node.observe.logs import last_words
from ftis_node.store.home import Home
from ftis_node.text import escaped, say

ANSWER_SECONDS = 5.0
STARTING_SECONDS = 60.0  # loading PyTorch takes some, on a loaded machine many
POLL_SECONDS = 0.3


def ask_daemon(
    home: Path,
    route: str,
    kind: type[Kind],
    *,
    action: bool = False,
    timeout: float = ANSWER_SECONDS,
    starting: float = STARTING_SECONDS,
    order: Mapping[str, str] | None = None,
) -> Kind:
    """Return the answer of the daemon on a home; see `observe.api.ask`.

    Args:
        starting: seconds for which a daemon that holds the home, but does not answer yet, is waited for.
        order: what an order is sent with.

    Raises:
        UserError: there is no such home, none runs on it, it does not answer, or refuses the order.
    """
    place, deadline = Home(home.expanduser()), time.monotonic() + starting
    told = False
    while True:
        try:
            return ask(place.api_socket(), route, kind, action=action, timeout=timeout, order=order)
        except NoDaemon:
            if not place.in_use():
                raise _none(place) from None
            if time.monotonic() > deadline:
                raise UserError(
                    f"The daemon on {place.path} is starting, or ending, and does not answer.",
                    f"`ftis-node logs{place.flag}` says what it does.",
                ) from None
        if not told:
            say(f"note: the daemon on {place.path} does not answer yet; waiting for it.", error=True)
            told = True
        time.sleep(POLL_SECONDS)


def _none(place: Home) -> UserError:
    start = f"Start one with `ftis-node join{place.flag}`, or name another --home."
    if not place.path.is_dir():
        return UserError(f"There is no home {place.path}.", start)
    words = last_words(place.path)
    ended = f" The last one ended with: {escaped(words)}" if words else ""
    return UserError(f"No ftis-node daemon is running on the home {place.path}.{ended}", start)
