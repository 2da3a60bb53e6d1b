"""``ftis-node task``: a task's rows, before a run is made of them."""

from typing import Annotated

import typer

from ftis_node.cli.common import KINDS, JsonOption, RewardOption, print_json
from ftis_node.text import counted, in_lines, say

app = typer.Typer(no_args_is_help=True, help="Check a task's rows, before a run is made of them.")


@app.command("check")
def check(
    task: Annotated[str, typer.Argument(help=KINDS)], reward: RewardOption = None, json: JsonOption = False
) -> None:
    """Try every row: whether the rule takes its gold answer for right, and its prompt fits; the exit code is 1 if not.

    A dataset of a hub is downloaded, and a Python task is imported. Nothing is trained.
    """
    from rich.progress import TimeElapsedColumn

    from ftis_node.observe.terminal import slow_bar
    from ftis_node.preflight.task_rows import checked
    from ftis_node.tasks import source_of
    from ftis_node.tasks.task import told_if_few

    source = source_of(task, reward=reward, code=True)
    loaded = source.load()
    with slow_bar("rows", len(loaded.train) + len(loaded.held_out), TimeElapsedColumn()) as advance:
        found = checked(source, loaded, advance)
    if json:
        print_json(found)
    else:
        rows = f"{counted(found['rows'], 'row')} to train on, {found['held_out']} held out"
        say(f"{found['task']}: {rows}, judged by {found['reward']}")
        say(f"  gold answers  {found['accepted']} right, {found['refused']} wrong, {found['undecided']} not checked")
        doubles = counted(found["duplicates"], "row")
        say(f"  questions     {doubles} asked before, {found['contradictions']} with two answers")
        say(f"  empty rows    {found['empty']}")
        fits = "not checked" if found["longest"] is None else f"{found['longest']} tokens of {found['model']} at most"
        say(f"  prompts       {fits}, and {found['prompt_tokens']} are allowed")
        if few := told_if_few(found["held_out"]):
            say(f"warning: {few}")
        for what in found["unchecked"]:
            say(f"not checked: {what}")
        for what in found["notes"]:
            say(f"note: the package's own rows: {what}")
        for one in found["troubles"]:
            say(*in_lines(one["what"]), f"       {one['fix']}")
    if found["troubles"]:
        raise typer.Exit(1)
