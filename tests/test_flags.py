"""The flags that settings declare: each is an option of `join`, and gives the setting its value."""

import pytest
import typer
from typer.testing import CliRunner

from ftis_node.cli.flags import Given, with_settings
from ftis_node.config.settings import FLAGS, collect
from tests.support.command_lines import root


@pytest.fixture
def given() -> list[Given]:
    return []


@pytest.fixture
def app(given) -> typer.Typer:
    """A command with all flags, which keeps what it was given."""
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_settings(*FLAGS)
    def command(*, given):
        kept.append(given)

    kept = given
    return app


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("", {}),
        ("--port 0 --own-share 0 --seed 0 --full", {"port": 0, "own_share": 0.0, "seed": 0, "lora": False}),
        ("--vram 8 --upload 0", {"vram_gb": 8.0, "upload_mbit": 0.0}),
        ("--relay a --relay b --log-format json", {"relays": ["a", "b"], "log_format": "json"}),
        ("--port 4 --set port=5 --set wait=6", {"port": 4, "wait": "6"}),
    ],
)
def test_a_flag_counts_more_than_set(words, values, app, given):
    assert CliRunner().invoke(app, words.split()).exit_code == 0
    assert given == [Given(values)]


def test_every_declared_flag_is_an_option_with_its_help(app):
    helps = {option.name: getattr(option, "help", None) for option in typer.main.get_command(app).params}
    assert FLAGS.keys() <= helps.keys()
    assert all(helps[name] for name in FLAGS)
    assert helps["upload_mbit"] == "Mbit/s: Limit of the payload that this node sends to peers; 0: none."


def test_a_value_that_a_setting_does_not_take_is_told(app, given, tmp_path):
    assert CliRunner().invoke(app, ["--port", "70000", "--settings", str(tmp_path / "a.toml")]).exit_code == 0
    assert given[0].file == tmp_path / "a.toml"
    with pytest.raises(Exception, match="'port' from flags is wrong"):
        collect(task="", flags=given[0].values, environment={})


@pytest.mark.parametrize("command", ["join", "eval", "doctor", "run new"])
def test_the_help_names_each_kind_of_task(command):
    found = root()
    for word in command.split():
        found = found.get_command(None, word)
    (option,) = (one for one in found.params if one.name == "task")
    kinds = ("hf:", "verifiers:", "reasoning-gym:", "package.module:")
    said = str(vars(option)["help"])
    assert all(kind in said for kind in kinds), command
