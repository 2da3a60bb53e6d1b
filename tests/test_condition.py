"""A node's state is what is true, with a reason and what to do about it."""

import re
import time
from collections import deque

import pytest
from msgspec.structs import asdict, replace

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError
from ftis_node.evaluate.greedy import GreedyResult
from ftis_node.evaluate.judging import Judged
from ftis_node.node.assembly import LOG_BYTES, OLDER_METRICS_BYTES, Quotas, quotas
from ftis_node.node.condition import DOWN_SECONDS, ENOUGH_GROUPS, IDLE_STEPS, Signs, State, condition
from ftis_node.node.evaluation_schedule import EvaluationSchedule
from ftis_node.node.training import StepLog
from ftis_node.observe.metrics import MetricsLog
from ftis_node.swarm.membership import Reachability
from ftis_node.tasks import Example, Score
from tests.support.steppers import stepper
from tests.support.steps import taken_step


def assert_said(found, state, words):
    """The state, and why; where a person can do something, what."""
    assert found.state == state
    assert re.search(words, found.reason)
    assert found.reason.endswith(".")
    assert found.advice.endswith(".") == (state in (State.DEGRADED, State.ALONE))


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        ({}, "No peers"),
        ({"skipped": ["Ben: /ip4/10.1.0.4/tcp/4 is not dialled: far"]}, "some. Ben: .* is not dialled: far.$"),
        ({"shut_out": "it was removed", "sought": 2}, "no member .*: it was removed. It trains alone"),
        ({"other_protocol": 2}, "No peers but 2 peers that .* another version of the protocol"),
        ({"signals": (48, 9)}, "Only 9 of the latest 48 own groups"),
        ({"warning": " It learns its rows by heart."}, "looking for some. It learns its rows by heart."),
    ],
)
def test_a_node_without_peers_is_alone_and_says_why_and_what_to_do(signs, words):
    assert_said(condition(Signs(**signs)), State.ALONE, words)


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        ({"network_down": DOWN_SECONDS}, "p2pd has not answered for 10 s"),
        ({"free_bytes": 9, "checkpoint_bytes": 10}, "the next checkpoint takes"),
        ({"faults": ("a", "CUDA error")}, "failed 2 times .* CUDA error"),
        ({"copied": True}, "uses a copy of this home"),
        ({"stalled": 7201.0}, "owed an answer for 7201 s"),
        ({"bad_steps": 1}, "latest 1 step had no finite gradient"),
        ({"idle_steps": IDLE_STEPS}, "changed nothing"),
        ({"idle_steps": IDLE_STEPS, "pass_at_1": 0.5}, "changed nothing"),
        ({"own_refused": True}, "unsound"),
    ],
)
def test_every_trouble_is_told_with_what_to_do(signs, words):
    assert_said(condition(Signs(peers=1, **signs)), State.DEGRADED, words)


@pytest.mark.parametrize(
    "signs",
    [
        {},
        {"other_protocol": 2},
        {"network_down": DOWN_SECONDS - 1},
        {"free_bytes": 10, "checkpoint_bytes": 10},
        {"free_bytes": None, "checkpoint_bytes": 10},
        {"idle_steps": IDLE_STEPS - 1},
        {"signals": (48, 10)},
        {"signals": (ENOUGH_GROUPS - 1, 0)},
        {"signals": (48, 0), "pass_at_1": 0.97},
    ],
)
def test_what_is_no_trouble_is_not_told(signs):
    assert_said(condition(Signs(peers=1, **signs)), State.ONLINE, "with 1 peer.$")


@pytest.mark.parametrize(
    ("signs", "state", "words"),
    [
        ({"peers": 3}, State.ONLINE, "with 3 peers."),
        ({"reachability": Reachability.RELAYED}, State.RELAYED, "relays"),
        ({"reachability": Reachability.OUTBOUND_ONLY}, State.OUTBOUND_ONLY, "nobody can dial it"),
        ({"skipped": ["Ben: far", "Cara: far"]}, State.ONLINE, "1 peer. Ben: far. And 1 more: `ftis-node peers`."),
        ({"sought": 2}, State.JOINING, "Waiting for 2 peers"),
        ({"idle_steps": IDLE_STEPS, "pass_at_1": 0.99}, State.ONLINE, "solved: pass@1 is 0.99"),
        ({"signals": (ENOUGH_GROUPS, 2)}, State.ONLINE, "Only 2 of the latest 12 .* `ftis-node task check"),
    ],
)
def test_a_node_with_peers_says_what_else_there_is_to_know(signs, state, words):
    assert_said(condition(Signs(**{"peers": 1} | signs)), state, words)


def test_evaluations_take_no_more_than_their_share_of_the_time():
    now = 0.0
    evaluations = EvaluationSchedule(lambda: now)
    found = GreedyResult((), seconds=50.0, batch=4).figures()
    evaluations.taken(0, found, found.seconds)  # before any training, so not counted
    for now, due in (  # noqa: B007
        (0.0, False),
        (499.0, False),
        (500.0, True),
        (999.0, False),
        (1000.0, True),
    ):
        assert (not evaluations.due_seconds()) is due
        if due:
            evaluations.taken(0, found, found.seconds)


def test_slow_evaluations_ask_fewer_questions_more_often_and_say_when(tmp_path):
    now = 0.0
    means = stepper(tmp_path).means
    evaluations = EvaluationSchedule(lambda: now)
    assert evaluations.parts() == 1, "the first asks all"
    assert evaluations.due_seconds() is None
    whole = replace(GreedyResult((), seconds=75.0, batch=4).figures(), prompts=48)
    evaluations.taken(0, whole, whole.seconds)
    assert evaluations.parts() == 3
    assert evaluations.due_seconds() == pytest.approx(250.0)
    now = 250.0
    assert not evaluations.due_seconds()
    third = replace(whole, prompts=16, seconds=25.0)
    evaluations.taken(9, third, third.seconds, 3)
    assert evaluations.parts() == 3
    assert evaluations.due_seconds() == pytest.approx(250.0)
    means.progress.pass_at_1_step = 5
    for step, each, due in (
        (9, 30.0, 250.0),
        (9, 300.0, 300.0),
        (5, 200.0, 1000.0),
    ):
        means.progress.step = step
        means.pace.steps = deque([each])
        assert evaluations.due_seconds(means.until_evaluation()) == pytest.approx(due)
    slow = EvaluationSchedule(lambda: now)
    slow.taken(0, replace(whole, prompts=64, seconds=870.0), 870.0)
    assert slow.parts() == 5, "16 questions would come more seldom than every half hour"


def of_scores(scores):
    """The figures of an evaluation with these verdicts."""
    judged = [Judged(Example("", ""), "", 10, finished=True, score=score) for score in scores]
    return GreedyResult(judged, seconds=50.0, batch=4).figures()


def of_right(correct, questions):
    """The figures of an evaluation in which so many answers were right."""
    return of_scores([Score(float(one < correct), formatted=True, lenient=one < correct) for one in range(questions)])


@pytest.mark.parametrize(
    ("groups", "reward", "correct", "rule", "told"),
    [
        (48, 0.7, 4, "integer", True),
        (48, 0.35, 4, "integer", False),  # beyond pass@1, and not by much
        (48, 0.7, 30, "integer", False),
        (11, 0.7, 4, "integer", False),
        (48, 0.7, 4, "code:1", False),  # which may reward parts of an answer
    ],
)
def test_rows_that_are_learned_by_heart_show(groups, reward, correct, rule, told):
    evaluations = EvaluationSchedule()
    found = of_right(correct, 48)
    evaluations.taken(3570, found, found.seconds, rule=rule, rewards=[reward] * groups)
    words = f"by heart: its samples earn {reward:.2f} on them, and pass@1 is {correct / 48:.2f} on the questions"
    assert (words in evaluations.warning) is told
    evaluations.taken(3580, found, found.seconds, rule=rule)
    assert not evaluations.warning, "as of the latest"


def test_a_model_that_became_worse_than_it_was_is_told_after_a_restart_too(tmp_path):
    """As the 0.5B at a learning rate of 3e-4: 27 of 44, then 7 and 4 of 22."""
    before = of_right(27, 44)
    MetricsLog(tmp_path / "metrics.jsonl").write("evaluation", step=0, **asdict(before))
    restarted = EvaluationSchedule()
    restarted.recall(tmp_path / "metrics.jsonl")
    first = EvaluationSchedule()
    first.taken(0, before, before.seconds)
    for evaluations in (first, restarted):
        evaluations.taken(10, of_right(7, 22), 1.0)
        assert not evaluations.warning, "that may be chance"
        evaluations.taken(20, of_right(4, 22), 1.0)
        assert "fell from 0.61 before training to 0.18" in evaluations.warning
        assert "third" in evaluations.warning


@pytest.mark.parametrize(
    ("formatted", "rule", "told"),
    [
        (False, "exact", 1),
        (True, "exact", 0),
        (False, "code:1", 0),
    ],
)
def test_a_form_never_written_is_told(caplog, formatted, rule, told):
    caplog.set_level("INFO")
    evaluations = EvaluationSchedule()
    found = of_scores([Score(0.0, formatted=formatted and one == 0, lenient=True) for one in range(64)])
    for step in range(3):
        evaluations.taken(step, found, found.seconds, rule=rule)
    assert len([record for record in caplog.records if "None of 64 answers" in record.message]) == told
    assert caplog.text.count("pass@1 0.000, 95 % between 0.000 and 0.057") == 3


def test_evaluations_of_weights_that_a_kill_took_are_not_in_the_curve(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step, score in ((0, 0.1), (50, 0.2), (90, 0.3)):
        log.write("evaluation", step=step, pass_at_1=score)
    log.write("started", step=60)
    log.write("evaluation", step=70, pass_at_1=0.4)
    evaluations = EvaluationSchedule()
    evaluations.recall(tmp_path / "metrics.jsonl")
    assert list(evaluations.curve) == [(0, 0.1), (50, 0.2), (70, 0.4)]
    evaluations.went_back(60)
    assert list(evaluations.curve) == [(0, 0.1), (50, 0.2)]


def test_of_quick_steps_only_some_are_logged(monkeypatch, caplog):
    now = 0.0
    steps = StepLog()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level("INFO")
    for number in range(1, 22):
        steps.write(taken_step(number))
        now += 1.0
    logged = [record.getMessage() for record in caplog.records]
    assert logged[0] == "Step 1: own groups 1 (reward 0.50), foreign 2 (–), 2.0 s"
    assert [line.split(":")[0] for line in logged] == ["Step 1", "Step 11", "Step 21"]


def test_a_limit_on_disk_leaves_packets_and_steps_what_checkpoints_and_logs_do_not_need():
    megabyte = 1 << 20
    unlimited = Quotas(100 * megabyte, OLDER_METRICS_BYTES)
    assert quotas(Settings(packet_quota_mb=100), 10**12) == unlimited
    assert quotas(Settings(packet_quota_mb=100, disk_gb=3), 10 * megabyte) == unlimited
    tight = quotas(Settings(disk_gb=0.2), 10 * megabyte)
    room = round(0.2 * (1 << 30)) - 30 * megabyte - LOG_BYTES
    assert tight.packets + tight.older_metrics == room
    assert tight.older_metrics == room // 8
    with pytest.raises(UsageError, match=r"may take 102 MB .* need 112 MB"):
        quotas(Settings(disk_gb=0.1), 10 * megabyte)
