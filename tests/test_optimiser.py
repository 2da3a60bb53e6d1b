"""An optimiser's state outlives the process, whichever optimiser it is: 8-bit AdamW, and layouts yet unknown."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save
from torch import Tensor

from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError
from ftis_node.fit.memory import Workload
from ftis_node.learner.state import flattened, unflattened
from ftis_node.node.checkpointing import Saving
from ftis_node.node.progress import Progress
from ftis_node.observe.metrics import MetricsLog
from ftis_node.worker.client import Worker
from ftis_node.worker.messages import Generate, Load, Open, Save, Step
from ftis_node.worker.planning import settle
from tests.support.small_models import arithmetic_run, arithmetic_settings, batch_of

# So large a rank that LoRA's matrices, too, are kept in 8 bits.
KINDS = [
    {"lora": False},
    {"lora": True, "lora_rank": 128},
    {"lora": False, "dtype": "bfloat16"},
]
GSM8K = Workload(prompt_tokens=512, completion_tokens=256, group=12, batch_groups=24)


async def process(**settings):
    worker = Worker()
    worker.start()
    asked = arithmetic_settings(optimiser="adamw8bit", **settings)
    await worker.call(Open(arithmetic_run(await worker.call(Load(settings=asked, task="arithmetic")))))
    return worker


async def groups(worker):
    """Some of which half the completions are said to be right."""
    return batch_of([1, 2], (await worker.call(Generate([1, 2]))).groups, uneven=True)


async def saved(worker, directory):
    directory.mkdir()
    await worker.call(Save(str(directory)))
    return load_file(directory / "trainable.safetensors") | load_file(directory / "optimiser.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_8_bit_adamw_goes_on_bit_for_bit_in_a_new_process(kind, tmp_path):
    one = await process(**kind)
    other = Worker()
    try:
        batch = await groups(one)
        for _ in range(2):
            assert (await one.call(Step(batch))).skipped is None
        saving = Saving(tmp_path / "checkpoints", {"model": "tiny-a"}, MetricsLog(tmp_path / "metrics.jsonl"))
        await saving.checkpoint(one, Progress(step=2))
        await saving.flush()
        await one.call(Step(batch))
        expected = await saved(one, tmp_path / "one")
        other = await process(**kind)
        found = await saving.restore(other)
        assert found.step == 2
        await other.call(Step(batch))
        after = await saved(other, tmp_path / "other")
    finally:
        await one.stop()
        await other.stop()
    assert any(value.dtype == torch.uint8 and name.endswith("/state1") for name, value in after.items())
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[name], expected[name]) for name in expected)


# --- layouts in general -----------------------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
tensors = st.sampled_from([torch.arange(3), torch.tensor(2.5), torch.zeros(0, dtype=torch.uint8), torch.eye(2).half()])
names = st.text("abc_ 0=", min_size=1)
entries = st.dictionaries(names, plain | tensors)


def alike(one, other):
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


@given(entries)
def test_tensors_numbers_and_none_come_back_from_a_file(entry):
    apart = {name: tensor.clone() for name, tensor in flattened(entry).items()}
    assert alike(unflattened(load(save(apart))), entry)


@pytest.mark.parametrize("strange", [{1, 2}, object(), [torch.zeros(1)], {7: 1.0}])
def test_what_cannot_be_written_is_named(strange):
    with pytest.raises(FtisError, match="state odd is a"):
        flattened({"step": 1, "odd": strange})


# --- before an hour of work -------------------------------------------------------------------------------------------


def test_a_node_that_cannot_choose_8_bits_does_not_import_them(monkeypatch):
    def asked():
        raise AssertionError("bitsandbytes takes seconds to import")

    monkeypatch.setattr("ftis_node.worker.planning.eight_bit", asked)
    assert settle(Settings(model="tiny-a", device="cpu"), GSM8K, {})[1].optimiser == "adamw"


def test_a_number_that_is_none_survives():
    assert math.isnan(unflattened(flattened({"x": math.nan}))["x"])
