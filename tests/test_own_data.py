"""Data of one's own: a part of each batch, told of in counts only, and kept from packets, logs, pages and reports."""

import json
import sqlite3
import tarfile
import urllib.request

import msgspec
import numpy as np
import pytest

from ftis_node.observe.metrics import read_events
from ftis_node.packet import decode
from ftis_node.policy.load import load_tokenizer
from ftis_node.worker.messages import OWN_DATA
from ftis_node.worker.own_data import rows_of_step
from tests.support.cli import answer, printed, refused
from tests.support.daemons import own_rows
from tests.support.small_models import batch_of, opened_engine
from tests.support.steppers import stepper

SECRET = "7*8-9="
"""In every question; the run's have no such text, for their operands are one of + and - and *."""


@pytest.fixture
def rows(tmp_path) -> str:
    return own_rows(tmp_path)


def opened(rows):
    return opened_engine(load={"own_data": rows}, run={"prompt_tokens": 32}, generation_batch=32)


# --- the compute process ----------------------------------------------------------------------------------------------


def test_a_step_trains_on_groups_of_own_rows_and_tells_how_many(rows, monkeypatch):
    engine = opened(rows)
    batch = batch_of([0, 1, 2], engine.generate([0, 1, 2]).groups, uneven=True)
    taken = []
    step = engine.learner.step

    def watched(groups):
        taken.extend(groups)
        return step(groups)

    monkeypatch.setattr(engine.learner, "step", watched)
    report = engine.step(batch, own_data=2)
    assert report.own_data_groups == 2
    assert 0 <= report.own_data_reward <= 1
    plain = opened(None).step(batch, own_data=2)
    assert (plain.own_data_groups, plain.own_data_reward) == (0, None), "without rows there are none"
    prompts = [engine.policy.tokenizer.decode(group.prompt_ids) for group in taken]
    secret = [prompt.replace(" ", "").startswith(SECRET) for prompt in prompts]
    assert secret == [False] * 3 + [True] * 2
    found = engine.evaluate(OWN_DATA)
    assert 0 < found.prompts < 20
    assert engine.evaluate().prompts == 40
    assert SECRET not in json.dumps(msgspec.to_builtins(report)) + repr(found), "it tells numbers"


def test_the_rows_of_a_step_follow_from_its_number_and_come_in_turn():
    first = rows_of_step(12, 10, 4, 1)
    again = rows_of_step(12, 10, 4, 1)
    other = rows_of_step(12, 10, 5, 1)
    assert first == again != other
    assert len(set(first)) == 10
    assert sorted(rows_of_step(12, 36, 1, 1)) == sorted([*range(12)] * 3)


# --- the node ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "share", "own"),
    [
        (24, 0.25, 6),
        (24, 0.01, 1),
        (2, 0.9, 1),
        (10, 0.9, 9),
    ],
)
def test_a_batch_has_their_part_and_another_group_at_least(tmp_path, batch, share, own):
    for has, part in ((True, own), (False, 0)):
        node = stepper(tmp_path, own_data=has, batch_groups=batch, own_data_share=share)
        assert node.means.own_data_groups == part
        assert node.means.batch_groups == batch - part


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
    address = f"{daemon.status()['page']}{route}"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


def test_no_byte_of_them_gets_out_of_the_compute_process(rows, tmp_path, join):
    flags = ("--set", "batch_groups=8", "--set", "eval_prompts=20", "--set", "log_level=debug")
    first = join("first", "--model", "tiny-a", "--task", "arithmetic", "--own-data", rows, *flags)
    second = join("second", "--model", "tiny-b", "--task", "arithmetic", "--peers", first.address(), *flags)
    for daemon in (first, second):
        daemon.wait(lambda s: s.get("step", 0) >= 4 and s["foreign_groups_used"], "it learned from the other")
    report = tmp_path / "report.tar.gz"
    printed("bugreport", "--home", first.home.path, "--out", report)
    told = json.dumps([first.status(), second.status()]).encode()
    routes = ("api/status", "api/peers", "api/history", "api/completions", "swarm.json")
    pages = [(route, page(first, route)) for route in routes]
    assert first.stop() == 0
    assert second.stop() == 0
    assert "made of its owner's own data" in refused("lab", "replay", first.home.path).what

    for step in read_events(first.home.metrics, "step"):
        assert step["own_data_groups"] == 2
        assert step["own_groups"] + step["foreign_groups"] <= 6
    for step in read_events(second.home.metrics, "step"):
        assert step["own_data_groups"] == 0
    evaluations = read_events(first.home.metrics, "evaluation")
    assert len(evaluations) > 1
    for evaluation in evaluations:
        assert evaluation["own_data"]["prompts"] > 0
    assert "own_data" not in read_events(second.home.metrics, "evaluation")[0]
    log = first.home.log.read_text()
    assert "rows of your own are trained on" in log
    assert "on your own data" in log

    ids = np.array(load_tokenizer("tiny-a")(SECRET, add_special_tokens=False)["input_ids"], np.uint32)
    as_bytes = ids.astype("<u4").tobytes()
    everywhere = [*files(first.home.path), *files(second.home.path), *inside(report), *pages, ("status", told)]
    assert len(everywhere) > 20
    for name, body in everywhere:
        assert SECRET.encode() not in body, name
        assert as_bytes not in body, name
        if not name.endswith("node.log"):
            assert b"mine.jsonl" not in body, name
    for home in (first.home, second.home):
        for body in bodies(home.store):
            for completion in decode(body).completions():
                assert as_bytes not in completion.token_ids.astype("<u4").tobytes()


def bodies(store):
    """The packets that a node has stored."""
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as base:
        found = [body for (body,) in base.execute("select body from packets")]
    assert found
    return found


def test_a_dry_run_says_what_stays_here(rows, tmp_path):
    line = ("join", "--dry-run", "--home", tmp_path / "home", "--device", "cpu", "--own-data", rows)
    assert "no byte of it leaves this machine" in printed(*line)
    told = answer(*line)["own_data"]
    held_out = told["held_out"]
    assert held_out > 0
    assert told == {"file": rows, "rows": 40 - held_out, "held_out": held_out}
