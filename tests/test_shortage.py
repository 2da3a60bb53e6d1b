"""A model that cannot be trained in what a node was given is refused before it is loaded, with what to do."""

import json
from types import SimpleNamespace

import psutil
import pytest
import torch

from ftis_node.cli.fit import _present
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.fit.memory import Workload
from ftis_node.node import compute
from ftis_node.node.compute import ComputeProcess
from ftis_node.node.options import JoinOptions
from ftis_node.policy.nf4 import kernels
from ftis_node.store.home import Home
from ftis_node.text import GB, MB, rounded
from ftis_node.worker import engine
from ftis_node.worker.engine import Engine
from ftis_node.worker.planning import settle, smallest_budget
from ftis_node.worker.shortage import refuse_shortage

GSM8K = Workload(prompt_tokens=512, completion_tokens=256, group=12, batch_groups=24)
TINY = Settings(device="cpu", vram_gb=0.1)


@pytest.fixture
def gpu(monkeypatch):
    """One of 24 GB, of which 22 are free, as far as planning sees."""
    kernels()  # bitsandbytes cannot be imported for a GPU that is made up
    monkeypatch.setattr("ftis_node.policy.measure.where_to_look", lambda source: {"local_files_only": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (22 * GB, 24 * GB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: None)


def refused(**settings):
    asked = Settings(**settings)
    _, chosen = settle(asked, GSM8K, {})
    try:
        refuse_shortage(asked, chosen)
    except UserError as error:
        return error
    return None


def test_the_higher_limit_that_is_named_is_enough():
    found = refused(model="tiny-a", device="cpu", vram_gb=0.1)
    assert "at least, and it may use 102 MB." in found.what
    assert found.exit_code == 2
    enough = float(found.fix.removeprefix("Give it more with --vram ").partition(",")[0])
    assert refused(model="tiny-a", device="cpu", vram_gb=enough) is None
    assert refused(model="tiny-a", device="cpu", vram_gb=enough - 0.02) is not None


def test_on_a_cpu_only_a_limit_is_held_against_it(monkeypatch):
    there = psutil.virtual_memory()._replace(available=GB // 4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    assert refused(model="tiny-a", device="cpu") is None
    assert refused(model="tiny-a", device="cpu", vram_share=0.5) is None, "what is free may change"
    found = refused(model="tiny-a", device="cpu", vram_share=1e-4)
    assert "--set vram_share=" in found.fix
    assert "--vram" not in found.fix


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("free", "planned"), [(23.6, 24), (22, 22.75)])
def test_a_context_is_counted_once(free, planned, monkeypatch):
    card = SimpleNamespace(total_memory=24 * GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GB), 24 * GB))
    assert smallest_budget(Settings(device="cuda")) == pytest.approx(planned * GB, abs=2)
    assert _present("cuda") == 24 * GB, "what `fit` asks"


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_what_is_free_counts_too():
    assert refused(model="qwen2.5-3b") is None
    found = refused(model="qwen2.5-7b", lora=False)
    assert "and 22.8 GB are free." in found.what
    assert found.exit_code == 1, "a supervisor tries again: it may be free later"
    assert "--lora" in found.fix
    assert "`ftis-node fit` says what fits" in found.fix


def test_no_model_is_loaded_that_was_refused(monkeypatch):
    def load(_):
        raise AssertionError("it was loaded")

    monkeypatch.setattr(engine, "load_policy", load)
    with pytest.raises(UsageError, match="tiny-a does not fit"):
        Engine().load(TINY, "arithmetic", must_fit=True)


async def test_a_node_that_has_begun_goes_on_with_less(tmp_path, monkeypatch):
    """What others take of a GPU may be back in a minute; a restart of the compute process must not end the node."""
    asked = []

    class Worker:
        pid = None

        def start(self, output=None, nice=0):
            pass

        async def call(self, request):
            asked.append(request.must_fit)
            return Engine().load(request.settings, request.task)

    monkeypatch.setattr(compute, "Worker", Worker)
    process = ComputeProcess(JoinOptions(Home(tmp_path)))
    for _ in range(2):
        await process.start(TINY, None)
    assert asked == [True, False]


async def test_letters_that_a_tokenizer_lacks_are_told(tmp_path, caplog):
    mine = tmp_path / "mine.jsonl"
    rows = ({"prompt": "Ask "[: n % 5] + f"{n}+1=", "answer": n + 1} for n in range(40))
    mine.write_text("\n".join(map(json.dumps, rows)))
    process = ComputeProcess(JoinOptions(Home(tmp_path), task=str(mine)))
    try:
        await process.start(Settings(model="tiny-a", device="cpu"), None)
    finally:
        await process.stop()
    assert "The tokenizer of tiny-a has no token for some letters" in caplog.text
    assert process.facts.unwritable == "Aks"
    assert f" {process.facts.held_out} questions held out, too few" in caplog.text
    assert "--eval-data" in caplog.text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 MB"),
        (0.3 * MB, "0.3 MB"),
        (12.4 * MB, "12 MB"),
        (1023.4 * MB, "1023 MB"),
        (1023.9 * MB, "1.00 GB"),
        (1.024 * GB, "1.02 GB"),
        (24 * GB, "24.0 GB"),
        (2000 * GB, "2,000.0 GB"),
    ],
)
def test_sizes_are_told_in_one_form(size, text):
    assert rounded(size) == text
