"""What outlives a restart, with a real compute process: checkpoints, the way back, and what was learned of memory."""

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from ftis_node.config.settings import Settings, collect
from ftis_node.errors import UsageError, UserError
from ftis_node.node import checkpointing, remembered
from ftis_node.node.checkpointing import Saving
from ftis_node.node.progress import Progress
from ftis_node.observe.metrics import MetricsLog, read_events
from ftis_node.policy.names import BUILT_IN_DIR, lasting, same_model
from ftis_node.store.checkpoints import Checkpoints, labelled
from ftis_node.store.home import Home
from ftis_node.worker.client import Worker, WorkerFault
from ftis_node.worker.messages import Generate, Interrupt, Load, Open, Save, Step, Write
from tests.support.small_models import arithmetic_run, arithmetic_settings, batch_of
from tests.support.steps import step_report

on_one_loop = pytest.mark.asyncio(loop_scope="module")
FULL = {"model": "tiny-a (full)", "optimiser": "adamw"}
GOOD = step_report()
BAD = step_report(bad_steps=4)
DIVERGED = step_report(bad_steps=5, diverged=True)


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    """What the compute process writes."""
    return tmp_path_factory.mktemp("log") / "worker.log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(log) -> AsyncIterator[Worker]:
    worker = Worker()
    with log.open("wb") as written:
        worker.start(written)
    facts = await worker.call(Load(settings=arithmetic_settings(), task="arithmetic"))
    await worker.call(Open(arithmetic_run(facts)))
    yield worker
    await worker.stop()


@pytest.fixture
def saving(tmp_path) -> Saving:
    return Saving(tmp_path / "checkpoints", FULL, MetricsLog(tmp_path / "metrics.jsonl"), 0)


async def train(worker):
    """One step in which half of each group is said to be right."""
    groups = (await worker.call(Generate([1, 2]))).groups
    report = await worker.call(Step(batch_of([1, 2], groups, uneven=True)))
    assert report.skipped is None


async def save(saving, worker):
    """A checkpoint of step 1 on the disk."""
    await saving.checkpoint(worker, Progress(step=1))
    await saving.flush()


async def weights(worker, tmp_path):
    directory = tmp_path / "look"
    directory.mkdir(exist_ok=True)
    await worker.call(Save(str(directory)))
    return load_file(directory / "trainable.safetensors")


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


async def three_steps(worker, saving, tmp_path):
    """Weights after steps 1, 2 and 3, each of which was good and saved."""
    seen = []
    for step in (1, 2, 3):
        await train(worker)
        await saving.after_step(worker, Progress(step=step), GOOD)
        seen.append(await weights(worker, tmp_path))
    assert not same(seen[1], seen[2])
    return seen


@on_one_loop
async def test_after_many_bad_steps_good_weights_return(worker, saving, tmp_path):
    """A step from checkpoint 2 was good, nothing from checkpoint 3 was: 3 may be where it went wrong."""
    after = await three_steps(worker, saving, tmp_path)
    for step in (4, 5, 6, 7):
        await saving.after_step(worker, Progress(step=step), BAD)
    await saving.flush()
    assert saving.saved_step == 3, "bad steps write no checkpoint"
    await saving.after_step(worker, Progress(step=8), DIVERGED)
    assert same(await weights(worker, tmp_path), after[1])
    (event,) = read_events(tmp_path / "metrics.jsonl", "restored")
    assert event["step"] == 8
    assert event["weights_of_step"] == 2
    restored = await Saving(saving._path, FULL, saving._metrics).restore(worker)
    assert restored.step == 2, "a restart does not find the bad one either"


@on_one_loop
@pytest.mark.parametrize("between", [False, True])
async def test_a_node_that_going_back_does_not_help_says_so(worker, saving, tmp_path, between):
    await three_steps(worker, saving, tmp_path)
    with pytest.raises(UserError, match="older checkpoints did not help"):
        for step in range(4, 4 + 2 * checkpointing.SETBACKS + 2, 2):
            await saving.after_step(worker, Progress(step=step), DIVERGED)
            if between:
                await saving.after_step(worker, Progress(step=step + 1), GOOD)


@on_one_loop
async def test_after_enough_good_steps_it_may_go_back_again(worker, saving, tmp_path):
    await three_steps(worker, saving, tmp_path)
    for start in range(4, 4 + 4 * (checkpointing.RECOVERED_STEPS + 1), checkpointing.RECOVERED_STEPS + 1):
        await saving.after_step(worker, Progress(step=start), DIVERGED)
        for step in range(start + 1, start + 1 + checkpointing.RECOVERED_STEPS):
            await saving.after_step(worker, Progress(step=step), GOOD)


@on_one_loop
async def test_weights_that_only_fail_give_way_to_those_before(worker, saving, tmp_path):
    after = await three_steps(worker, saving, tmp_path)
    await saving.flush()
    again = await saving.restore(worker)
    assert again.step == 3
    assert same(await weights(worker, tmp_path), after[2])
    older = await saving.restore(worker, older=True)
    assert older.step == 2
    assert same(await weights(worker, tmp_path), after[1])
    last = await saving.restore(worker, older=True)
    assert last.step == 3, "it failed with both, so the weights were not to blame"


@on_one_loop
async def test_a_step_given_up_leaves_the_last_to_be_saved_and_no_traceback(worker, log, saving, tmp_path):
    await train(worker)
    before = await weights(worker, tmp_path)
    groups = (await worker.call(Generate([1]))).groups
    for request in (Generate([1]), Step(batch_of([1], groups, uneven=True))):
        await worker.call(Interrupt())
        with pytest.raises(WorkerFault, match="given up"):
            await worker.call(request)
    assert b"Traceback" not in await asyncio.to_thread(log.read_bytes)
    await save(saving, worker)
    assert same(load_file(saving._path / "step-00000001" / "trainable.safetensors"), before)
    await train(worker)
    assert not same(await weights(worker, tmp_path), before)


@on_one_loop
async def test_layers_go_on_beside_their_own_weights(worker, saving, tmp_path):
    four_bits = Saving(saving._path, FULL | {"quantisation": "nf4"}, saving._metrics)
    await save(four_bits, worker)
    assert remembered.settled(saving._path, "tiny-a")["quantisation"] == "nf4"
    with pytest.raises(UsageError, match="were trained with quantisation=nf4"):
        await saving.restore(worker)
    assert await four_bits.restore(worker) == Progress(step=1)


@on_one_loop
async def test_a_home_keeps_its_lora_layers_and_refuses_others(worker, saving, tmp_path):
    layers = {"lora_rank": 4, "lora_alpha": 8, "lora_targets": ("q_proj",)}
    home = Home(tmp_path)
    facts = FULL | {"model": "tiny-a (lora)", "quantisation": "nf4", "layers": layers}
    lora = Saving(home.checkpoints, facts, saving._metrics)
    await save(lora, worker)

    def begun(**flags):
        return remembered.with_begun(home, *collect(task="arithmetic", flags=flags, environment={}))

    settings, origins = begun()
    assert {name: getattr(settings, name) for name in layers} == layers
    assert origins["model"] == origins["lora_alpha"] == "home"
    assert begun(lora=True, lora_alpha=8, quantisation="nf4")[0].lora_rank == 4
    for name, value in (
        ("lora_alpha", 32),
        ("lora_rank", 8),
        ("lora_targets", "v_proj"),
        ("quantisation", "none"),
    ):
        with pytest.raises(UsageError, match=f"were trained with {name}=.*, not {value}"):
            begun(**{name: value})
    assert begun(model="tiny-b", lora_alpha=32)[0].lora_alpha == 32  # another model is refused by the checkpoint itself


class Failing:
    """A compute process that cannot write."""

    async def call(self, request):
        if isinstance(request, Write):
            raise OSError("the disk is gone")


@pytest.mark.parametrize("done", [True, False])
async def test_a_failed_last_checkpoint_is_told(saving, caplog, done):
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    saving.abandon()  # there is none
    await saving.checkpoint(Failing(), Progress(step=1))
    if done:
        await saving.wait(10)
    saving.abandon()
    assert ("not written (the disk is gone); there was nothing to save yet" in caplog.text) == done
    assert not saving.writing
    await asyncio.sleep(0)
    gc.collect()
    assert not unheard


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A model in the folder `m` of the present directory."""
    shutil.copytree(BUILT_IN_DIR / "tiny-a", tmp_path / "here" / "m")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here" / "m"


def checkpointed(path, model):
    checkpoints = Checkpoints(path)
    directory = checkpoints.begin(1)
    (directory / "x").write_text("x")
    facts = {
        "model": labelled(model, "full"),
        "optimiser": "adamw",
        "progress": Progress(step=1).facts(),
    }
    checkpoints.commit(directory, facts)
    return path


@pytest.mark.parametrize("written", ["m", "./m", "WHOLE"])
@pytest.mark.parametrize("typed", ["m", "./m", "../here/m", "WHOLE"])
def test_a_folder_is_one_model_however_it_is_typed(written, typed, folder, tmp_path):
    written, typed = (str(folder) if name == "WHOLE" else name for name in (written, typed))
    checkpoints = checkpointed(tmp_path / "checkpoints", written)
    remembered.refuse_other_settings(checkpoints, Settings(model=typed))
    assert remembered.settled(checkpoints, "tiny-b") == {}
    assert remembered.settled(checkpoints, typed) == {"lora": False, "optimiser": "adamw", "quantisation": "none"}


def test_a_short_name_and_its_hub_id_are_one_model():
    assert same_model("qwen2.5-3b", "Qwen/Qwen2.5-3B")
    assert same_model("Qwen2.5-3b", "qwen2.5-3b")
    assert not same_model("qwen2.5-3b", "qwen2.5-3b-instruct")
    assert not same_model("tiny-a", "tiny-b")
    assert same_model("gone/folder/m", "gone/folder/m"), "an old home's, whose folder is gone"


def test_a_folder_is_written_down_so_that_it_is_found_from_everywhere(folder):
    assert lasting("m") == str(folder)
    assert lasting("tiny-a") == "tiny-a"
    assert lasting("qwen2.5-3b") == "qwen2.5-3b"


def test_another_model_of_the_same_folder_name_is_refused(folder, tmp_path):
    shutil.copytree(folder, folder.parent / "other" / "m")
    checkpoints = checkpointed(tmp_path / "kept" / "checkpoints", str(folder))
    with pytest.raises(UsageError, match="of another model"):
        remembered.refuse_other_settings(checkpoints, Settings(model="other/m"))
    with pytest.raises(UsageError, match="trained otherwise"):
        remembered.refuse_other_settings(checkpoints, Settings(model="m", lora=True))
