"""What goes to a terminal through rich: texts are shown as they are, and never read as markup."""

from __future__ import annotations

from rich.console import Console
from rich.progress import TextColumn
from rich.text import Text

from ftis_node.text import escaped


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
    return TextColumn(form, markup=False)
