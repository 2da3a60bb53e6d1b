"""What the command line makes of words, without doing it."""

import functools
from typing import Any

from typer.main import get_command

from ftis_node.cli import app


@functools.cache
def root() -> Any:
    """Typer brings a click of its own, so nothing here is known by its type."""
    return get_command(app)


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The parameters that click reads from a command line, which is not carried out.

    Raises:
        ValueError: there is no such command, option or value; LookupError: something is missing.
    """
    command = root()
    context = None
    name = "ftis-node"
    rest = list(arguments)
    try:
        while True:
            context = command.make_context(name, rest, parent=context)
            rest = [*context._protected_args, *context.args]
            if not hasattr(command, "resolve_command"):
                return dict(context.params)
            name, command, rest = command.resolve_command(context, rest)
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        if kind in ("Exit", "SystemExit", "NoArgsIsHelpError"):  # --help, --version, and a group alone
            return {}
        if kind == "MissingParameter":
            raise LookupError(str(error)) from error
        if not hasattr(error, "format_message"):
            raise
        raise ValueError(f"{kind}: {error.format_message()}") from error
