"""Every page is whole after any number of steps, at a desk and on a phone, light and dark.

Histories are prepared; `make week` looks at real nodes.
"""

import asyncio
import time
from collections.abc import Iterator

import msgspec
import pytest

from ftis_node.observe.api import link
from ftis_node.observe.history import History
from ftis_node.observe.web import Route, Web
from tests.support.browser import Browser, missing
from tests.support.looking import NIGHT, SIZES, STEPS, faults, minutes, write_steps
from tests.support.statuses import JOINING, NOBODY, TRAINING, peer
from tests.support.watched import WatchedSimulation, watched_eight

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

TOKEN = "t" * 43
CROWD = 45
PEERS = [
    peer(
        f"12D3KooW{number:044d}",
        record=20,
        mean_reward=0.5,
        delivered=3,
        used=number,
    )
    for number in range(12)
]
NAMES = {
    PEERS[0]["id"]: "Nadia of the hills",
    PEERS[1]["id"]: "12D3KooW",
    PEERS[2]["id"]: "W" * 30,
}
STRANGERS = [{"id": f"12D3KooA{number:044d}", "reason": "it sent what it had not made"} for number in range(200)]
SAMPLE = {
    "text": "<think>3+4</think><answer>7</answer>",
    "reward": 1.0,
    "tokens": 9,
    "finished": True,
}
GROUP = {
    "step": 3,
    "author": None,
    "question": "3+4",
    "answer": "7",
    "completions": 4 * [SAMPLE],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(1280, 900) as opened:
        yield opened


@pytest.fixture(scope="module")
def swarm() -> WatchedSimulation:
    """Eight nodes, of which two say nothing of themselves."""
    return watched_eight()


def crowd(swarm, steps):
    """The swarm after so many minutes; after the most of them with so many nodes that the picture leaves some out."""
    now = time.time()
    seen = list(swarm.facts.nodes)
    if steps > STEPS[3]:
        many = (seen[number % len(seen)] for number in range(CROWD))
        seen = [msgspec.structs.replace(one, id=one.id[:-2] + f"{number:02}") for number, one in enumerate(many)]
    seen.append(
        msgspec.structs.replace(
            seen[0],
            id=PEERS[0]["id"],
            present=False,
            groups=0,
            claims=None,
        )
    )
    history = minutes(steps, now - (NIGHT if steps == STEPS[1] else 0.0)).rows
    if steps == STEPS[2]:  # in this one the clock was set back by an hour
        history = [*history[:50], *([(row[0] or 0.0) - 3600.0, *row[1:]] for row in history[50:])]
    facts = msgspec.structs.replace(swarm.facts, nodes=seen, history=history)
    return msgspec.to_builtins(facts) | {"at": now, "since": now - 60.0 * steps}


def answers(tmp_path, steps, alone):
    """What the node answers after so many steps."""
    if steps:
        write_steps(tmp_path / "metrics.jsonl", steps, alone=alone)
    if steps == STEPS[3]:  # of this one the oldest part is gone
        log = tmp_path / "metrics.jsonl"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[400:]))
    curves = History(tmp_path / "metrics.jsonl")
    curves.follow()
    groups = [GROUP, *([] if alone else [GROUP | {"author": PEERS[0]["id"]}])] if steps else []
    told = (TRAINING if steps else JOINING) | {"step": steps, "step_seconds": 6.0, "uptime": 900.0}
    if alone:
        told |= {
            "state": "ALONE",
            "foreign_groups_used": {},
            "bytes_in": steps // 3,
            "bytes_out": steps // 6,
        }
    return {
        "status": told,
        "peers": NOBODY if alone else {"peers": PEERS, "left_out": STRANGERS, "names": NAMES},
        "history": curves.facts(),
        "completions": {"step": steps, "groups": groups},
    }


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [
        (STEPS[0], SIZES[::3]),
        (30_000, SIZES[1:3]),  # each width and each scheme twice; all of them after each number among the slow tests
        *(pytest.param(steps, SIZES, marks=pytest.mark.slow) for steps in STEPS),
    ],
)
async def test_every_page_is_whole_after(tmp_path, browser, swarm, steps, sizes):
    alone = steps == STEPS[1]
    told = {f"/api/{name}": facts for name, facts in answers(tmp_path, steps, alone).items()}
    told["/swarm.json"] = crowd(swarm, steps)

    def route(path):
        async def answer():
            return told[path]

        return Route(path, answer)

    server = Web(TOKEN, [route(path) for path in told])
    await server.start("127.0.0.1", 0)
    try:
        urls = {name: link(server.address + path, TOKEN) for name, path in (("page", ""), ("watch", "watch.html"))}
        found = []
        for name, url in urls.items():
            found += await asyncio.to_thread(faults, browser, url, name, sizes=sizes)
        assert not found, "\n".join(found)
    finally:
        await server.close()
