"""The compute process as the network process sees it: asked over a pipe, failing without harm, never left behind."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Pipe

import psutil
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.errors import UsageError, UserError
from ftis_node.packet import decode
from ftis_node.worker import messages
from ftis_node.worker.client import Worker, WorkerDied, WorkerFault
from ftis_node.worker.messages import Call, Evaluate, Generate, Load, Open, Request, ScoreGroup
from tests.support.daemons import PATIENCE
from tests.support.small_models import arithmetic_run as run_of
from tests.support.small_models import arithmetic_settings as settings


class Unknown(Request[None], frozen=True):
    """No method of the engine."""

    op = "no_such_op"


on_one_loop = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def started(*, loaded=False):
    """A process; loaded: with tiny-a and the arithmetic task, of which a batch of generation takes it some seconds."""
    worker = Worker()
    worker.start()
    try:
        if loaded:
            facts = await worker.call(Load(settings=settings(generation_batch=8), task="arithmetic"))
            await worker.call(Open(run_of(facts)))
        yield worker
    finally:
        await worker.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[Worker]:
    async with started(loaded=True) as worker:
        yield worker


@on_one_loop
async def test_answers_come_to_whom_they_belong(worker):
    assert worker.pid is not None
    assert worker.pid != os.getpid()
    answers = await asyncio.gather(*[worker.call(Generate([row] * (row % 3 + 1))) for row in range(12)])
    assert [len(answer.groups) for answer in answers] == [row % 3 + 1 for row in range(12)]
    assert len({decode(group.packet).prompt_digest for answer in answers for group in answer.groups}) == 12


@on_one_loop
@pytest.mark.parametrize(
    ("model", "kind", "fix"),
    [
        ("tiny-z", UsageError, "Did you mean 'tiny-"),
        ("{tmp}", UserError, "--model FOLDER"),
    ],
)
async def test_a_mistake_of_the_user_arrives_with_its_fix(worker, tmp_path, model, kind, fix):
    (tmp_path / "config.json").write_text("rubbish")
    load = Load(settings=settings(model=model.format(tmp=tmp_path)), task="arithmetic")
    loading = asyncio.create_task(worker.call(load))
    await asyncio.sleep(0)
    assert worker.owing_seconds() == 0.0, "a download takes as long as it takes"
    with pytest.raises(UserError) as caught:
        await loading
    assert type(caught.value) is kind
    assert fix in caught.value.fix


@on_one_loop
@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Generate([10**9]), "IndexError"),
        (ScoreGroup(0, b"nonsense"), "PacketError"),
        (Generate("no rows"), "ValidationError"),
        (Unknown(), "KeyError"),
    ],
    ids=["main thread", "side thread", "wrong arguments", "unknown op"],
)
async def test_a_fault_is_reported_and_the_process_lives_on(request_, told, worker):
    pid = worker.pid
    async with asyncio.timeout(20):
        with pytest.raises(WorkerFault, match=told):
            await worker.call(request_)
        generated = await worker.call(Generate([3]))
        assert await worker.call(ScoreGroup(3, generated.groups[0].packet))
    assert worker.pid == pid


@on_one_loop
async def test_it_owes_its_oldest_answer_however_many_others_come_meanwhile(worker):
    (group,) = (await worker.call(Generate([3]))).groups
    assert worker.owing_seconds() == 0.0
    began = time.monotonic()
    long = asyncio.create_task(worker.call(Generate([3] * 60)))
    await asyncio.sleep(0)
    asked = time.monotonic()
    await worker.call(ScoreGroup(3, group.packet))
    assert time.monotonic() - asked <= worker.owing_seconds() <= time.monotonic() - began
    await long
    assert worker.owing_seconds() == 0.0


@on_one_loop
async def test_scoring_is_answered_while_a_long_generation_runs(worker):
    (group,) = (await worker.call(Generate([3]))).groups
    long = asyncio.create_task(worker.call(Generate([3] * 150)))
    for _ in range(10):
        assert await worker.call(ScoreGroup(3, group.packet)) == group.rewards
    assert not long.done(), "the scores did not wait for it"
    assert len((await long).groups) == 150


@on_one_loop
async def test_who_stops_waiting_for_an_answer_does_not_disturb_the_others(worker):
    abandoned = asyncio.create_task(worker.call(Generate([1] * 10)))
    await asyncio.sleep(0)
    other = asyncio.create_task(worker.call(Generate([2])))
    await asyncio.sleep(0)
    abandoned.cancel()
    assert len((await other).groups) == 1
    assert not worker._waiting


@on_one_loop
async def test_killed_while_working_it_fails_every_waiting_call_at_once():
    async with started() as worker:
        assert worker.pid is not None
        load = Load(settings=settings(), task="arithmetic")
        waiting = [asyncio.create_task(worker.call(load)) for _ in range(3)]
        await asyncio.sleep(0.05)
        os.kill(worker.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE)
        assert [type(result) for result in results] == [WorkerDied] * 3
        for dead in (worker, Worker()):  # or never started
            with pytest.raises(WorkerDied):
                await dead.call(Evaluate())


@on_one_loop
async def test_it_ends_by_itself_when_the_network_process_is_gone():
    async with started(loaded=True) as worker:
        busy = asyncio.create_task(worker.call(Generate([3] * 5000)))
        await asyncio.sleep(0.3)
        assert worker._connection is not None
        assert worker._process is not None
        with socket.socket(fileno=os.dup(worker._connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that was killed
        assert await asyncio.to_thread(worker._process.wait, 5) == 0
        with pytest.raises(WorkerDied):
            await busy


@on_one_loop
async def test_ctrl_c_is_not_for_it():
    async with started() as worker:
        assert worker.pid is not None
        with pytest.raises(UsageError):  # an answer: it has got as far as to leave SIGINT alone
            await worker.call(Load(settings=settings(model="tiny-z"), task="arithmetic"))
        assert os.getpgid(worker.pid) != os.getpgid(0), "the terminal's Ctrl-C goes to another process group"
        os.kill(worker.pid, signal.SIGINT)
        with pytest.raises(UsageError):
            await worker.call(Load(settings=settings(model="tiny-z"), task="arithmetic"))
        pid = worker.pid
        await worker.stop()
        assert worker.pid is None
        assert not psutil.pid_exists(pid)
        with pytest.raises(WorkerDied):
            await worker.call(Evaluate())


@on_one_loop
async def test_it_can_be_stopped_before_it_listens():
    async with started() as worker:
        pid = worker.pid
        await asyncio.wait_for(worker.stop(), PATIENCE)  # it still imports torch, and so cannot see that we are gone
        assert pid is not None
        assert not psutil.pid_exists(pid)


# --- messages -------------------------------------------------------------------------------------------------------


@given(st.lists(st.builds(Call, st.integers(0, 2**63), st.text(), st.binary().map(messages.encoded)), max_size=4))
def test_messages_arrive_as_they_were_sent(calls):
    ours, theirs = Pipe()
    with ours, theirs:
        for message in calls:
            ours.send_bytes(messages.pack(message))
        ours.close()
        for message in calls:
            arrived = messages.receive(theirs, Call)
            assert arrived is not None
            assert arrived.id == message.id
            assert arrived.op == message.op
            assert bytes(arrived.args) == bytes(message.args)
        assert messages.receive(theirs, Call) is None


@pytest.mark.parametrize("cut", [1, 3, 4, 9])
def test_a_stream_that_ends_within_a_message_has_ended(cut):
    ours, theirs = Pipe()
    with ours, theirs:
        os.write(ours.fileno(), b"\0\0\0\x09message"[:cut])
        ours.close()
        assert messages.receive(theirs, Call) is None


def test_a_message_beyond_the_limit_is_not_sent():
    with pytest.raises(ValueError, match="over the limit"):
        messages.pack(bytes(messages.MAX_MESSAGE))


def test_an_answer_that_is_no_message_cannot_be_sent():
    with pytest.raises(NotImplementedError, match="object cannot be sent"):
        messages.encoded(object())
