"""Recorded tokens, on the CPU: by a recorder that keeps kernels and addresses, as a CUDA graph does, and no Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ftis_node.packet import Completion
from ftis_node.policy.generate import graphs, native
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.joint import join, joint, plain
from ftis_node.policy.policy import Policy
from tests.support.small_models import logprob_errors, seeded, tiny_policy, twin

PROMPTS = [[5, 9, 14], [20], [7, 7, 8, 3, 2, 25]]
POLICIES = {"full": tiny_policy(vocab_size=32), "lora": tiny_policy(vocab_size=32, lora=True)}


class Kernels(TorchDispatchMode):
    """Every operation in turn, with the tensors that it read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, _tensors(out)))
        return out


class OnTheCpu:
    """What a recorder gives. It does the work once to see its kernels, and puts back all that this changed."""

    made = 0

    def __init__(self, work: Callable[[], None], generator: torch.Generator | None, pool: Any) -> None:
        assert generator is not None
        state, before = generator.get_state(), Changed()
        with before, Kernels() as self._kernels:
            work()
        before.undo()
        generator.set_state(state)
        OnTheCpu.made += 1

    def replay(self) -> None:
        for func, args, kwargs, outs in self._kernels.calls:
            again = _tensors(func(*args, **kwargs))
            for old, new in zip(outs, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Changed(TorchDispatchMode):
    """Copies of the tensors that operations write in place, as they were before."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write and place < len(args):
                storage = args[place].untyped_storage()
                if storage.data_ptr() not in self._before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self._before[storage.data_ptr()] = (whole, whole.clone())
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        for whole, copy in self._before.values():
            whole.copy_(copy)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def groups(policy: Policy, eos: tuple[int, ...]) -> list[list[Completion]]:
    return generate(policy, PROMPTS, group=8, sampling=Sampling(40, 1.1, eos), generator=seeded(3))


def completions(policy: Policy, eos: tuple[int, ...]) -> list[Completion]:
    return [completion for group in groups(policy, eos) for completion in group]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes that a GPU has, looks as rare as there, and a recorder."""
    OnTheCpu.made = 0
    monkeypatch.setitem(native._LOOK_EVERY, "cpu", 8)
    monkeypatch.setitem(native._TOKENS_READ, "cpu", 16)
    monkeypatch.setitem(native._PARTS, "cpu", 8)
    monkeypatch.setitem(graphs.RECORDERS, "cpu", OnTheCpu)


@pytest.mark.parametrize("kind", POLICIES)
def test_replayed_tokens_are_those_of_the_modules(kind: str, recording: None) -> None:
    policy = POLICIES[kind]
    made = groups(policy, (1, 2))
    lengths = {len(completion) for group in made for completion in group}
    assert len(lengths) > 3 and max(lengths) == 40, "some end early, some never"
    assert OnTheCpu.made >= 3, "own tokens in multiples of 16"
    assert float(logprob_errors(policy, PROMPTS, made, 1.1).max()) < 2e-5


@pytest.mark.parametrize("kind", POLICIES)
def test_they_are_the_tokens_that_are_drawn_without_recording(
    kind: str, recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers are drawn from the generator, so that a graph repeats none of them."""
    recorded = completions(POLICIES[kind], (1, 2))
    monkeypatch.delitem(graphs.RECORDERS, "cpu")
    eager = completions(POLICIES[kind], (1, 2))
    for one, other in zip(recorded, eager, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-6)


def test_rows_that_end_are_dropped_in_few_sizes(recording: None) -> None:
    sizes = set()
    step = native.Decoder.step

    def seen(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        sizes.add(len(tokens))
        return step(self, tokens)

    native.Decoder.step = seen  # type: ignore[method-assign]
    try:
        completions(POLICIES["full"], tuple(range(4)))
    finally:
        native.Decoder.step = step  # type: ignore[method-assign]
    assert len(sizes) > 1 and all(size % 3 == 0 for size in sizes)


def test_the_cpus_own_shapes_read_nothing_in_vain() -> None:
    made = groups(POLICIES["full"], (1, 2))
    assert float(logprob_errors(POLICIES["full"], PROMPTS, made, 1.1).max()) < 2e-5


def test_a_token_that_cannot_be_recorded_is_drawn_all_the_same(
    recording: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    expected = completions(POLICIES["full"], (1, 2))
    monkeypatch.setitem(graphs.RECORDERS, "cpu", broken)
    made = completions(POLICIES["full"], (1, 2))
    assert [len(completion) for completion in made] == [len(completion) for completion in expected]
    assert caplog.text.count("does without CUDA graphs: operation not permitted when stream is capturing") == 1


def test_a_recorder_that_misses_a_change_would_be_noticed(recording: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above could not fail: a number that Python counts stays as it was recorded."""

    def end(self: Any) -> None:
        self.place = self.place + 1  # a new tensor, where the recorded kernels read the old one

    eager = completions(POLICIES["full"], (1, 2))
    monkeypatch.setattr(native.SharedCache, "end", end)
    recorded = completions(POLICIES["full"], (1, 2))
    pairs = zip(eager, recorded, strict=True)
    assert any(not np.array_equal(one.token_ids, other.token_ids) for one, other in pairs)


@pytest.mark.parametrize("kind", POLICIES)
def test_joint_matrices_give_the_same_and_follow_what_training_changes(kind: str) -> None:
    """A GPU's layout, on the CPU: a product in place of three, and of two; the parameters are still there."""
    policy = twin(POLICIES[kind])
    names = [name for name, _ in policy.model.named_parameters()]
    join(policy.model)
    layer = policy.causal_lm.model.layers[0]
    assert joint([part.weight for part in map(plain, (layer.mlp.gate_proj, layer.mlp.up_proj)) if part]) is not None
    for changed in range(2):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.01 * changed)
        assert float(logprob_errors(policy, PROMPTS, groups(policy, (1, 2)), 1.1).max()) < 2e-5
    assert [name for name, _ in policy.model.named_parameters()] == names
