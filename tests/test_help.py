"""What a person reads first: the commands in panels, the few options of `join`, and what a shell completes."""

import re
import sys

import pytest
from typer.testing import CliRunner

from ftis_node.cli import app
from tests.support.command_lines import root


def panels(*words):
    """The names in each panel of a help text, in order."""
    ended = CliRunner().invoke(app, [*words], catch_exceptions=False, env={"COLUMNS": "100"})
    assert ended.exit_code == 0
    found = {}
    for line in ended.stdout.splitlines():
        if title := re.match(r"╭─ (.*?) ─", line):
            found[title[1]] = []
        elif name := re.match(r"│ (-*[a-z][\w-]*)", line):
            [*found.values()][-1].append(name[1])
    return found


def test_commands_stand_in_panels_in_the_order_in_which_a_person_meets_them():
    shown = panels("--help")
    assert list(shown) == ["Options", "Start", "Watch", "Control", "Friends", "Results", "Trouble", "Experts"]
    assert shown["Start"] == ["demo", "doctor", "fit", "join"]
    named = [name for panel, names in shown.items() if panel != "Options" for name in names]
    assert sorted(named) == sorted(root().commands)


def test_join_shows_ten_options_and_with_help_all_every_one():
    few = panels("join", "--help")
    every = panels("join", "--help-all")
    assert list(few) == ["Arguments", "Options"]
    assert len([name for name in few["Options"] if "--help" not in name]) == 10
    assert every["Options"] == few["Options"]
    assert {"The run", "The network", "The machine"} < every.keys()
    options = [option for option in root().get_command(None, "join").params if option.opts[0].startswith("--")]
    shown = [name for panel, names in every.items() if panel != "Arguments" for name in names]
    assert sorted(shown) == sorted([*(option.opts[0] for option in options), "--help"])
    assert not any(option.secondary_opts for option in options if option.name == "help_all")
    assert panels("join", "--help") == few, "a help leaves nothing behind"


@pytest.mark.parametrize(
    ("typed", "place", "offered"),
    [
        ("ftis-node jo", 1, "join"),
        ("ftis-node join --lan --pri", 3, "--private"),
    ],
)
def test_a_shell_completes_commands_and_options(typed, place, offered, monkeypatch, capsys):
    for name, text in (
        ("_FTIS_NODE_COMPLETE", "complete_bash"),
        ("COMP_WORDS", typed),
        ("COMP_CWORD", str(place)),
    ):
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(sys, "argv", ["ftis-node"])
    with pytest.raises(SystemExit):
        app(prog_name="ftis-node")
    assert capsys.readouterr().out.split() == [offered]
