"""One node on several devices: what two and three ranks make is what one makes, and none is left behind."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
from msgspec.structs import asdict
from safetensors.torch import load_file

from ftis_node.errors import FtisError
from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Wishes, plan
from ftis_node.lab.bench.devices import bench_devices
from ftis_node.lab.bench.model import Size
from ftis_node.node.compute import ComputeProcess
from ftis_node.node.options import JoinOptions
from ftis_node.policy.measure import geometry_of, known_config
from ftis_node.store.home import Home
from ftis_node.text import GB
from ftis_node.worker import messages as ask
from ftis_node.worker.checkpoint import OPTIMISER, WEIGHTS
from ftis_node.worker.client import Worker, WorkerDied, WorkerFault
from tests.support.cli import answer, refused
from tests.support.daemons import own_rows
from tests.support.small_models import arithmetic_run, arithmetic_settings, batch_of, completions_of

KINDS = {
    "full": {"lora": False},
    "lora": {"lora": True},
    "shards": {"lora": False, "sharded": True},
}
ROWS = list(range(7))
TWO = (("full", 2), ("shards", 2))


def some(*shown, later):
    """Parameters of a test, of which the later ones are for `make slow`: each process takes seconds to start."""
    quick = [pytest.param(*one) for one in shown]
    return quick + [pytest.param(*one, marks=pytest.mark.slow) for one in later]


def first_moments(folder):
    state = load_file(folder / OPTIMISER)
    return {name: value for name, value in state.items() if name.endswith("/exp_avg")}


class Node:
    """A compute process with so many ranks, as it was when it was new."""

    def __init__(self, folder, ranks, **settings):
        self.folder = folder
        folder.mkdir(exist_ok=True, parents=True)
        self.process = Worker()
        self.process.start()
        usual = {
            "device": ",".join(["cpu"] * ranks),
            "generation_batch": 32,
            "learning_rate": 1e-3,
            "warmup_steps": 0,
            "gradient_clip": 1e9,
        }
        named = arithmetic_settings(**usual | settings)
        facts = self.ask(ask.Load(settings=named, task="arithmetic", own_data=own_rows(folder)))
        self.ask(ask.Open(arithmetic_run(facts, prompt_tokens=96)))
        self.renewed, _ = self.state(1)

    def ask(self, request):
        return self.process.ask(request).result()

    def made(self, rows=ROWS, **options):
        """A group of each row."""
        return self.ask(ask.Generate(rows, **options)).groups

    def state(self, number=0):
        """The weights and the first moments; number: of the folder in which they are kept."""
        place = self.folder / str(number)
        place.mkdir(exist_ok=True)
        self.ask(ask.Save(str(place)))
        return load_file(place / WEIGHTS), first_moments(place)

    def weights(self):
        return self.state()[0]

    def renew(self):
        self.ask(ask.Restore(str(self.folder / "1"), 0))

    def move(self, made, steps):
        """Take steps on a batch of which some groups are another's, and return the last report."""
        batch = batch_of(ROWS[:4], made[:4], uneven=True)
        batch += batch_of(ROWS[4:], made[4:], uneven=True, source="peer")
        for _ in range(steps):
            report = self.ask(ask.Step(batch))
        return report


# What a node is asked for; a step and a generation last as long as they have rows.
WORKS = {
    "step": lambda node, times: ask.Step(batch_of(ROWS * times, node.made() * times, uneven=True)),
    "generate": lambda node, times: ask.Generate(ROWS * times),
    "evaluate": lambda node, _: ask.Evaluate(),
    "save": lambda node, _: ask.Save(str(node.folder)),
}
NodeOf = Callable[[str, int], Node]


@pytest.fixture(scope="module")
def node_of(tmp_path_factory) -> Iterator[NodeOf]:
    """By kind and number of ranks. Each is started once."""
    made = {}
    folder = tmp_path_factory.mktemp("states")

    def get(kind, ranks):
        kind = "full" if ranks == 1 and kind == "shards" else kind
        if (kind, ranks) not in made:
            made[kind, ranks] = Node(folder / f"{kind}-{ranks}", ranks, **KINDS[kind])
        made[kind, ranks].renew()
        return made[kind, ranks]

    yield get
    for node in made.values():
        node.process.end()


def assert_equal(some, others):
    assert some.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in some.items())


def length(tensors):
    return float(sum(value.double().square().sum() for value in tensors.values())) ** 0.5


def distance(one, other):
    """Euclidean."""
    return length({name: value - other[name] for name, value in one.items()})


# --- the same as one ----------------------------------------------------------------------------------------------


def assert_same_gradient(alone, together):
    """After one step, when a first moment is a tenth of the gradient."""
    expected = alone.state()[1]
    found = together.state()[1]
    assert expected.keys() == found.keys()
    assert distance(expected, found) <= 1e-5 * length(expected)


ALL = pytest.mark.parametrize(
    ("kind", "ranks"), some(*TWO, later=[("full", 3), ("lora", 2), ("lora", 3), ("shards", 3)])
)


@ALL
def test_the_gradient_and_five_steps_are_those_of_one_process(node_of, kind, ranks):
    alone = node_of(kind, 1)
    together = node_of(kind, ranks)
    made = alone.made()
    first = alone.move(made, 1)
    other = together.move(made, 1)
    assert first.loss == pytest.approx(other.loss, abs=1e-5)
    assert other.gradient_norm == pytest.approx(first.gradient_norm)
    for source, figures in first.diagnostics.sources.items():
        assert other.diagnostics.sources[source] == pytest.approx(figures, rel=1e-3, abs=1e-4)
    assert_same_gradient(alone, together)
    alone.move(made, 4)
    together.move(made, 4)
    expected = alone.weights()
    assert distance(expected, together.weights()) <= 1e-3 * distance(expected, alone.renewed)


@ALL
def test_tokens_answers_and_their_figures_are_the_same(node_of, kind, ranks):
    alone = node_of(kind, 1)
    together = node_of(kind, ranks)
    for rows in (ROWS, [3], []):
        made = alone.made(rows, slots=rows)
        same = together.made(rows, slots=rows)
        assert len(made) == len(rows)
        for one, other in zip(made, same, strict=True):
            assert one.rewards == other.rewards
            for mine, theirs in zip(completions_of(one), completions_of(other), strict=True):
                assert mine.token_ids.tolist() == theirs.token_ids.tolist()
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5), "other rows beside it round otherwise"
    for node in (alone, together):
        assert node.ask(ask.AddEvaluation("other", "arithmetic-4", None, 11)) == 11
    for also in (None, "other"):
        one, other = (asdict(node.ask(ask.Evaluate(also))) for node in (alone, together))
        assert other == pytest.approx(one | {name: other[name] for name in ("seconds", "batch")})


@pytest.mark.parametrize(
    ("kind", "saved", "restored"),
    some(
        ("full", 1, 2),
        ("full", 2, 1),
        ("shards", 1, 2),
        ("shards", 2, 1),
        later=[("lora", 1, 2), ("shards", 1, 3), ("shards", 3, 1)]
        + [(kind, *ranks) for kind in KINDS for ranks in ((2, 3), (3, 2))],
    ),
)
def test_a_checkpoint_of_any_number_of_ranks_is_restored_on_any_other(node_of, kind, saved, restored):
    first = node_of(kind, saved)
    second = node_of(kind, restored)
    made = first.made()
    first.move(made, 2)
    weights, moments = first.state()
    second.ask(ask.Restore(str(first.folder / "0"), 2))
    restored = second.state()
    assert_equal(restored[0], weights)
    assert_equal(restored[1], moments)
    assert first.made([1, 2, 3]) == second.made([1, 2, 3])
    first.move(made, 2)
    second.move(made, 2)
    expected = first.weights()
    assert distance(expected, second.weights()) <= 1e-3 * distance(expected, weights)


@pytest.mark.parametrize(("kind", "ranks"), some(*TWO, later=[("shards", 3)]))
def test_a_snapshot_is_of_its_moment_and_whole(node_of, tmp_path, kind, ranks):
    node = node_of(kind, ranks)
    made = node.made()
    node.move(made, 1)
    weights, moments = node.state()
    node.ask(ask.Snapshot(str(tmp_path)))
    node.move(made, 1)
    node.ask(ask.Write(str(tmp_path)))
    assert_equal(load_file(tmp_path / WEIGHTS), weights)
    assert_equal(first_moments(tmp_path), moments)
    state = load_file(tmp_path / OPTIMISER)
    assert {float(value) for name, value in state.items() if name.endswith("/step")} == {1.0}


def test_each_rank_keeps_a_part_of_every_moment_and_a_sum_that_lacked_memory_is_made_later(tmp_path):
    """The embedding is the head's too, so it is in no layer's shards. Weights are in bf16, masters in parts."""
    command = [sys.executable, "-m", "tests.support.parts"]
    ranks = [subprocess.Popen([*command, rank, tmp_path / "place"], stdout=subprocess.PIPE) for rank in "01"]
    first, second = (json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks)
    for one in (first, second):
        assert one["held"] == one["trained"] + one["tensors"], "half of two moments, and how many updates there were"
    assert first["embedding"] == second["embedding"]
    assert 0 < first["far"] < 1e-5 * first["size"]


def test_rows_of_ones_own_are_trained_on_by_all(node_of):
    told = []
    for ranks in (1, 2):
        node = node_of("full", ranks)
        report = node.ask(ask.Step(batch_of(ROWS, node.made(), uneven=True), own_data=3))
        assert report.own_data_groups == 3
        told.append((report.own_data_reward, node.ask(ask.Evaluate(ask.OWN_DATA)).prompts))
    assert told[0] == told[1]


# --- what goes wrong in one ----------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch, tmp_path) -> Iterator[Callable[..., Node]]:
    """A compute process whose second rank fails once in this way."""
    made = []

    def start(how, **settings):
        monkeypatch.setattr(Worker, "MODULE", "tests.support.ranks")
        monkeypatch.setenv("FTIS_TEST_FAILS", how)
        made.append(Node(tmp_path, 2, **{"lora": False, "sharded": False} | settings))
        return made[-1]

    yield start
    for node in made:
        node.process.end()


def test_where_memory_is_short_in_one_all_begin_anew(failing, node_of):
    node = failing("memory")
    alone = node_of("full", 1)
    made = alone.made()
    report = node.move(made, 1)
    assert report.memory_retries == 1
    assert report.skipped is None
    alone.move(made, 1)
    assert_same_gradient(alone, node)
    assert node.move(made, 1).memory_retries == 0


def test_shards_end_together_where_memory_is_short_in_one(failing):
    node = failing("memory", **KINDS["shards"])
    with pytest.raises(WorkerDied) as died:
        node.move(node.made(), 1)
    assert died.value.no_room


async def test_shards_without_room_take_half_the_next_time(tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.node.compute.LONGEST_PAUSE", 0.0)
    process = ComputeProcess(JoinOptions(home=Home(tmp_path)))
    process.loaded = SimpleNamespace(settings=SimpleNamespace(micro_batch_tokens=1000))
    await process.failed(WorkerDied("It was killed."), 0)
    assert process._learned == {}
    await process.failed(WorkerDied("It was killed.", no_room=True), 0)
    assert process._learned == {"micro_batch_tokens": 500}
    await process.failed(WorkerDied("It was killed.", no_room=True), 0)
    assert process._learned == {"micro_batch_tokens": 250}


@pytest.mark.slow
def test_what_fails_in_one_fails_in_all(failing, node_of):
    node = failing("at once")
    made = node_of("full", 1).made()
    with pytest.raises(WorkerFault):
        node.move(made, 1)
    assert distance(node.weights(), node.renewed) == 0
    assert node.move(made, 1).skipped is None, "the next step is as any other"


@pytest.mark.parametrize("work", ["generate", "step"])
def test_an_interrupt_ends_the_work_of_all_and_not_what_follows(node_of, work):
    node = node_of("full", 2)
    made = node.made()
    asked = node.process.ask(WORKS[work](node, 120))
    time.sleep(0.2)
    node.ask(ask.Interrupt())
    with pytest.raises(WorkerFault):
        asked.result()
    assert len(node.made()) == len(ROWS)
    assert node.move(made, 1).skipped is None


# --- a rank that dies ------------------------------------------------------------------------------------------------


def kill_second_rank(process):
    """Once it runs its program: before that any child has its parent's command line."""
    parent = psutil.Process(process.pid)
    rank = None
    deadline = time.monotonic() + 60
    while rank is None:
        assert time.monotonic() < deadline
        for child in parent.children():
            with suppress(psutil.Error):
                if "ftis_node.worker" in child.cmdline() != parent.cmdline():
                    rank = child
        time.sleep(0.01)
    rank.kill()
    return rank


def assert_ended(process, asked, rank):
    """Whoever waits is told, and nothing goes on."""
    with pytest.raises(WorkerDied):
        asked.result(60)
        process.ask(ask.Evaluate()).result(60)  # it was through already: then the next one is told
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    process.end()


@pytest.mark.parametrize("work", some(("step",), later=[("generate",), ("evaluate",), ("save",)]))
def test_a_rank_that_is_killed_at_work_ends_all(work, tmp_path):
    node = Node(tmp_path, 2, lora=False, generation_batch=8)
    asked = node.process.ask(WORKS[work](node, 50))
    time.sleep(0.05)
    assert_ended(node.process, asked, kill_second_rank(node.process))


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_loads_ends_all():
    process = Worker()
    process.start()
    settings = arithmetic_settings(device="cpu,cpu", lora=False)
    asked = process.ask(ask.Load(settings=settings, task="arithmetic"))
    assert_ended(process, asked, kill_second_rank(process))


# --- commands --------------------------------------------------------------------------------------------------------


def test_one_device_is_nothing_to_compare():
    assert "nothing to compare" in refused("bench", "step", "--devices", "cpu").what


@pytest.mark.slow
def test_several_devices_are_timed_beside_one_unless_a_process_hangs(monkeypatch):
    timed = partial(bench_devices, Size(4, 4, 6, 8), "cpu,cpu", repeats=1)
    figures = timed()
    assert figures["speedup_over_one"] == figures["one_step_s"] / figures["several_step_s"] > 0
    monkeypatch.setattr("ftis_node.lab.bench.devices.ANSWER_SECONDS", 0.0)
    with pytest.raises(FtisError, match="did not answer to 'load'"):
        timed()


# --- plans -----------------------------------------------------------------------------------------------------------

CONFIG = known_config("qwen2.5-3b")
LARGE = Workload(100, 256, group=12, batch_groups=24)


def planned(budget, **wishes):
    return plan(
        geometry_of(CONFIG, "qwen2.5-3b"),
        round(budget * GB),
        LARGE,
        Wishes(**wishes),
        "cuda",
        False,
    )


def test_full_training_beyond_one_card_is_in_shards_and_within_it_in_replicas():
    replicas = planned(80, devices=2)
    assert not replicas.sharded
    assert not replicas.lora
    assert planned(46).lora
    together = planned(46, devices=2)
    assert together.fits
    assert together.sharded
    assert not together.lora
    assert "shards over 2 devices" in " ".join(together.reasons)
    assert planned(46, devices=2, sharded=False).lora
    assert planned(80, devices=2, sharded=True).sharded
    assert planned(20, devices=2).lora


def test_more_devices_leave_each_less_to_hold_but_not_for_generation():
    whole = planned(200, generation_batch=12, lora=False).memory
    held = whole.master + whole.optimiser
    generation = whole.weights + whole.sampling
    training = []
    for devices in (2, 3, 8):
        need = planned(200, devices=devices, sharded=True, generation_batch=12).memory
        training.append(need.training)
        assert devices * (need.master + need.optimiser) == pytest.approx(held, rel=1e-6)
        assert need.weights + need.sampling == pytest.approx(generation, rel=1e-6)
    assert training[0] > training[1] > training[2]


def test_fit_plans_for_devices_of_different_sizes():
    told = answer("fit", "--model", "tiny-a", "--vram", "3,2", "--task", "arithmetic")
    assert told["devices"] == told["budget_gb"] == 2
    assert "--devices cuda:0,cuda:1" in told["command"]
