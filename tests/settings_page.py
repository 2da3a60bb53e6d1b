"""Writes docs/settings.md, docs/files.md, and the table of named objectives in docs/method.md, from the classes.

After a change of `Settings`, `TASKS`, the methods, or of a file's first sentence or constants:
``python -m tests.settings_page docs`` (`make settings`).
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from ftis_node.config.documentation import EXPERTS, OWNERS, in_tiers
from ftis_node.config.profiles import TASKS
from ftis_node.config.settings import LIVE, Settings
from ftis_node.methods import METHODS, NAMES
from ftis_node.methods.choices import PART_LIMITS
from tests import file_map

_METHODS = "<!-- methods -->\n"
_UNIT = re.compile(r"\[(?P<unit>[^]]+)\] ")

_HEAD = """\
# Settings

Made from `ftis_node/config/settings.py` and `config/profiles.py` by `make settings`; not to be edited.

After this page you can change any of {count} settings, and know which {owners} are worth a thought.

Give a setting in one of three ways; some have a flag (`ftis-node join --help-all`):

    wait = 30                # in a TOML file, named with --settings FILE
    FTIS_WAIT=30             # in the environment
    --set wait=30            # on the command line

The later wins: defaults < task profile < home < file < environment < flags. A list has commas
(`--set lora_targets=q_proj,v_proj`). A misspelt name is an error. `home`: what a home keeps of earlier command lines.

    ftis-node config show --origin            # every value, and where it came from
    ftis-node config show --settings FILE     # the same with a file; what is wrong in it is an error

A default of `—`: nothing is set. A GB is 2^30 bytes, an MB 2^20. *Live*: `ftis-node set wait=30` changes it until
the node ends.
"""


@dataclass(frozen=True)
class Entry:
    """One setting. values: which are allowed, empty if any; unit: empty if it has none; text: what it does."""

    name: str
    default: Any
    values: str
    unit: str
    text: str


def entry_of(name: str) -> Entry:
    """What the class says of a setting."""
    field = Settings.model_fields[name]
    text = " ".join((field.description or "").split())
    unit = _UNIT.match(text)
    return Entry(name, field.get_default(), _allowed(name, field), unit["unit"] if unit else "", _UNIT.sub("", text, 1))


def document() -> str:
    """docs/settings.md."""
    head = _HEAD.format(count=len(Settings.model_fields), owners=len(OWNERS))
    return "\n".join([head, *_tables(), *_profiles()]) + "\n"


def with_methods(page: str) -> str:
    """docs/method.md with its table of named objectives made anew."""
    head, _, tail = page.split(_METHODS)
    lines = ["| objective | how a sample counts | of others | source |", "|---|---|---|---|"]
    for name, method in METHODS.items():
        formula, told = (" ".join(part.split()) for part in (method.__doc__ or "").replace("|", r"\|").split("\n\n"))
        others, source = told.removeprefix("Of others: ").removesuffix(".").split(". Source: ")
        lines.append(f"| `{name}` | {formula.removesuffix('.')} | {others} | {source} |")
    return _METHODS.join((head, "".join(f"{line}\n" for line in lines), tail))


def _tables() -> Iterator[str]:
    (_, owners), *experts = in_tiers()
    yield "| setting | default | values | what it does | change it |"
    yield "|---|---|---|---|---|"
    for entry in map(entry_of, owners):
        cells = (f"`{entry.name}`", _default(entry.default), _values(entry), _told(entry), OWNERS[entry.name])
        yield f"| {' | '.join(cells)} |"
    yield f"\n## {EXPERTS}\n"
    yield "Each with its default, and in brackets what is allowed."
    for title, found in experts:
        yield f"\n**{title.removeprefix(f'{EXPERTS}: ')}**\n"
        for entry in map(entry_of, found):
            allowed = f" ({values})" if (values := _values(entry)) and not isinstance(entry.default, bool) else ""
            yield f"* `{entry.name}` = {_default(entry.default)}{allowed}: {_told(entry)}"


def _values(entry: Entry) -> str:
    return " ".join(filter(None, (entry.values, entry.unit)))


def _told(entry: Entry) -> str:
    return entry.text + (" *Live.*" if entry.name in LIVE else "")


def _profiles() -> Iterator[str]:
    yield "\n## Task profiles"
    for name, task in TASKS.items():
        yield f"\n**`{name}`**\n"
        yield "| setting | value |"
        yield "|---|---|"
        rates = {"learning_rate": f"{task.learning_rate:g}, with LoRA {task.lora_learning_rate:g}"}
        for key, value in {**task.settings, **rates}.items():
            yield f"| `{key}` | `{_as_flag(value)}` |"
        parts = ", ".join(f"`{key}` = `{_as_flag(value)}`" for key, value in task.filter.items())
        yield f"\nAnd where the objective filters as the paper does: {parts}."


def _default(value: Any) -> str:
    return "—" if value in (None, ()) else f"`{_as_flag(value)}`"


def _as_flag(value: Any) -> str:
    """As it would be written after --set KEY=."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(_as_flag(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed(name: str, field: FieldInfo) -> str:
    """The names to choose from, or the bounds of a number; empty if any value of the type will do."""
    if name in NAMES:
        return ", ".join(NAMES[name])
    if name in PART_LIMITS:
        return PART_LIMITS[name][0]
    parts = list(_parts(field.annotation))
    if bool in parts:
        return "true, false"
    if names := [value for part in parts if get_origin(part) is Literal for value in get_args(part)]:
        return ", ".join(names)
    metadata = [*field.metadata, *(bound for part in parts for bound in getattr(part, "__metadata__", ()))]
    return " and ".join(dict.fromkeys(bound for one in metadata for bound in _bounds(one)))


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation and all that it is made of."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _parts(part)


def _bounds(metadata: Any) -> Iterator[str]:
    """The bounds that a type's annotation gives, as "≥ 1"."""
    if isinstance(metadata, FieldInfo):  # of an annotated part
        for bound in metadata.metadata:
            yield from _bounds(bound)
    for key, sign in (
        ("ge", "≥"),
        ("gt", ">"),
        ("le", "≤"),
        ("lt", "<"),
    ):
        limit = getattr(metadata, key, None)
        if limit is not None:
            yield f"{sign} {limit if limit < 1 << 32 else f'2^{limit.bit_length() - 1}'}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "settings.md").write_text(document(), encoding="utf-8")
    (folder / "files.md").write_text(file_map.page(), encoding="utf-8")
    (folder / "method.md").write_text(with_methods((folder / "method.md").read_text("utf-8")), encoding="utf-8")
