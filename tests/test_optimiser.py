"""An optimiser's state outlives the process, whichever optimiser it is: 8-bit AdamW, and layouts yet unknown."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save
from torch import Tensor

from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError, UsageError
from ftis_node.fit.memory import Workload
from ftis_node.learner.optimiser import Optimiser
from ftis_node.learner.rehearsal import unsaveable
from ftis_node.learner.state import flattened, unflattened
from ftis_node.node.checkpointing import Saving
from ftis_node.node.progress import Progress
from ftis_node.observe.metrics import MetricsLog
from ftis_node.text import GB
from ftis_node.worker.client import Worker
from ftis_node.worker.messages import Generate, Load, Open, Save, Step, StepGroup
from ftis_node.worker.planning import settle
from tests.support.small_models import arithmetic_run, arithmetic_settings, batch_of

# So large a rank that LoRA's matrices, too, are kept in 8 bits.
KINDS: list[dict[str, Any]] = [{"lora": False}, {"lora": True, "lora_rank": 128}, {"lora": False, "dtype": "bfloat16"}]
GSM8K = Workload(prompt_tokens=512, completion_tokens=256, group=12, batch_groups=24)


async def process(**settings: Any) -> Worker:
    worker = Worker()
    worker.start()
    asked = arithmetic_settings(optimiser="adamw8bit", **settings)
    await worker.call(Open(arithmetic_run(await worker.call(Load(settings=asked, task="arithmetic")))))
    return worker


async def groups(worker: Worker) -> list[StepGroup]:
    """Some of which half the completions are said to be right."""
    return batch_of([1, 2], (await worker.call(Generate([1, 2]))).groups, uneven=True)


async def saved(worker: Worker, directory: Path) -> dict[str, Tensor]:
    directory.mkdir()  # noqa: ASYNC240
    await worker.call(Save(str(directory)))
    return load_file(directory / "trainable.safetensors") | load_file(directory / "optimiser.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_8_bit_adamw_goes_on_bit_for_bit_in_a_new_process(kind: dict[str, Any], tmp_path: Path) -> None:
    one, other = await process(**kind), Worker()
    try:
        batch = await groups(one)
        for _ in range(2):
            assert (await one.call(Step(batch))).skipped is None
        saving = Saving(tmp_path / "checkpoints", "tiny-a", "adamw8bit", MetricsLog(tmp_path / "metrics.jsonl"))
        await saving.checkpoint(one, Progress(step=2))
        await saving.flush()
        await one.call(Step(batch))
        expected = await saved(one, tmp_path / "one")
        other = await process(**kind)
        found = await saving.restore(other)
        assert found is not None and found.step == 2
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
entries = st.dictionaries(
    names, st.recursive(plain | tensors, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=8)
)


def alike(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


@given(entries)
def test_tensors_numbers_none_and_dictionaries_of_them_come_back_from_a_file(entry: dict[str, Any]) -> None:
    apart = {name: tensor.clone() for name, tensor in flattened(entry).items()}
    assert alike(unflattened(load(save(apart))), entry)


@pytest.mark.parametrize("strange", [{1, 2}, object(), [torch.zeros(1)], {7: 1.0}, {"a.b": 1.0}, {"a/b": 1.0}])
def test_what_cannot_be_written_is_named(strange: object) -> None:
    with pytest.raises(FtisError, match=r"exp\.odd"):
        flattened({"step": 1, "exp": {"odd": strange}})


class Momentum(torch.optim.Optimizer):
    """As others might keep their state: nested, with numbers and None between the tensors; and one that cannot be."""

    odd: object = None

    def __init__(self, parameters: Any, lr: float, **_: Any) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state |= {"count": 0, "exp_avg": {"first": torch.zeros_like(parameter), "none": None}}
                    if self.odd is not None:
                        state["history"] = self.odd
                state["count"] += 1
                state["exp_avg"]["first"].mul_(0.9).add_(parameter.grad)
                with torch.no_grad():
                    parameter -= self.param_groups[0]["lr"] * state["exp_avg"]["first"] / state["count"]


def small(seed: int) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(5, generator=generator)) for name in ("a/b", "c.d")}


def step(subject: Optimiser, weights: dict[str, torch.nn.Parameter]) -> None:
    for weight in weights.values():
        weight.grad = torch.linspace(-1, 2, weight.numel())
    subject.step(norm=subject.gradient_norm(), scale=1.0)


def test_another_optimisers_nested_state_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", Momentum)
    one, other = small(0), small(1)
    settings = Settings(warmup_steps=0)  # which counts AdamW's own steps
    before, after = Optimiser(one, settings, 1e-2), Optimiser(other, settings, 1e-2)
    step(before, one)
    after.restore(*(load(save(part)) for part in before.state()))
    step(before, one)
    step(after, other)
    assert all(torch.equal(one[name], other[name]) for name in one)


# --- before an hour of work -------------------------------------------------------------------------------------------


def test_the_installed_optimisers_can_be_saved() -> None:
    assert unsaveable("adamw", torch.device("cpu")) is None and unsaveable("adamw8bit", torch.device("cpu")) is None


def test_a_rehearsal_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    unsaveable.cache_clear()
    assert unsaveable("adamw8bit", torch.device("cpu")) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def strange_eight_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import bitsandbytes.optim

    monkeypatch.setattr(Momentum, "odd", {3, 4})
    monkeypatch.setattr(bitsandbytes.optim, "AdamW8bit", Momentum)
    unsaveable.cache_clear()
    yield
    unsaveable.cache_clear()


@pytest.mark.usefixtures("strange_eight_bits")
def test_an_optimiser_that_cannot_be_saved_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(UsageError, match=r"adamw8bit cannot be used here: .*history") as caught:
        settle(Settings(model="tiny-a", device="cpu", optimiser="adamw8bit"), GSM8K, {})
    assert "optimiser=adamw" in caught.value.fix


def test_a_node_that_cannot_choose_8_bits_does_not_import_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str, device: torch.device) -> str | None:
        raise AssertionError("bitsandbytes takes seconds to import")

    monkeypatch.setattr("ftis_node.worker.planning.unsaveable", asked)
    assert settle(Settings(model="tiny-a", device="cpu"), GSM8K, {})[1].optimiser == "adamw"


@pytest.mark.usefixtures("strange_eight_bits")
def test_the_plan_does_not_choose_an_optimiser_that_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 24 GB on which 8 bits would be the best way, as far as planning sees."""
    monkeypatch.setattr("ftis_node.policy.measure.where_to_look", lambda source: {"local_files_only": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (23 * GB, 24 * GB))
    asked = Settings(model="qwen2.5-1.5b")
    monkeypatch.setattr("ftis_node.worker.planning.unsaveable", lambda name, _: unsaveable(name, torch.device("cpu")))
    _, chosen = settle(asked, GSM8K, {})
    assert chosen.optimiser == "adamw" and chosen.fits
    monkeypatch.setattr("ftis_node.worker.planning.unsaveable", lambda name, device: None)
    assert settle(asked, GSM8K, {})[1].optimiser == "adamw8bit", "else the test would show nothing"


def test_a_number_that_is_none_survives() -> None:
    assert math.isnan(unflattened(flattened({"x": math.nan}))["x"])
