"""What a node says of its GPU. There is none where these tests run: they show that nothing depends on one."""

import io

import torch
from rich.console import Console

from ftis_node.node import compute
from ftis_node.node.compute import ComputeProcess
from ftis_node.node.options import JoinOptions
from ftis_node.observe.answers import read
from ftis_node.observe.live import gpu_line, node_view
from ftis_node.step_report import GpuFigures, Watched
from ftis_node.store.home import Home
from ftis_node.worker.client import WorkerDied
from ftis_node.worker.engine import Engine
from ftis_node.worker.gpu import gpu_figures
from tests.support.small_models import arithmetic_settings
from tests.support.statuses import JOINING, TRAINING, answered

BUSY = TRAINING["gpu"]


def test_a_cpu_has_no_figures_and_a_gpu_that_fails_has_none():
    assert gpu_figures(torch.device("cpu")) is None
    assert gpu_figures(torch.device("cuda:99")) is None
    engine = Engine()
    engine.load(arithmetic_settings(), "arithmetic")
    assert engine.watch() == Watched()


def test_a_person_reads_how_busy_it_is_where_that_is_known():
    assert gpu_line(read(BUSY, GpuFigures)) == "75% busy, 12.0 GB of 24.0 GB, 9.00 GB in tensors"
    assert gpu_line(read(BUSY | {"utilization": None}, GpuFigures)) == "12.0 GB of 24.0 GB, 9.00 GB in tensors"


def test_the_view_has_a_line_for_a_gpu_and_none_without():
    for status, shown in ((TRAINING, True), (JOINING, False)):
        console = Console(record=True, width=100, file=io.StringIO())
        console.print(node_view(answered(**status)))
        assert ("12.0 GB of 24.0 GB" in console.export_text()) == shown


async def test_it_is_looked_at_until_the_compute_process_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "WATCH_SECONDS", 0.0)
    seen = []
    process = ComputeProcess(JoinOptions(Home(tmp_path)))

    class Worker:
        pid = None

        async def call(self, request):
            seen.append(process.watched.gpu)
            if len(seen) == 3:
                raise WorkerDied("It is gone.")
            return Watched(GpuFigures(**BUSY))

    await process._watch(Worker())
    assert seen == [None, GpuFigures(**BUSY), GpuFigures(**BUSY)]
    assert process.watched == Watched()
