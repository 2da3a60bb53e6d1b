"""Environments of verifiers, with the package itself, installed beside the others: in the jail, and in daemons."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ftis_node.errors import UsageError
from ftis_node.tasks import Replay, load_task, scoring, source_of
from ftis_node.tasks.jail import can_lock_in
from tests.support.daemons import run_cli
from tests.support.learning import learn, pair
from tests.support.packages import installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_lock_in(), reason="nothing can lock scorers in here (landlock, seccomp, x86-64)"),
]
VERSION = "0.4.0"

BEGIN = """
import os
import verifiers.v1 as vf

class Data(vf.TaskData):
    gold: str = ""
"""
END = """
class Many(vf.Taskset[One]):
    def load(self):
        for n in range(100):
            gold = "3" if n % 10 < 7 else str(n % 10)
            data = Data(prompt=f"Say a digit, the best for {n}.", system_prompt="Be brief.", gold=gold)
            yield One(data, self.config.task)

__all__ = ["Many", *(name for name in ("Opening",) if name in globals())]
"""
DIGITS = """
class One(vf.Task[Data]):
    @vf.reward(weight=0.8)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply.endswith(f"<answer>{task.gold}</answer>"))

    @vf.reward(weight=0.2)
    def tagged(self, trace) -> float:
        return float("<answer>" in trace.last_reply)
"""
TRUSTING = """
class One(vf.Task[Data]):
    @vf.reward
    def evaluated(self, task, trace) -> float:
        return float(str(eval(trace.last_reply)) == task.gold)
"""
WAITING = """
import asyncio
class One(vf.Task[Data]):
    @vf.reward
    async def later(self, trace) -> float:
        await asyncio.sleep(1)
        return 1.0
"""
BOXED = """
class One(vf.Task[Data]):
    @vf.reward
    async def boxed(self, trace, runtime) -> float:
        return 1.0
"""
UNREWARDED = "class One(vf.Task[Data]):\n    pass\n"
REWARDED = """
class One(vf.Task[Data]):
    @vf.reward
    def r(self) -> float:
        return 1.0
"""
CONTAINED = f"{REWARDED}    NEEDS_CONTAINER = True\n"
TOOLED = f"""{REWARDED}
    @classmethod
    def toolsets(cls, config):
        return [object()]
"""
PREPARED = f"""{REWARDED}
    async def setup(self, trace, runtime):
        await runtime.write("x", b"")
"""
# The example of docs/tasks.md, of two answers: a number, and another that may heed what is said to the first.
GUESSES = (Path(__file__).parent.parent / "docs" / "tasks.md").read_text().split("```python\n")[1].split("```")[0]
# The environment opens, takes part in the reward after the episode, and has no reward of a task.
OPENING = """
class One(vf.Task[Data]):
    pass

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Opening(vf.Env[Config]):
    async def run(self, task, agents):
        bare = type(task)(task.data.model_copy(update={"prompt": None}), task.config)
        async with agents.player.interaction(bare) as exchange:
            segment = await exchange.turn([{"role": "user", "content": f"{task.data.prompt} Say {task.data.gold}."}])
            while not segment.terminated:
                segment = await exchange.turn("Again: " + segment.last_reply)
        exchange.trace.record_reward("turns", exchange.trace.num_turns / 4)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("said", float(trace.last_reply == task.data.gold))
"""
RANDOM = GUESSES.replace('"Higher."', "__import__('uuid').uuid4().hex")
SLEEPING = "import asyncio\n" + GUESSES.replace(
    "            while", "            await asyncio.sleep(0.1)\n            while"
)
CROWD = GUESSES.replace("(max_turns=2)", "()\n    judge: vf.AgentConfig = vf.AgentConfig()")
SERVED = GUESSES.replace("vf.Env[Config]):", "vf.Env[Config]):\n    async def start(self):\n        pass\n")
STOPPED = GUESSES.replace(
    "    @vf.reward", "    @vf.stop\n    def full(self, trace) -> bool:\n        return True\n\n    @vf.reward"
)
TWICE = GUESSES.replace(
    "\n\nclass Guesses",
    "        async with agents.player.interaction(task) as more:\n            await more.turn()\n\nclass Guesses",
)
NAMED = "digits trusting waiting boxed unrewarded contained tooled prepared"
NAMED += " guesses opening random sleeping crowd served stopped twice"
ENVIRONMENTS = {f"ftis_{name}": globals()[name.upper()] for name in NAMED.split()}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    folder = installed(f"verifiers=={VERSION}", tmp_path_factory.mktemp("verifiers"))
    for name, body in ENVIRONMENTS.items():
        (folder / f"{name}.py").write_text(body if "__all__" in body else BEGIN + body + END)
    return folder


@pytest.fixture(autouse=True)
def beside(library, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(library), prepend=os.pathsep)
    monkeypatch.setattr(sys, "path", [*sys.path, str(library)])  # for the version alone
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_environments_rewards_are_its_weighted_mean():
    task = load_task("verifiers:ftis_digits")
    assert task.reward == f"verifiers:{VERSION}"
    assert len(task.train) + len(task.held_out) == 100
    row = next(row for row in task.train if row.question == "Be brief.\n\nSay a digit, the best for 0.")
    with scoring(task.reward, task.scorer) as scorer:
        assert scorer("<answer>3</answer>", row.answer).reward == 1.0
        assert scorer("<answer>4</answer>", row.answer).reward == pytest.approx(0.2)
        assert scorer("3", row.answer).reward == 0.0
        other = row.answer.replace(row.answer[-6:-2], "0000")
        assert scorer("<answer>3</answer>", other).reward == 0.0, "a gold of another release"
    assert source_of("verifiers:ftis_digits").check() == task


def test_a_changed_environment_makes_its_rows_anew(library):
    made = []
    for verb in ("Say", "Name"):
        (library / "ftis_changed.py").write_text((BEGIN + DIGITS + END).replace("Say", verb))
        made.append(load_task("verifiers:ftis_changed"))
        assert verb in made[-1].train[0].question
    assert made[0].data != made[1].data


def test_an_environment_that_evaluates_what_it_is_given_is_in_the_jail(tmp_path):
    task = load_task("verifiers:ftis_trusting")
    row = next(row for row in task.train if row.question.endswith("for 0."))
    path = tmp_path / "ran"
    with scoring(task.reward, task.scorer) as scorer:
        assert scorer("1 + 2", row.answer).reward == 1.0
        for payload in (
            f"open('{path}', 'w')",
            f"__import__('os').system('touch {path}')",
            f"os.system('touch {path}') or 3",
            "[os.write(n, b'1.0') for n in range(64)] and 3",
            "type('A', (), {'__str__': lambda _: '3'})()",
            "(lambda: 3)()",
        ):
            assert scorer(payload, row.answer).reward == 0.0
    assert not path.exists()


REFUSED = {
    "boxed": "needs a container",
    "contained": "needs a container",
    "prepared": "needs a container",
    "tooled": "needs tools",
    "unrewarded": "has no reward of a single trace",
    "nowhere": "has no taskset",
    "waiting": "no running event loop",
    "sleeping": "no running event loop",
    "crowd": "needs several agents",
    "random": "in two ways with the same answers",
    "stopped": "needs hooks on the model's requests",
    "served": "needs something running beside it",
    "twice": "it begins a second conversation",
}


@pytest.mark.parametrize(("name", "what"), REFUSED.items())
def test_what_a_receiver_cannot_reward_is_refused_with_a_sentence(name, what):
    with pytest.raises(UsageError) as refused:
        source_of(f"verifiers:ftis_{name}").check()
    assert what in refused.value.what


def play(name, question, *answers):
    task = load_task(f"verifiers:{name}")
    row = next(row for row in (*task.train, *task.held_out) if row.question == question)
    with scoring(task.reward, task.scorer) as scorer:
        return scorer.replay(answers, row.answer)


@pytest.mark.parametrize(
    ("answers", "replay"),
    [
        ((), Replay((), False, 0.0)),
        (("2",), Replay((), True, 1.0)),
        (("1",), Replay(("Higher.",), False, 0.0)),
        (("1", "so 2"), Replay(("Higher.",), True, 1.0)),
        (("7", "9"), Replay(("Lower.",), True, 0.0)),
        (("2", "2"), Replay((), False, 0.0)),
        (("1", "3", "2"), Replay(("Higher.",), False, 0.0)),
    ],
)
def test_an_episode_is_played_again_with_its_answers(answers, replay):
    assert play("ftis_guesses", "Game 1: guess my number from 1 to 9.", *answers) == replay


def test_an_environment_may_open_the_conversation_and_reward_after_it():
    assert load_task("verifiers:ftis_opening").turns == 4
    said = play("ftis_opening", "Be brief.\n\nSay a digit, the best for 0. Say 3.", "a", "b", "c", "3")
    assert said == Replay(("Again: a", "Again: b", "Again: c"), True, 1.0)
    assert play("ftis_opening", "Be brief.\n\nSay a digit, the best for 0. Say 3.", "a", "b", "c", "d") == replace(
        said, reward=0.5
    )


def test_what_an_environment_says_at_too_great_a_length_is_a_failure():
    assert play("ftis_opening", "Be brief.\n\nSay a digit, the best for 0. Say 3.", "x" * 40_000) is None


def test_two_daemons_learn_from_each_other_in_episodes_of_two_answers(tmp_path, join):
    task = load_task("verifiers:ftis_guesses")
    models = pair(tmp_path, task, "0123456789", later=("Higher.", "Lower."))
    refused = run_cli("run", "new", "--any-tokenizer", "--task", task.name, "-o", str(tmp_path / "any.toml"))
    assert refused.returncode == 2
    assert "such a run is for one tokenizer" in refused.stderr
    learn(tmp_path, join, models, "--task", task.name, one_tokenizer=True, completion_tokens=128)
