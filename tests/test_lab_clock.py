"""Simulated time: nothing is waited for, everything happens in the order of its time."""

import asyncio
import sys

import pytest

from ftis_node.lab.clock import SimulatedLoop


def test_an_hour_of_sleep_is_over_at_once_and_in_order():
    seen = []

    async def sleeper(name, *naps):
        for nap in naps:
            await asyncio.sleep(nap)
            seen.append((name, asyncio.get_running_loop().time()))

    async def both():
        await asyncio.gather(sleeper("a", 1800, 1800), sleeper("b", 2000), sleeper("c", 0.001))

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(both())
    assert [name for name, _ in seen] == ["c", "a", "b", "a"]
    assert [when for _, when in seen] == pytest.approx([0.001, 1800, 2000, 3600])


def test_a_trial_that_goes_on_begins_where_it_was():
    async def now():
        await asyncio.sleep(5)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(100.0)) as runner:
        assert runner.run(now()) == pytest.approx(105)


def test_while_another_process_works_simulated_time_stands_still():
    async def child():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        timer = asyncio.create_task(asyncio.sleep(1000))
        with loop.working():
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(0.2)")
            await process.wait()
        ended = loop.time()
        await timer
        assert loop.time() == pytest.approx(1000)
        return ended

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(child()) == 0.0
