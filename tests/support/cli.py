"""The command line in this process."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from ftis_node.cli import app, main
from ftis_node.errors import UsageError, UserError

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """A command as a shell runs it: exit code, stdout and stderr."""

    def run(*words: object, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        for name, text in (environment or {}).items():
            monkeypatch.setenv(name, text)
        monkeypatch.setattr(sys, "argv", ["ftis-node", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


def printed(*words: object) -> str:
    """The stdout of a command that ends well; its errors are raised."""
    ended = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert ended.exit_code == 0
    return ended.stdout


def answer(*words: object) -> Any:
    """The one object that a command prints with ``--json``."""
    return json.loads(printed(*words, "--json"), parse_constant=_no_json)


def _no_json(name: str):
    raise AssertionError(f"{name} is no JSON")


def refused(*words: object) -> UserError:
    """The error that a command ends with, which says what to do."""
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False, standalone_mode=False)
    assert caught.value.fix
    return caught.value


def misused(*words: object) -> UsageError:
    """Such an error, where it lies in how the command was used: its exit code is 2."""
    error = refused(*words)
    assert isinstance(error, UsageError)
    return error
