"""The light checks of `join`: it prints all their errors before anything heavy is imported."""

import json
import subprocess
import sys

import pytest
from hivemind.utils.multiaddr import Multiaddr
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.config.settings import collect
from ftis_node.errors import Several, UsageError, raise_all
from ftis_node.node.options import JoinOptions
from ftis_node.preflight import checks
from ftis_node.preflight.case import Case
from ftis_node.preflight.checks import refused
from ftis_node.store.home import Home
from ftis_node.swarm.addresses import is_multiaddr, listening_mistakes
from ftis_node.tasks import load_task, source_of
from tests.support.swarm import identity

HEAVY = ("torch", "transformers", "hivemind.p2p")
ENDING = f"""
import sys
from ftis_node.cli import main
try:
    main()
finally:
    print(*(name for name in {HEAVY} if name in sys.modules))
"""
PEER = identity(1).peer_id
RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def checked(tmp_path, flags=None, **options):
    given = {"host": "127.0.0.1", "device": "cpu"} | (flags or {})
    layers = lambda task: collect(task=task, flags=given, environment={})  # noqa: E731
    case = Case(JoinOptions(Home(tmp_path / "home"), **options), layers, starting=True)
    refused(case, "join")
    return case


def rows(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def good(count):
    return [json.dumps({"prompt": f"{n}+0", "answer": n}) for n in range(count)]


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_cheap_mistakes_are_told_at_once_and_nothing_heavy_is_imported(dry, tmp_path):
    wrong = (
        "--peers",
        "foo",
        "--task",
        str(rows(tmp_path / "bad.jsonl", "x", "[]")),
        "--set",
        "lerning_rate=1",
        "--run",
        str(tmp_path / "none.toml"),
        "--own-share",
        "3",
        "--home",
        str(tmp_path / "home"),
    )
    ended = subprocess.run([sys.executable, "-c", ENDING, "join", *dry, *wrong], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stdout.split() == []
    told = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == len(set(told)) == 5
    for what in ("'foo' is not a multiaddr", "2 unusable lines", "lerning_rate", "none.toml cannot", "own_share"):
        assert sum(what in line for line in told) == 1, what
    assert not (tmp_path / "home").exists()


def test_what_is_sound_is_no_problem(tmp_path):
    found = checked(tmp_path, task=str(rows(tmp_path / "mine.jsonl", *good(20))))
    assert found.problems == ()
    assert found.task is not None
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.jsonl"]
    assert found.settings.host == "127.0.0.1"


def test_a_name_that_makes_no_run_is_told_to_who_begins_one(tmp_path):
    mine = str(rows(tmp_path / "my rows.jsonl", *good(20)))
    (told,) = checked(tmp_path, task=mine).problems
    assert "make no run: task" in told.what
    assert "Rename the file" in told.fix
    assert not checked(tmp_path, task=mine, peers=(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}",)).problems


def test_ten_lines_that_cannot_be_used_are_told_and_how_many_more(tmp_path):
    lines = good(30)
    for number in range(2, 26, 2):
        lines[number - 1] = '{"prompt": "?"}'
    lines[28] = json.dumps({"question": "?", "answer": 1})
    with pytest.raises(UsageError) as refused:
        load_task(str(rows(tmp_path / "rows.jsonl", *lines)))
    what = refused.value.what.splitlines()
    assert what[0].endswith("rows.jsonl has 13 unusable lines:")
    assert what[1:] == [*(f"line {number} has no `answer`," for number in range(2, 22, 2)), "and 3 more."]


def test_a_large_file_is_left_to_who_uses_it(tmp_path, monkeypatch):
    bad = rows(tmp_path / "bad.jsonl", "x")
    assert [one.what for one in checked(tmp_path, task=str(bad)).problems] != []
    monkeypatch.setattr(checks, "LARGE_BYTES", 1)
    assert checked(tmp_path, task=str(bad)).problems == ()


def test_code_is_looked_for_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = {
        "theirs": "task = print",
        "package/__init__": "",
        "package/part": "def task(): ...",
    }
    (tmp_path / "package").mkdir()
    for name, text in code.items():
        (tmp_path / f"{name}.py").write_text(f"{text}\nraise SystemExit('it ran')\n")
    for name in ("theirs:task", "package.part:task", "package.other:task"):
        assert checked(tmp_path, task=name).problems == (), name
    (problem,) = checked(tmp_path, task="nobodys.part:task").problems
    assert "no Python module nobodys.part" in problem.what
    for name, near in (
        ("thiers:task", "theirs"),
        ("resoning-gym:leg_counting", "reasoning-gym"),
    ):
        (problem,) = checked(tmp_path, task=name).problems
        assert f"Did you mean {near!r}?" in problem.fix
    (tmp_path / "notes.txt").touch()
    (problem,) = checked(tmp_path, task="notes.txt").problems
    assert "ends in neither .jsonl nor .csv" in problem.what


def test_nothing_is_downloaded_to_look_at_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bad = rows(tmp_path / "bad.jsonl", "x")
    assert source_of("gsm8k").check() is None
    with pytest.raises(UsageError, match="line 1, is not JSON"):
        source_of("gsm8k", eval_data=bad).check()
    assert not (tmp_path / "cache").exists()


def test_the_same_mistake_is_one():
    one = UsageError("It is wrong.", "Mend it.")
    other = UsageError("That is wrong.", "Mend that.")
    raise_all(())
    with pytest.raises(UsageError) as alone:
        raise_all([one, UsageError("It is wrong.", "Mend it.")])
    assert alone.value is one
    with pytest.raises(Several) as both:
        raise_all([one, Several([other, one])])
    assert both.value.errors == (one, other)
    assert both.value.exit_code == 2


# --- addresses --------------------------------------------------------------------------------------------------------

_parts = st.one_of(
    st.sampled_from(
        ["ip4", "ip6", "dns4", "dnsaddr", "tcp", "udp", "quic-v1", "ws", "wss", "tls", "p2p", "p2p-circuit"]
    ),
    st.sampled_from(
        ["127.0.0.1", "::1", "fe80::1%eth0", "a.example", "-a", "4001", "65536", "+1", "0x1", "", PEER, RSA]
    ),
    st.text(max_size=6),
)


@given(st.lists(_parts, max_size=8).map(lambda parts: "".join(f"/{part}" for part in parts)))
def test_what_is_an_address_here_is_one_to_hivemind(text):
    if is_multiaddr(text):
        assert str(Multiaddr(text))


@pytest.mark.parametrize(
    "text", ["/dns4/node.example.org/tcp/443/wss", "/ip4/1.2.3.4/udp/1/quic-v1", "/ip6/::1/tcp/1/ws", f"/p2p/{PEER}"]
)
def test_addresses_that_hivemind_reads_are_addresses(text):
    assert Multiaddr(text)
    assert is_multiaddr(text)


def test_every_address_in_the_settings_that_is_wrong_is_told():
    flags = {"announce": ["x", "/ip4/1.2.3.4/tcp/1"], "relays": ["y"]}
    found = [one.what for one in listening_mistakes(collect(task="", flags=flags, environment={})[0])]
    assert len(found) == 3
    assert "'y'" in found[0]
    assert "'x'" in found[1]
    assert "takes any" in found[2]
