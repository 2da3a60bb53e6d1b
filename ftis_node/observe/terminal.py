"""Output to a terminal through rich: texts are shown as they are, and never read as markup."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ftis_node.host.doing import now
from ftis_node.text import escaped

QUIET_SECONDS = 2.0  # what takes no longer needs no progress


def words(text: object, style: str = "", *, whole: bool = True) -> Text:
    """The one way to make a `Text`: brackets stay brackets, and no character ends a line or moves a cursor.

    Args:
        whole: otherwise what does not fit into the line is cut off with an ellipsis.
    """
    if whole:
        return Text(escaped(str(text)), style=style)
    return Text(escaped(str(text)), style=style, overflow="ellipsis", no_wrap=True)


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """The one way to make a `Console`: it reads no markup, no emoji names, and colours no words by itself."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)


@contextmanager
def shown_work() -> Iterator[None]:
    """Show on stderr what this process is doing (`host.doing`), once the block has taken `QUIET_SECONDS`."""

    def line() -> Text:
        work = now()
        return words("" if work is None else work.sentence(), "dim", whole=False)

    live = Live(get_renderable=line, console=console(stderr=True), transient=True, refresh_per_second=2)
    timer = threading.Timer(QUIET_SECONDS, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        live.stop()
