"""The demo as a person runs it, a few steps to the end; and a daemon that ends with its parent."""

import json
import subprocess
import sys

import msgspec
import pytest

from ftis_node.config.run import load_run_file
from ftis_node.demo import NodeSummary, result_of
from ftis_node.host.loops import PARENT
from tests.support.cli import refused
from tests.support.daemons import run_cli

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("listener", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_short_demo_ends_with_its_picture(tmp_path, listener, monkeypatch):
    output = tmp_path / "out"
    if not listener:  # small steps, which teach nothing
        monkeypatch.setenv("FTIS_BATCH_GROUPS", "6")
        monkeypatch.setenv("FTIS_EVAL_PROMPTS", "16")
    flags = ("--mixed", *["--listener"] * listener, "--steps", "5", "--json", "--output", output)
    ended = run_cli("demo", *flags, timeout=800)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    for one in summary["nodes"]:
        said = result_of(msgspec.convert(one, NodeSummary))
        assert f"in {one['steps']} steps, with {one['foreign_groups_used']} groups of" in said
    nodes = {node["name"]: node for node in summary["nodes"]}
    assert list(nodes) == ["A", "B", "C", *["D"] * listener]
    assert summary["complete"]
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


def test_two_nodes_train_a_model_of_the_owner_s_on_sums(tmp_path):
    output = tmp_path / "out"
    ended = run_cli("demo", "--model", "tiny-bpe", "--steps", "2", "--output", output, timeout=800)
    assert ended.returncode == 0, ended.stderr
    nodes = json.loads((output / "summary.json").read_text())["nodes"]
    assert [(node["name"], node["model"], node["role"]) for node in nodes] == [
        ("A", "tiny-bpe", "lora"),
        ("B", "tiny-bpe", "lora"),
    ]
    assert all(node["steps"] >= 2 for node in nodes)
    rows = [json.loads(line) for line in (output / "sums.jsonl").read_text().splitlines()]
    assert len(rows) == 600
    assert {row["question"].split()[3] for row in rows} == {"plus", "minus"}
    for row in rows:
        _, _, first, sign, second = row["question"].rstrip("?").split()
        assert int(row["answer"]) == int(first) + (1 if sign == "plus" else -1) * int(second)
    assert f"ftis-node ask --checkpoint {output / 'a'} --trained --compare" in ended.stderr
    assert "answers no more questions right" in ended.stderr
    assert "task check" in ended.stderr
    assert "Two nodes take 2 steps on sums in words." in ended.stderr
    assert "after 30 min 0 s they end" in ended.stderr
    run = load_run_file(output / "run.toml").run
    assert run.reward == "integer-boxed"
    assert f"--reward {run.reward} --template '{run.template.strip()}'" in ended.stderr
    assert "The time was over" not in ended.stderr
    for node in nodes:
        assert node["reward_before"] is not None
        assert node["reward_after"] is not None
        log = (output / node["name"].lower() / "node.log").read_text()
        assert "was saved last. The same command goes on." in log, "it ended in its own time, evaluation and all"
    assert (
        refused("demo", "--model", "tiny-bpe", "--mixed", "--output", output).fix == "Leave out --listener and --mixed."
    )
    gone = run_cli("demo", "--model", "nowhere/at-all", "--output", output)
    assert gone.returncode != 0
    assert "nowhere/at-all" in gone.stderr


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
def test_a_daemon_that_is_told_to_does_not_outlive_its_parent(early):
    """early: the parent ended before the daemon could ask the kernel for the signal."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, _CHILD, "1" if early else ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent.stdin, parent.stdout:
        assert parent.stdout.read(1) == b"."
        parent.kill()
        parent.wait()
        assert parent.stdout.read() == b"ended"  # until the last holder of the pipe has ended
