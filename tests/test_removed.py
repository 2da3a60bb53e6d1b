"""Removed objectives and parts are refused by name, wherever they stand, with what to use in their place."""

import json
import re

import pytest

from ftis_node.config.run import RunFile, dump_run_file
from ftis_node.config.settings import Settings, changed, collect
from ftis_node.errors import UserError
from ftis_node.lab.replaying.lineage import lineage
from ftis_node.methods.removed import REMOVED
from ftis_node.store.home import Home
from tests.support.begun import begun, contents
from tests.support.cli import refused
from tests.support.lab import spec
from tests.support.steps import started, took
from tests.support.swarm import RUN

NAMES = [(name, "geometric" if value is ... else str(value), fix) for (name, value), (_, fix) in REMOVED.items()]


def error_of(ask):
    with pytest.raises(UserError) as caught:
        ask()
    return caught.value


@pytest.mark.parametrize(("name", "value", "fix"), NAMES)
def test_what_was_removed_is_refused_by_name_and_an_old_home_loses_nothing(name, value, fix, tmp_path):
    home = Home(tmp_path / "home")
    pair = f'{name} = "{value}"\n'
    variable = f"FTIS_{name.upper()}"
    begun(home.path, 3, "tiny-a", "full")
    log = [started(fresh=True), *took(1)]
    log[0]["settings"] = log[0]["settings"] | {name: value}
    home.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in log))
    run_text = dump_run_file(RunFile(run=RUN))
    home.run_file.write_text(run_text.replace("[run]\n", f"[run]\n{pair}"))
    file = tmp_path / "settings.toml"
    file.write_text(pair)
    before = contents(home.path)
    by_command = refused("join", "--home", home.path, "--settings", file)
    by_variable = error_of(lambda: collect(task="", flags={}, environment={variable: value}))
    by_flag = error_of(lambda: collect(task="", flags={name: value}, environment={}))
    found = {
        f"file {file}": by_command,
        "the run file": by_command,
        f"environment {variable}": by_variable,
        "flags": by_flag,
        "recorded in metrics.jsonl": error_of(lambda: lineage(log)),
    }
    for origin, error in found.items():
        assert f"{name}={value} ({origin}) was removed: " in error.what
        assert fix in error.fix
    trial = spec(settings={name: value})
    assert error_of(lambda: trial.settings_of(trial.members[0])).fix == fix, "in a file of the lab"
    if name == "mask":
        assert error_of(lambda: changed(Settings(), {name: value}, Settings())).fix == fix, "by `ftis-node set`"
    assert contents(home.path) == before


@pytest.mark.parametrize("name", sorted({name for name, _ in REMOVED if name != "mask"}))
def test_what_stands_in_for_it_is_there(name):
    for fix in (fix for removed, _, fix in NAMES if removed == name):
        pairs = dict(re.findall(r"(\w+)=([\w.-]*\w)", fix))
        assert pairs
        assert collect(task="", flags=pairs, environment={})
