"""Homes of newer versions, and of older ones, are left as they are."""

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftis_node.cli.flags import Given
from ftis_node.config.settings import collect
from ftis_node.errors import FtisError, UsageError, UserError
from ftis_node.lab.replaying.stored import StoredPackets
from ftis_node.node.daemon import Node
from ftis_node.node.options import JoinOptions
from ftis_node.node.run_source import kept_settings, remember_files, with_remembered
from ftis_node.store import checkpoints as checkpoints_module
from ftis_node.store.checkpoints import Checkpoints, newest_facts
from ftis_node.store.home import Home
from ftis_node.store.packets import PacketStore
from tests.support.begun import contents
from tests.support.old_home import write_checkpoint, write_database

RUN = bytes(16)
NEWER = "newer version wrote it: upgrade ftis-node"
OLDER = "has schema 1, .* start in a new --home"


@pytest.fixture
def home(tmp_path) -> Iterator[Home]:
    made = Home(tmp_path / "home")
    made.open()
    yield made
    made.close()


@pytest.fixture
def database(tmp_path) -> Path:
    """One that 98648f7 made."""
    write_database(tmp_path / "store.sqlite", RUN)
    return tmp_path / "store.sqlite"


# --- the home ---------------------------------------------------------------------------------------------------------


def test_a_new_home_has_the_newest_schema(home):
    home.mark()
    assert json.loads(home.schema.read_text()) == {"schema": 2}
    assert not home.task_files.exists()
    before = contents(home.path)
    home.mark()
    assert contents(home.path) == before


DAMAGED = "damaged.*copy"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": 3}', "knows 2.*pgrade ftis-node"),
        ('{"schema": 1}', "knows 2.*start in a new --home"),
        ('{"schema": "2"}', DAMAGED),
        ('{"schema": true}', DAMAGED),
        ('{"schema": 0}', DAMAGED),
        ("{}", DAMAGED),
        ("", DAMAGED),
        ("[]", DAMAGED),
    ],
)
def test_a_home_of_another_version_or_of_none_is_left_as_it_is(home, text, words):
    home.schema.write_text(text)
    before = contents(home.path)
    for look in (home.mark, lambda: with_remembered(JoinOptions(home))):
        with pytest.raises(UserError, match=words):
            look()
    assert contents(home.path) == before


def test_a_home_of_the_first_versions_which_has_no_number_is_refused(home):
    write_database(home.store, RUN)
    with pytest.raises(UserError, match=OLDER):
        home.mark()
    assert not home.schema.exists()


# --- the task's files -------------------------------------------------------------------------------------------------


def test_files_named_once_are_found_from_anywhere(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    odd = os.fsdecode(b"e\xe9.jsonl")  # no UTF-8
    held_out = tmp_path / odd
    named = JoinOptions(home, data=Path("copy.jsonl"), eval_data=Path(odd))
    remember_files(named, "rows.jsonl", RUN)
    monkeypatch.chdir("/")
    found = with_remembered(JoinOptions(home))
    assert found.data == tmp_path / "copy.jsonl"
    assert found.eval_data == held_out
    moved = Path("/moved.jsonl")
    found = with_remembered(JoinOptions(home, data=moved))
    assert (found.data, found.eval_data) == (moved, held_out), "what is named comes first"
    found = with_remembered(JoinOptions(home, task=str(moved)))
    assert found.data is None, "the task's name is the file"


def test_a_task_file_is_remembered_by_its_place(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    remember_files(JoinOptions(home, task="rows.jsonl"), "rows.jsonl", RUN)
    assert with_remembered(JoinOptions(home)).data == tmp_path / "rows.jsonl"


def test_a_home_keeps_its_name_and_the_settings_of_its_command_lines(home):
    def start(name=None, **said):
        given = Given(said)
        settled = given.on(home)("arithmetic")
        options = with_remembered(JoinOptions(home, name=name, kept=given.to_keep(home)))
        remember_files(options, "arithmetic", RUN)
        return settled

    start("ann", batch_groups="4", vram_gb=8.0, steps="9", model="tiny-b")
    settings, origins = start()
    assert settings.batch_groups == 4
    assert settings.vram_gb == 8.0
    assert settings.steps is None
    assert settings.model == "tiny-a"
    assert origins["batch_groups"] == "home"
    assert origins["steps"] == "default"
    assert with_remembered(JoinOptions(home)).name == "ann"
    with pytest.raises(UsageError, match="batch_gruops"):
        start(batch_gruops="default")
    start("", port="0")
    assert "port" not in kept_settings(home), "the home keeps the one that it gets"
    assert not with_remembered(JoinOptions(home)).name, "it was forgotten"
    start("ann")
    for said in ({"vram_share": "0.5", "batch_groups": "default"}, {}):  # and then as it was said last
        settings, _ = start(**said)
        assert settings.batch_groups == 24
        assert settings.vram_gb is None
        assert settings.vram_share == 0.5


@pytest.mark.parametrize("text", ["", "[]", "{", '{"data": 7}', "\x00", '{"settings": 7}', '{"settings": {"gone": 1}}'])
def test_a_damaged_memory_of_files_is_none(home, text):
    home.task_files.write_text(text)
    assert with_remembered(JoinOptions(home)) == JoinOptions(home)
    assert Given().on(home)("arithmetic")[0].batch_groups == 24


# --- packets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", [lambda path: PacketStore(path, RUN, 1 << 20), StoredPackets])
@pytest.mark.parametrize(
    ("version", "words"),
    [
        (4, NEWER),
        (2, "has schema 2, .* start in a new --home"),
    ],
)
def test_a_database_of_another_version_is_left_as_it_is(database, opening, version, words):
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    before = contents(database.parent)
    with pytest.raises(UserError, match=words):
        opening(database)
    assert contents(database.parent) == before


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_98648f7_is_read_and_not_written(tmp_path):
    wanted = {"model": "tiny-a (full)", "optimiser": "adamw"}
    checkpoint = tmp_path / "step-00000003"
    write_checkpoint(checkpoint, wanted)
    before = contents(tmp_path)
    assert Checkpoints(tmp_path).latest() == (checkpoint, wanted)
    assert newest_facts(tmp_path) == wanted
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (checkpoints_module.SCHEMA + 1, NEWER),
        (1, OLDER),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_not_called_damaged(tmp_path, schema, words):
    write_checkpoint(tmp_path / "step-00000002", {})
    write_checkpoint(tmp_path / "step-00000003", {}, schema=schema)
    before = contents(tmp_path)
    for look in (Checkpoints(tmp_path).latest, lambda: newest_facts(tmp_path)):
        with pytest.raises(UserError, match=words):
            look()
    assert contents(tmp_path) == before


# --- a start ----------------------------------------------------------------------------------------------------------


def test_a_start_finds_its_files_again(tmp_path, monkeypatch):
    """Up to where it would open the network."""

    def far_enough(_):
        raise FtisError("so far")

    monkeypatch.setattr(Home, "make_runtime", far_enough)
    (tmp_path / "home.json").write_text('{"schema": 2}')
    (tmp_path / "task.json").write_text('{"data": "/where/it/was/rows.jsonl", "eval_data": null}')
    write_database(tmp_path / "store.sqlite", RUN)
    node = Node(JoinOptions(Home(tmp_path)), lambda task: collect(task=task, flags={"model": "tiny-a"})[0])
    with pytest.raises(FtisError, match="so far"):
        asyncio.run(node.run())
    assert node.options.data == node._compute.options.data == Path("/where/it/was/rows.jsonl")
