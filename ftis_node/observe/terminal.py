"""Output to a terminal through rich: texts are shown as they are, and never read as markup."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ftis_node.host.doing import now
from ftis_node.text import escaped

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress, ProgressColumn, TextColumn

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


def column(form: str) -> TextColumn:
    """A column of a progress bar, likewise."""
    from rich.progress import TextColumn

    return TextColumn(form, markup=False)


@contextmanager
def slow_bar(form: str, total: int, time: ProgressColumn, **fields: Any) -> Iterator[Callable[..., None]]:
    """A bar on stderr that appears after `QUIET_SECONDS`; call it with how many more are done, and with new fields.

    Args:
        form: the text before the bar, which may name `fields` as ``{task.fields[NAME]}``.
        time: the last column.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    columns = (column(form), BarColumn(), MofNCompleteColumn(), time)
    progress = Progress(*columns, console=console(stderr=True), transient=True)
    bar = progress.add_task("", total=total, **fields)
    with shown_late(progress):
        yield lambda count, **new: progress.update(bar, advance=count, **new)


@contextmanager
def shown_work() -> Iterator[None]:
    """Show on stderr what this process is doing (`host.doing`), once the block has taken `QUIET_SECONDS`."""
    from rich.live import Live

    def line() -> Text:
        work = now()
        return words("" if work is None else work.sentence(), "dim", whole=False)

    with shown_late(Live(get_renderable=line, console=console(stderr=True), transient=True, refresh_per_second=2)):
        yield


@contextmanager
def shown_late(progress: Progress | Live) -> Iterator[None]:
    """Show a progress once the block has taken `QUIET_SECONDS`, until it ends."""
    timer = threading.Timer(QUIET_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
