"""All attacks, in the order of the table of what a node must survive."""

from collections.abc import Iterator

from tests.hostile import content, directory, identity, reputation, streams, telling, text, wire
from tests.hostile.attack import Attack

ROOMS = (content, text, identity, wire, directory, streams, reputation, telling)


def _attacks() -> Iterator[type[Attack]]:
    """Every class of the rooms that is named after a row; what several share has no row of its own."""
    for room in ROOMS:
        for name, value in vars(room).items():
            if name.startswith("Row"):
                yield value


ATTACKS = tuple(sorted(_attacks(), key=lambda attack: attack.row))


def chosen(rows: str, version: int = 1) -> list[type[Attack]]:
    """The attacks of these rows: numbers separated by commas, or "all".

    Args:
        version: of the run's packets.
    """
    fitting = [attack for attack in ATTACKS if version in attack.versions]
    known = {attack.row for attack in fitting}
    wanted = known
    if rows != "all":
        wanted = {int(row) for row in rows.split(",")}
    lacking = sorted(wanted - known)
    if lacking:
        raise ValueError(f"there are no attacks for rows {lacking}")
    return [attack for attack in fitting if attack.row in wanted]
