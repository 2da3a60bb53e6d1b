"""``ftis-node config``: what the settings add up to."""

import math
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption, JsonOption, print_json
from ftis_node.cli.flags import Given, with_settings
from ftis_node.config.documentation import as_toml
from ftis_node.config.settings import LIVE
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.text import say

app = typer.Typer(no_args_is_help=True)


@app.command("show")
@with_settings()
def show(
    *,
    origin: Annotated[bool, typer.Option("--origin", help="Also where each value came from.")] = False,
    given: Given,
    task: Annotated[str | None, typer.Option(help="Whose profile counts; default: the run's, or arithmetic.")] = None,
    home: HomeOption = DEFAULT_HOME,
    run: Annotated[Path | None, typer.Option(help="As of join: a run file.")] = None,
    json: JsonOption = False,
) -> None:
    """Show every setting as `join` with the same flags and this environment would settle it; as a settings file.

    In a home that was begun, its checkpoints decide model and LoRA, and its memory the batches.
    """
    from ftis_node.node.options import JoinOptions
    from ftis_node.node.remembered import recalled
    from ftis_node.node.run_source import known_run

    place = Home(home)
    task = JoinOptions(place, task).task_of(known_run(place, run))
    settled, origins = recalled(place, *given.on(place)(task))
    if json:
        values = settled.model_dump(mode="json")
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                # JSON has no infinity; as a text it is still one that the settings understand.
                values[name] = str(value)
        told = {"settings": values, "live": list(LIVE)}
        if origin:
            told["origins"] = origins
        print_json(told)
    else:
        say(f"# As for the task {task!r}; docs/settings.md says what each does.")
        say(f"# A running node can change (`ftis-node set`): {', '.join(LIVE)}.", "")
        shown = None
        if origin:
            shown = origins
        say(*as_toml(settled, shown).splitlines())
