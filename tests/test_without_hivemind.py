"""The compute side, stepping, lab and benchmarks run where hivemind is not installed: on a GPU machine that is lent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemons import ENVIRONMENT

ROOT = Path(__file__).parents[1]
NEED_IT = """
swarm.wire. swarm.duplicate node.assembly node.daemon node.training node.status node.observer preflight.net lab.bench.
"""
IMPORTS = """
import importlib, json, pkgutil, ftis_node
from ftis_node.host.loading import loading
missing = []
with loading():
    for module in pkgutil.walk_packages(ftis_node.__path__, "ftis_node."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing.append(f"{module.name} {error.name}")
print(json.dumps(missing))
"""
LAB = """
name = "two"
title = "Two nodes"
about = "Two nodes take two steps and learn from one another."
seeds = [0]
steps = 2
settings = { device = "cpu", batch_groups = 4, eval_prompts = 8 }
nodes = [{ name = "A", model = "tiny-a" }, { name = "B", model = "tiny-b" }]
cells = [{ name = "both", pace = "free" }]
"""


def run(place, *command):
    """Run Python where hivemind cannot be imported, in this process and its children; return stdout.

    Its owner wants progress bars, and is not warned that this is decided.
    """
    (place / "hivemind.py").write_text('raise ModuleNotFoundError("no hivemind here", name="hivemind")')
    told = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "HF_HUB_DISABLE_PROGRESS_BARS": "0"}
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=place,
        env=told,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    assert "progress bars" not in ended.stderr
    return ended.stdout


def test_only_what_dials_peers_needs_hivemind(tmp_path):
    missing = json.loads(run(tmp_path, "-c", IMPORTS))
    assert {one.split()[1] for one in missing} == {"hivemind"}
    assert all(one.startswith(tuple(f"ftis_node.{part}" for part in NEED_IT.split())) for one in missing), missing


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_two_nodes_train_in_the_lab_without_it(tmp_path):
    (tmp_path / "two.toml").write_text(LAB)
    run(tmp_path, "-m", "ftis_node", "lab", "run", "two.toml", "--out", "out", "--jobs", "1")
    (events,) = (tmp_path / "out" / "trials").glob("*/events.jsonl")
    steps = [one for one in map(json.loads, events.read_text().splitlines()) if one["event"] == "step"]
    assert {(one["node"], one["step"]) for one in steps} == {(node, step) for node in "AB" for step in (1, 2)}
