"""Data of one's own: a part of each batch, told of in counts only, and kept from packets, logs, pages and reports."""

import json
import sqlite3
import tarfile
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from ftis_node.cli import app
from ftis_node.observe.metrics import read_events
from ftis_node.packet import decode
from ftis_node.policy.load import load_tokenizer
from ftis_node.worker.messages import OWN_DATA
from ftis_node.worker.own_data import rows_of_step
from tests.support.cli import printed, refused
from tests.support.small_models import batch_of, opened_engine
from tests.support.steppers import stepper

SECRET = "7*8-9="
"""In every question; the run's have no such text, for their operands are one of + and - and *."""


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "mine.jsonl"
    lines = [json.dumps({"prompt": f"{SECRET}{n}+", "answer": 40 + n % 9}) for n in range(60)]
    path.write_text("\n".join(lines) + "\n")
    return path


def opened(rows, **changes):
    return opened_engine(load={"own_data": str(rows) if rows else None}, run=changes, generation_batch=32)


# --- the compute process ----------------------------------------------------------------------------------------------


def test_a_step_trains_on_groups_of_own_rows_and_tells_how_many(rows, monkeypatch):
    engine = opened(rows, prompt_tokens=32)
    made = engine.generate([0, 1, 2])
    taken = []
    step = engine.learner.step
    monkeypatch.setattr(engine.learner, "step", lambda groups: (taken.extend(groups), step(groups))[1])
    report = engine.step(batch_of([0, 1, 2], made.groups, uneven=True), own_data=2)
    assert report.own_data_groups == 2 and 0 <= report.own_data_reward <= 1
    plain = opened(None, prompt_tokens=32).step(batch_of([0, 1, 2], made.groups, uneven=True), own_data=2)
    assert (plain.own_data_groups, plain.own_data_reward) == (0, None), "without rows there are none"
    prompts = [engine.policy.tokenizer.decode(group.prompt_ids) for group in taken]
    assert [prompt.replace(" ", "").startswith(SECRET) for prompt in prompts] == [False] * 3 + [True] * 2
    found = engine.evaluate(OWN_DATA)
    assert 0 < found.prompts < 20 and engine.evaluate().prompts == 40
    assert SECRET not in json.dumps(msgspec.to_builtins(report)) + repr(found), "it tells numbers"


def test_the_rows_of_a_step_follow_from_its_number_and_come_in_turn():
    first = rows_of_step(12, 10, 4, 1)
    again = rows_of_step(12, 10, 4, 1)
    other = rows_of_step(12, 10, 5, 1)
    assert first == again != other and len(set(first)) == 10
    assert sorted(rows_of_step(12, 36, 1, 1)) == sorted([*range(12)] * 3)


# --- the node ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "share", "own"), [(24, 0.25, 6), (24, 0.01, 1), (2, 0.9, 1), (10, 0.9, 9)])
def test_a_batch_has_their_part_and_another_group_at_least(tmp_path, batch, share, own):
    for has, part in ((True, own), (False, 0)):
        node = stepper(tmp_path, own_data=has, batch_groups=batch, own_data_share=share)
        assert (node.means.own_data_groups, node.means.batch_groups) == (part, batch - part)


def files(home):
    for path in home.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()


def inside(report):
    """The files of a bug report, unpacked."""
    with tarfile.open(report) as tar:
        for member in tar.getmembers():
            if (file := tar.extractfile(member)) is not None:
                yield member.name, file.read()


def page(daemon, route):
    """What the page is told."""
    token = daemon.home.page_token.read_text().strip()
    request = urllib.request.Request(f"{daemon.status()['page']}{route}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


def test_no_byte_of_them_gets_out_of_the_compute_process(rows, tmp_path, join):
    flags = ("--set", "batch_groups=8", "--set", "eval_prompts=20", "--set", "log_level=debug")
    first = join("first", "--model", "tiny-a", "--task", "arithmetic", "--own-data", str(rows), *flags)
    second = join("second", "--model", "tiny-b", "--task", "arithmetic", "--peers", first.address(), *flags)
    for daemon in (first, second):
        daemon.wait(lambda s: s.get("step", 0) >= 6 and s["foreign_groups_used"], "it learned from the other")
    report = tmp_path / "report.tar.gz"
    printed("bugreport", "--home", first.home.path, "--out", report)
    told = json.dumps([first.status(), second.status()]).encode()
    routes = ("api/status", "api/peers", "api/history", "api/completions", "swarm.json")
    pages = [(route, page(first, route)) for route in routes]
    assert first.stop() == 0 and second.stop() == 0
    assert "made of its owner's own data" in refused("lab", "replay", first.home.path).what

    steps = read_events(first.home.metrics, "step")
    assert all(step["own_data_groups"] == 2 and step["own_groups"] + step["foreign_groups"] <= 6 for step in steps)
    assert all(step["own_data_groups"] == 0 for step in read_events(second.home.metrics, "step"))
    evaluations = list(read_events(first.home.metrics, "evaluation"))
    assert all(one["own_data"]["prompts"] > 0 for one in evaluations) and len(evaluations) > 1
    assert "own_data" not in next(iter(read_events(second.home.metrics, "evaluation")))
    log = (first.home.path / "node.log").read_text()
    assert "rows of your own are trained on" in log and "on your own data" in log

    ids = np.array(load_tokenizer("tiny-a")(SECRET, add_special_tokens=False)["input_ids"], np.uint32)
    forms = [SECRET.encode(), SECRET.encode("unicode_escape"), ids.astype("<u4").tobytes(), b"mine.jsonl"]
    everywhere = [*files(first.home.path), *files(second.home.path), *inside(report), *pages, ("status", told)]
    assert len(everywhere) > 20
    for name, body in everywhere:
        for form in forms[: 3 if name.endswith("node.log") else 4]:
            assert form not in body, (name, form)
    for home in (first.home, second.home):
        for body in bodies(home.store):
            for completion in decode(body).completions():
                assert ids.tobytes() not in completion.token_ids.astype(np.uint32).tobytes()


def bodies(store):
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as base:
        tables = [name for (name,) in base.execute("select name from sqlite_master where type='table'")]
        found = []
        for table in {*tables} & {"packets"}:
            for row in base.execute(f"select * from {table}"):
                found += [value for value in row if isinstance(value, bytes) and len(value) > 100]
    assert found
    return found


def test_a_dry_run_says_what_stays_here(rows, tmp_path):
    line = ["join", "--dry-run", "--home", str(tmp_path / "home"), "--device", "cpu", "--own-data", str(rows)]
    shown = CliRunner().invoke(app, line)
    assert shown.exit_code == 0 and "no byte of it leaves this machine" in shown.output, shown.output
    told = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    held_out = told["own_data"]["held_out"]
    assert told["own_data"] == {"file": str(rows), "rows": 60 - held_out, "held_out": held_out}
