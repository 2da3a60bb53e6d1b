"""Trackers get the listed figures and nothing else, and a tracker that fails costs the node nothing."""

import os
import sqlite3
import sys
from pathlib import Path

import pytest

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError
from ftis_node.observe import tracking
from ftis_node.observe.metrics import MetricsLog, read_events
from ftis_node.observe.tracking import EVALUATION, STEP, Tracked, Tracker, figures, refuse_untracked
from tests.support.documented import PAGE
from tests.support.packages import installed

FACTS = {
    "step": 7,
    "loss": 0.5,
    "gradient_norm": 1.25,
    "own_reward": None,
    "seconds": {"total": 2},
    "diagnostics": {"overall": {"entropy": 0.75, "clipped": float("nan")}, "sources": {"12D3KooW": 1}},
    "skipped": "why",
    "diverged": False,
    "settings": {"model": "/home/me/secret"},
}


def test_figures_have_trls_names_and_only_numbers_count():
    assert figures("step", FACTS) == {"loss": 0.5, "grad_norm": 1.25, "step_time": 2.0, "entropy": 0.75}
    assert figures("evaluation", {"step": 7, "pass_at_1": 0.25, "own_data": {}}) == {"eval/pass_at_1": 0.25}
    assert figures("started", FACTS) == {}


def test_every_figure_is_documented():
    text = PAGE.read_text(encoding="utf-8")
    assert not [name for name in (*STEP, *EVALUATION) if f"`{name}`" not in text]


def child(path, body, monkeypatch):
    script = path / "child.py"
    script.write_text(body)
    monkeypatch.setattr(tracking, "_CHILD", script)


@pytest.mark.parametrize(
    ("kind", "switch", "more"),
    [
        ("tensorboard", {}, set()),
        ("wandb", {"WANDB_MODE": "offline"}, set()),
        ("wandb", {"WANDB_MODE": "online"}, {"HTTPS_PROXY"}),
        ("trackio", {}, set()),
        ("trackio", {"TRACKIO_SPACE_ID": "ann/curves"}, {"HTTPS_PROXY", "HF_TOKEN"}),
    ],
)
def test_row_65_a_tracker_gets_numbers_and_its_own_variables_only(kind, switch, more, tmp_path, monkeypatch):
    child(tmp_path, "import os, sys; print(sys.argv[1:], *os.environ, sys.stdin.read())", monkeypatch)
    secrets = {"AWS_SECRET", "WANDB_API_KEY", "TRACKIO_KEY", "HF_TOKEN", "HTTPS_PROXY", "http_proxy", "FTIS_X"}
    for name in secrets:
        monkeypatch.setenv(name, "s3cr3t")
    for name, value in switch.items():
        monkeypatch.setenv(name, value)
    tracker = Tracker(kind, tmp_path / "track", "mine")
    log = MetricsLog(tmp_path / "metrics.jsonl", tracker=tracker)
    log.write("started", **FACTS)
    log.write("step", **FACTS)
    log.close()
    said = (tmp_path / "track" / "output.log").read_text()
    own = {"wandb": {"WANDB_API_KEY"}, "trackio": {"TRACKIO_KEY"}}.get(kind, set())
    assert set(said.split()) & (secrets | switch.keys()) == own | more | switch.keys()
    assert f"['{kind}', 'mine']" in said
    assert "/home/me/secret" not in said
    assert said.count('"step": 7') == 1
    assert len(read_events(tmp_path / "metrics.jsonl", "started", "step")) == 2


@pytest.mark.parametrize("body", ["raise SystemExit(3)", "import time; time.sleep(600)"])
def test_a_tracker_that_dies_or_hangs_holds_nothing_up(body, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "CLOSING_SECONDS", 0.5)
    child(tmp_path, body, monkeypatch)
    tracker = Tracker("trackio", tmp_path / "track", "mine")
    if "Exit" in body:
        tracker._process.wait()
    for _ in range(2000):  # more than a pipe holds
        tracker.take("step", FACTS)
    tracker.close()
    assert caplog.text.count("takes no figures") == 1
    assert tracker._process.returncode is not None


def test_a_library_that_is_missing_is_named_before_anything_starts():
    with pytest.raises(UsageError, match="trackio is not installed"):
        refuse_untracked("trackio")
    refuse_untracked("none")
    assert Settings().track == "none"


@pytest.fixture(scope="module", params=["tensorboard", "wandb", "trackio"])
def library(request, tmp_path_factory) -> tuple[Tracked, Path]:
    return request.param, installed(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
def test_the_real_trackers_keep_the_figures_and_tell_nothing_else(library, tmp_path, monkeypatch):
    kind, folder = library
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("FTIS_TEST_SECRET", "s3cr3t")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for turn in range(2):  # a node that is started again
        tracker = Tracker(kind, tmp_path / "track", "mine-0123abcd")
        for step in range(3 * turn, 3 * turn + 3):
            tracker.take("step", FACTS | {"step": step})
        tracker.close()
        assert tracker._process.returncode == 0, (tmp_path / "track" / "output.log").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "output.log"]
    content = b"".join(path.read_bytes() for path in files)
    for private in (b"s3cr3t", b"FTIS_TEST", sys.executable.encode()):
        assert private not in content
    names = [path.name for path in files]
    if kind == "trackio":
        with sqlite3.connect(tmp_path / "track" / "ftis-node.db") as database:
            steps = database.execute("select step from metrics order by step").fetchall()
        assert steps == [(step,) for step in range(6)]
        return
    assert b"grad_norm" in content
    ending = {"wandb": ".wandb", "tensorboard": "tfevents"}[kind]
    assert sum(ending in name for name in names) == 2
    assert not {"requirements.txt", "wandb-metadata.json"} & set(names)
