"""The demo as a person runs it: a few steps to the end, and however it is ended in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from ftis_node.demo import NodeSummary, in_words
from ftis_node.host.loops import PARENT
from tests.support.daemons import ENVIRONMENT, command, gone, run_cli

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("listener", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_short_demo_ends_with_its_picture(tmp_path: Path, listener: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    if not listener:  # small steps, which teach nothing
        monkeypatch.setenv("FTIS_BATCH_GROUPS", "6")
        monkeypatch.setenv("FTIS_EVAL_PROMPTS", "32")
    flags = ("--mixed", *["--listener"] * listener, "--steps", "5", "--json", "--output", str(output))
    ended = run_cli("demo", *flags, timeout=800)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    for one in summary["nodes"]:
        said = in_words(msgspec.convert(one, NodeSummary))
        assert f"others' answers to {one['rows_learned']} of them, and has solved {one['rows_now']} of those" in said
    nodes = {node["name"]: node for node in summary["nodes"]}
    assert list(nodes) == ["A", "B", "C", *["D"] * listener] and summary["complete"]
    for node in nodes.values():
        assert node["steps"] >= 5
        assert not listener or 0.2 < node["pass_at_1_before"] < node["pass_at_1_after"]
        assert len(node["foreign_groups_by_author"]) == (3 if node["name"] == "D" else 2)
        assert node["foreign_tokenizers"] == 2 or node["name"] == "D"
        assert node["foreign_weight_share"] >= 0.05
        assert node["bytes_in"] > 0
    assert len({node["tokenizer"] for node in nodes.values()}) == 3
    if listener:
        assert nodes["D"]["own_groups_used"] == 0
        assert nodes["D"]["foreign_weight_share"] == 1.0
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((output / "summary.json").read_text()) == summary


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_the_demo_ends_it_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        command("demo", "--output", str(tmp_path / "out")),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
    )
    try:
        me = psutil.Process(process.pid)
        deadline = time.monotonic() + 600
        while not (tmp_path / "out" / "c" / "metrics.jsonl").exists():
            assert time.monotonic() < deadline and process.poll() is None, "the nodes do not come up"
            time.sleep(0.1)
        family = me.children(recursive=True)
        assert sum(child.name() == "p2pd" for child in family) == 3
        process.send_signal(number)
        assert process.wait(300) == (-number if number == signal.SIGKILL else 130)
        gone(family)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


_CHILD = """
import asyncio, sys
from ftis_node.host.loops import listen

async def main():
    ended = asyncio.Event()
    listen(lambda code: ended.set())
    sys.stdout.write(".")
    sys.stdout.flush()
    await ended.wait()
    sys.stdout.write("ended")

asyncio.run(main())
"""
_PARENT = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={{**os.environ, "{PARENT}": sys.argv[2] or str(os.getpid())}})
input()
"""


@pytest.mark.parametrize("early", [False, True])
def test_a_daemon_that_is_told_to_does_not_outlive_its_parent(early: bool) -> None:
    """early: the parent ended before the daemon could ask the kernel for the signal."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, _CHILD, "1" if early else ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None and parent.stdin is not None
    with parent.stdin, parent.stdout:
        assert parent.stdout.read(1) == b"."
        parent.kill()
        parent.wait()
        assert parent.stdout.read() == b"ended"  # until the last holder of the pipe has ended
