"""Options that give settings: the flags that settings declare (`config.settings.Flag`), --settings and --set."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ftis_node.cli.common import SetOption, parse_pairs
from ftis_node.config.settings import FLAGS, Flag, Settings, collect
from ftis_node.node.remembered import with_begun
from ftis_node.node.run_source import kept_settings
from ftis_node.preflight.case import Layers
from ftis_node.store.home import Home

Command = Callable[..., None]
DEFAULT = "default"  # a value of --set: as if nobody had ever set it
PASSING = ("model", "steps")  # of one start: the checkpoint names the model, and an end is said each time
_FILE = Annotated[Path | None, typer.Option("--settings", help="A TOML file of settings.")]


@dataclass(frozen=True)
class Given:
    """The settings of a command line: values by name, of any type that the settings read; and a TOML file."""

    values: Mapping[str, object] = field(default_factory=dict)
    file: Path | None = None

    def with_values(self, **values: object) -> Given:
        """The same with further values; None: not given."""
        further = {name: value for name, value in values.items() if value is not None}
        return Given({**self.values, **further}, self.file)

    def on(self, home: Home) -> Layers:
        """Return a function from a task's name to its settings; the home gives values that nobody set now.

        The function raises UsageError for wrong settings, or a file that cannot be read.
        """
        earlier = {name: value for name, value in kept_settings(home).items() if self.values.get(name) != DEFAULT}
        known = Settings.model_fields  # of another name `collect` says that it is none
        flags = {name: value for name, value in self.values.items() if value != DEFAULT or name not in known}

        def settled(task: str) -> tuple[Settings, dict[str, str]]:
            settings, origins = collect(task=task, flags=flags, file=self.file, home=earlier)
            with suppress(OSError):  # the check of the home says that it cannot be read
                settings, origins = with_begun(home, settings, origins)
            return settings, origins

        return settled

    def to_keep(self, home: Home) -> dict[str, object]:
        """What a home keeps for later starts: the settings of all its command lines, in the order they were said."""
        before = {name: value for name, value in kept_settings(home).items() if name not in self.values}
        said = {**before, **self.values}
        if str(said.get("port")) == "0":  # any port: the home keeps the one that it gets
            del said["port"]
        return {name: value for name, value in said.items() if value != DEFAULT and name not in PASSING}


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Give a command options for settings, in place of its parameter `given`.

    Args:
        names: the settings that get their flags, of `FLAGS`. Each command gets --settings and --set besides.

    The options are collected in a `Given`. A flag counts for more than --set.
    """

    def decorate(command: Command) -> Command:
        parameters = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name == "given":
                options = {name: _option(name, FLAGS[name]) for name in FLAGS if name in names}
                options |= {"settings": _FILE, "set_": SetOption}
                for name, option in options.items():
                    parameters.append(parameter.replace(name=name, annotation=option, default=None))
            else:
                parameters.append(parameter)

        @functools.wraps(command)
        def run(*, settings: Path | None, set_: list[str] | None, **arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in names}
            named = {name: value for name, value in flags.items() if value != []}
            command(given=Given(parse_pairs(set_), settings).with_values(**named), **arguments)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _option(name: str, flag: Flag) -> Any:
    """The option of a flag: of the setting's type, and None if it is not given. The settings check its value."""
    setting = Settings.model_fields[name]
    kind: Any = setting.annotation
    text = " ".join((setting.description or "").split())
    text = re.sub(r"^\[(.+?)\] ", r"\1: ", text)  # its unit
    if get_origin(kind) is tuple:
        kind = list[str]
        text += " Repeatable."
    elif get_origin(kind) is Literal:
        kind = str
    elif get_args(kind):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    spellings = flag.spelling.split() or [f"--{name.replace('_', '-')}"]
    return Annotated[kind | None, typer.Option(*spellings, help=text)]
