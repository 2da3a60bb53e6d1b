"""How many threads a node's arithmetic takes beside other processes, and where that is told."""

import re
import time

import pytest
import torch

from ftis_node.cli.flags import Given
from ftis_node.host.doing import doing
from ftis_node.host.threads import LOOK_SECONDS, Threads, unused_seconds
from ftis_node.node.options import JoinOptions
from ftis_node.preflight import machine
from ftis_node.preflight.case import case_of
from ftis_node.store.home import Home
from ftis_node.worker.engine import Engine
from tests.support.small_models import arithmetic_run, arithmetic_settings, batch_of


class Cores:
    """A machine whose free cores a test sets."""

    def __init__(self, free, most):
        self.free = free
        self._now = 0.0
        self._unused = 0.0
        self.threads = Threads(most, lambda: (self._now, self._unused))

    def wanted(self, seconds=LOOK_SECONDS):
        self._now += seconds
        self._unused += self.free * seconds
        return self.threads.wanted()


@pytest.fixture(autouse=True)
def as_many_as_before(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_fewer_at_once_and_more_when_two_looks_agree():
    cores = Cores(free=4.0, most=4)
    for free, threads in (
        (4.0, 4),
        (1.4, 1),
        (0.2, 1),
        (3.6, 1),
        (3.0, 3),
        (9.0, 3),
        (9.0, 4),
    ):
        cores.free = free
        assert cores.wanted() == threads
    cores.free = 0.0
    assert cores.wanted(LOOK_SECONDS / 2) == 4, "so short a time says little"


def test_what_this_process_uses_counts_as_free():
    began = time.process_time()
    unused = unused_seconds()[1]
    while time.process_time() < began + 0.3:
        pass
    assert unused_seconds()[1] - unused > 0.28


def test_an_engine_takes_as_many_tells_it_and_writes_it_down():
    cores = Cores(free=1.0, most=2)
    torch.set_num_threads(2)
    engine = Engine(threads=cores.threads)
    cores.wanted()
    engine.open(arithmetic_run(engine.load(arithmetic_settings(), "arithmetic")))
    assert torch.get_num_threads() == 1, "the check of the fast paths takes seconds, too"
    groups = batch_of([1, 2], engine.generate([1, 2]).groups, uneven=True)
    assert engine.step(groups).threads == 1
    cores.free = 2.0
    for threads in (1, 2):
        cores.wanted()
        assert engine.step(groups).threads == threads
    cores.free = 1.0
    cores.wanted()
    with doing("generating", 4, "completions"):
        told = engine.watch().doing.sentence()
    assert told == "Generating with 1 of 2 threads, for other processes use the CPU: 0 of 4 completions"


def test_the_doctor_tells_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9999)  # more than any machine has cores
    home = Home(tmp_path)
    case = case_of(JoinOptions(home), Given({"model": "tiny-a"}).on(home))
    [found] = machine.gpu(case)
    assert re.search(r"the CPU trains with \d+ of 9999 threads, for other processes use the CPU\.$", found.text)
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    [found] = machine.gpu(case)
    assert found.text.endswith("the CPU trains.")
