"""Each error that a person can mend is made by a test: measured in all processes, at the end of a run of all tests."""

import ast
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import ftis_node
from ftis_node import errors
from tests.support.reaching import watch

SOURCE = Path(ftis_node.__file__).parent
FOLDER = pytest.StashKey[str]()
MISSED = pytest.StashKey[list[str]]()


def sites(source: str, name: str) -> Iterator[tuple[str, range, str]]:
    """The places of a program's text that make a UserError: its name, lines and words."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if getattr(node.func, "id", "") in ("UserError", "UsageError"):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            yield name, lines, ast.unparse(node.args[0])


def unreached(found: Iterable[tuple[str, range, str]], reached: set[tuple[str, int]]) -> list[str]:
    """Those of the places where no error was made."""
    missed = []
    for name, lines, words in found:
        if reached.isdisjoint((name, line) for line in lines):
            missed.append(f"{name}:{lines[0]}: {words}")
    return missed


def noted(folder: Path) -> set[tuple[str, int]]:
    """What the processes of a run wrote."""
    places = set()
    for file in folder.glob("*.txt"):
        for place in file.read_text().splitlines():
            path, _, line = place.rpartition(":")
            places.add((path, int(line)))
    return places


def watching(folder: Path) -> str:
    """Make the folder one in which Python processes note their errors, and return the PYTHONPATH for that."""
    shutil.copy(Path(__file__).with_name("reaching.py"), folder / "sitecustomize.py")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def pytest_configure(config: pytest.Config):
    if hasattr(config, "workerinput"):
        return  # its `sitecustomize` watches
    folder = config.stash[FOLDER] = tempfile.mkdtemp(prefix="ftis-reached-")
    os.environ["PYTHONPATH"] = watching(Path(folder))
    watch(errors, folder)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int):
    config = session.config
    if (folder := config.stash.get(FOLDER, None)) is None:
        return
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if whole and exitstatus == 0:
        all_sites = (
            site
            for path in sorted(SOURCE.rglob("*.py"))
            for site in sites(path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix())
        )
        config.stash[MISSED] = missed = unreached(all_sites, noted(Path(folder)))
        if os.environ.get("REACHED") == "all":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if missed else exitstatus
    shutil.rmtree(folder, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config):
    if missed := config.stash.get(MISSED, []):
        terminalreporter.section("errors for people that no test reaches")
        terminalreporter.write("\n".join(missed) + "\n")
