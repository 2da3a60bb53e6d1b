"""Schemas: homes, databases and checkpoints each carry a number, which a change of what is written raises by one.

Another number than this version's is refused, and nothing is written then.
"""

from ftis_node.errors import UserError


def refuse_other(what: str, found: object, known: int) -> None:
    """Refuse what another version wrote; return if it is this version's.

    Args:
        what: begins the sentence of the error: ``The home /x``. found: its number. known: this version's.

    Raises:
        UserError: a newer version wrote it, or one that is too old, or nobody can tell which.
    """
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UserError(
            f"{what} does not say its schema ({found!r}): it is damaged.",
            "Put back a copy of it from before, or start anew elsewhere.",
        )
    if found == known:
        return
    fix = "A development version before 0.1 wrote it: use that version, or start in a new --home."
    if found > known:
        fix = "A newer version wrote it: upgrade ftis-node, or use the version that wrote it."
    raise UserError(f"{what} has schema {found}, and this version of ftis-node knows {known}.", fix)
