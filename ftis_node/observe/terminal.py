"""Output to a terminal through rich: texts are shown as they are, and never read as markup."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ftis_node.host.doing import now
from ftis_node.text import escaped

QUIET_SECONDS = 2.0  # what takes no longer needs no progress

# The same, and between two lines, where stderr is a file or a pipe.
_QUIET_SECONDS_IN_A_FILE = 10.0
_LINE_SECONDS = 30.0


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
    """Show on stderr what this process is doing (`host.doing`), once the block has taken `QUIET_SECONDS`.

    Where that is no terminal, a line now and then says it.
    """
    screen = console(stderr=True)
    ended = threading.Event()

    def line() -> Text:
        work = now()
        return words("" if work is None else work.sentence(), "dim", whole=False)

    def show_bar() -> None:
        if not ended.wait(QUIET_SECONDS):
            with Live(get_renderable=line, console=screen, transient=True, refresh_per_second=2):
                ended.wait()

    def show_lines() -> None:
        seconds = _QUIET_SECONDS_IN_A_FILE
        while not ended.wait(seconds):
            text = line()
            if text:
                screen.print(text, soft_wrap=True)
            seconds = _LINE_SECONDS

    show = show_lines
    if screen.is_terminal:
        show = show_bar
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
