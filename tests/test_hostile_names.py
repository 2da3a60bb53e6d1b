"""Names, paths and words of peers are shown as they are, by every command that prints."""

import ast
import asyncio
import json
import logging
import shutil
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftis_node.cli import main
from ftis_node.config.run import RunFile, dump_run_file, make_hints, parse_run_file
from ftis_node.observe.answers import Peers, Status, read
from ftis_node.observe.live import node_view, nodes_view
from ftis_node.observe.logs import EventFormatter
from ftis_node.observe.prometheus import exposition
from ftis_node.observe.terminal import console, words
from ftis_node.observe.web import Api, Route
from ftis_node.policy.names import BUILT_IN_DIR
from ftis_node.store.home import Home
from ftis_node.swarm.identity import Identity
from ftis_node.text import escaped, in_json, in_toml, say
from tests.support.statuses import TRAINING, peer
from tests.support.swarm import RUN

PACKAGE = Path(main.__code__.co_filename).parent.parent
# rich's markup, colours, a line that poses as another, the C1 form of an escape, a bell, text from right to left.
HOSTILE = "[/x] [red]a[link=http://e.example] :smile: \x1b[31m\x9b1m\x07\r\nFORGED\u202eb\x7f\u2028"
SHOWN = "[/x] [red]a[link=http://e.example] :smile: \\x1b[31m"
STATUS = TRAINING | {
    **dict.fromkeys(("name", "model", "kind", "reason", "advice", "run"), HOSTILE),
    "addresses": [HOSTILE],
    "page": f"http://127.0.0.1:1/{HOSTILE}",
    "curve": [[0, 0.5]],
    "pausing": True,
    "finishing": False,
    "stalled": False,
}
BANNED = peer(agent=HOSTILE, reputation=f"banned: {HOSTILE}", addresses=[HOSTILE])
PEERS = {"peers": [BANNED], "left_out": [{"id": "x", "reason": HOSTILE}]}


def plain(text):
    lines = text.splitlines()
    return all(map(str.isprintable, text.replace("\n", ""))) and not any(one.lstrip()[:6] == "FORGED" for one in lines)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Home]:
    """A home of a hostile name, whose daemon says hostile things."""
    home = Home(tmp_path_factory.mktemp("hostile") / HOSTILE)
    home.path.mkdir(parents=True)
    home.open()
    Identity.load_or_create(home.key)
    runtime = home.make_runtime()
    home.record_runtime(runtime)
    home.page_token.write_text("0" * 43)
    event = json.dumps({"time": HOSTILE, "level": HOSTILE, "message": HOSTILE})
    home.log.write_text(HOSTILE.replace("\n", " ") + f"\n{event}\n")
    answer = {
        "state": "STOPPING",
        "reason": HOSTILE,
        "pausing": True,
        "finishing": False,
    }

    async def ordered(_):
        return answer

    api = Api(
        [
            Route("/status", lambda: STATUS),
            Route("/peers", lambda: PEERS),
            Route("/page", lambda: {"link": "x"}),
        ],
        {f"/{name}": ordered for name in ("stop", "finish", "pause", "resume")},
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(api.start(runtime / "api.sock"), loop).result()
    yield home
    asyncio.run_coroutine_threadsafe(api.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    home.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder of a hostile name with a model, a run file, settings and a task in it."""
    folder = tmp_path_factory.mktemp("files") / HOSTILE
    shutil.copytree(BUILT_IN_DIR / "tiny-a", folder / "model")
    run_file = RunFile(run=RUN, hints=make_hints(name="[/x] \u202e", bootstraps=()))
    (folder / "run.toml").write_text(dump_run_file(run_file))
    (folder / "settings.toml").write_text("steps = 3\n")
    (folder / "wrong.toml").write_text(f"{json.dumps('[/x]')} = 3\n")
    (folder / "task.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    return folder


HOMES = "status,health,peers,page,id,logs,logs --json,pause,pause --wait,resume,stop,finish,keys new"


@pytest.mark.parametrize(
    "arguments",
    [
        *(f"{name} --home HOME" for name in HOMES.split(",")),
        "doctor net --home HOME",
        "config show --home HOME --settings FILES/settings.toml --origin --task NAME",
        "config show --set NAME=NAME",
        "config show --set model=NAME --home FILES",
        "config show --settings FILES/settings.toml",
        "config show --settings FILES/wrong.toml",
        "config show --settings FILES/none.toml",
        "run show FILES/run.toml",
        "run show FILES/none.toml",
        "run new -o FILES/new.toml --model FILES/model --name a",
        "run new -o FILES/new.toml --task FILES/none.jsonl --model FILES/model",
        "fit --model FILES/model --vram 24 --task arithmetic",
        "fit --model NAME --vram 24",
        "eval --checkpoint FILES/none",
        "export --checkpoint FILES/model --to FILES/out",
        "join --home HOME --model FILES/model --name NAME",
        "join --home FILES/home --model FILES/model --name NAME --dry-run --task FILES/task.jsonl",
        "join --home FILES/home --peers NAME --model NAME --task NAME",
        "lab run NAME",
        "lab report FILES",
        "lab replay FILES",
        "bugreport --home HOME --out FILES/run.toml",
        "NAME",
        "join --vram NAME",
    ],
)
def test_row_45_whatever_a_name_holds_a_command_shows_it(arguments, place, files, monkeypatch, capfd):
    named = {"HOME": str(place.path), "NAME": HOSTILE}
    told = [named.get(word, word.replace("FILES", str(files))) for word in arguments.split()]
    monkeypatch.setattr(sys, "argv", ["ftis-node", *told])
    monkeypatch.setenv("COLUMNS", "4000")
    monkeypatch.chdir(files)
    try:
        main()
    except SystemExit as end:
        assert end.code in (None, 0, 1, 2), end.code
    said = "".join(capfd.readouterr())
    assert said, "it said nothing"
    assert plain(said), repr(said)


def test_row_45_the_views_show_it(tmp_path):
    status = read(STATUS, Status)
    one = node_view(status, read(PEERS, Peers), [HOSTILE], HOSTILE)
    for view in (one, nodes_view([status], HOSTILE)):
        with (tmp_path / "seen").open("w") as file:
            terminal = console()
            terminal.file = file
            terminal.width = 2000
            terminal.print(view)
        seen = (tmp_path / "seen").read_text()
        assert plain(seen), repr(seen)
        assert SHOWN in seen, repr(seen)


def test_row_45_metrics_name_no_line_of_their_own():
    lines = exposition(STATUS, PEERS).decode().split("\n")
    assert all(line.startswith(("# HELP ftis_node_", "# TYPE ftis_node_", "ftis_node_")) for line in lines if line)


def test_row_45_a_run_file_reads_back_and_moves_no_terminal():
    name = "[/x] \x1b[31m \x7f \x9b \u202e \U000e0001 é 日本"
    text = f"key = {in_toml(name)}"
    assert plain(text)
    assert tomllib.loads(text)["key"] == name
    run_file = RunFile(run=RUN, hints=make_hints(name="[/x] \u00a0é", bootstraps=()))
    assert parse_run_file(dump_run_file(run_file)) == run_file


def test_row_45_json_is_printable_ascii_and_reads_back():
    text = in_json({"name": HOSTILE})
    assert text.isascii()
    assert plain(text)
    assert json.loads(text) == {"name": HOSTILE}


@pytest.mark.parametrize("as_json", [False, True])
def test_row_45_an_event_of_the_log_is_one_printable_line(as_json):
    line = EventFormatter(as_json=as_json).format(
        logging.LogRecord("x", logging.INFO, "", 0, "Met %s", (HOSTILE,), None)
    )
    assert "\n" not in line, repr(line)
    assert plain(line), repr(line)


def test_row_45_a_line_that_is_said_stays_one_line(capsys):
    say(HOSTILE, "second")
    say(HOSTILE, error=True)
    out, err = capsys.readouterr()
    assert out.splitlines() == [escaped(HOSTILE), "second"]
    assert err == escaped(HOSTILE) + "\n"


def test_row_45_words_of_progress_read_no_markup():
    assert words("[bold]x[/]").plain == "[bold]x[/]"


ALLOWED = {  # where a print, a Text or a Console may be made: these make them safe, or print no names
    "observe/terminal.py": {"Text", "Console"},
    "observe/live.py": {"Text"},
    **{name: {"print"} for name in ("text.py", "cli/common.py", "preflight/smoke.py", "lab/warmup.py")},
    **{name: {"print"} for name in ("lab/reporting/index.py", "lab/bench/host.py")},
}


def test_row_45_nothing_is_printed_past_the_functions_that_escape():
    for path in sorted(PACKAGE.rglob("*.py")):
        allowed = ALLOWED.get(path.relative_to(PACKAGE).as_posix(), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                forbidden = {"print", "Text", "Console", "TextColumn"} - allowed
                assert node.func.id not in forbidden, f"{path}:{node.lineno}: use say, words or console"
