"""What a checkpoint is made of: a copy in main memory where there is room for it, else the weights themselves."""

import errno
import math
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from ftis_node.errors import FtisError, UserError
from ftis_node.learner import tensorfile
from ftis_node.learner.tensorfile import write_tensors
from ftis_node.worker.checkpoint import SPARE
from tests.support.small_models import batch_of, opened_engine

KINDS = [
    {"lora": False},
    {"lora": True},
    {"lora": False, "dtype": "bfloat16"},
]


def train(engine):
    assert engine.step(batch_of([1, 2], engine.generate([1, 2]).groups, uneven=True)).skipped is None


def free(monkeypatch, size):
    there = psutil.virtual_memory()._replace(available=size)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)


def written(directory):
    return load_file(directory / "trainable.safetensors") | load_file(directory / "optimiser.safetensors")


def state(engine):
    weights, optimiser = engine.learner.state()
    return {**weights, **optimiser}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def no_copies(engine, monkeypatch):
    whole = engine.learner.state

    def only_live(*, live=False):
        assert live, "everything was copied into a memory that has no room for it"
        return whole(live=live)

    monkeypatch.setattr(engine.learner, "state", only_live)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_snapshots_size_is_counted(kind, tmp_path, monkeypatch):
    """At the first one there is nothing on disk to go by, and the optimiser's state only begins with the first step."""
    engine = opened_engine(**kind)
    for steps in (0, 1):
        if steps:
            train(engine)
        copies = state(engine)
        random = torch.get_rng_state().nbytes + engine.random.get_state().nbytes
        size = sum(tensor.nbytes for tensor in copies.values()) + random
        for room, at_once in ((SPARE * size + 1, False), (SPARE * size - 1, True)):
            directory = tmp_path / f"{steps} {at_once}"
            directory.mkdir()
            with monkeypatch.context() as patch:
                free(patch, room)
                if at_once:
                    no_copies(engine, patch)
                engine.snapshot(str(directory))
            assert any(directory.iterdir()) == at_once
            engine.write(str(directory))
            assert same(written(directory), copies)


def test_lack_is_said_once(tmp_path, monkeypatch, caplog):
    engine = opened_engine()
    free(monkeypatch, 1)
    for _ in range(3):
        engine.snapshot(str(tmp_path))
    assert caplog.text.count("training waits while it is written") == 1


def test_a_copy_that_does_not_fit_after_all_is_written_at_once(tmp_path, monkeypatch):
    engine = opened_engine()
    whole = engine.learner.state

    def short(*, live=False):
        if not live:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte.")
        return whole(live=live)

    monkeypatch.setattr(engine.learner, "state", short)
    engine.snapshot(str(tmp_path))
    assert same(written(tmp_path), {**whole()[0], **whole()[1]})


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), UserError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), UserError),
        (OSError(errno.EFBIG, "File too large"), OSError),
    ],
)
def test_a_full_disk_is_a_persons_business_and_another_fault_is_not(error, told, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    engine = opened_engine()
    monkeypatch.setattr("ftis_node.worker.checkpoint.write_tensors", fail)
    with pytest.raises(told, match=r"No space|quota|too large"):
        engine.save(str(tmp_path))


# --- the file ---------------------------------------------------------------------------------------------------------

dtypes = st.sampled_from(sorted(tensorfile._NAMES, key=str))
shapes = st.lists(st.integers(0, 4), max_size=3)


@given(st.dictionaries(st.text(), st.tuples(dtypes, shapes), max_size=6), st.dictionaries(st.text(), st.text()))
def test_a_file_is_read_by_the_formats_own_library(parts, metadata):
    tensors = {name: torch.arange(math.prod(shape)).reshape(shape).to(dtype) for name, (dtype, shape) in parts.items()}
    tensors.pop("__metadata__", None)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        write_tensors(path, tensors, metadata)
        found = load_file(path)
        with safe_open(path, "pt") as file:
            assert (file.metadata() or {}) == metadata
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float())


def test_large_and_transposed_tensors_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "_PART", 7)
    tensors = {
        "a": torch.randn(5, 9).T,
        "b": torch.randn(3).bfloat16(),
        "c": torch.tensor(2),
    }
    write_tensors(tmp_path / "file", tensors)
    assert same(load_file(tmp_path / "file"), tensors)


def test_a_file_that_is_written_again_leaves_those_who_read_it_what_they_read(tmp_path):
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.zeros(100_000)})
    before = load_file(path)["a"]
    write_tensors(path, {"a": torch.ones(10)})
    assert not before.any()
    assert load_file(path)["a"].all()


def test_a_dtype_that_no_file_holds_is_named(tmp_path):
    with pytest.raises(FtisError, match=r"odd is of torch\.complex64"):
        write_tensors(tmp_path / "file", {"odd": torch.zeros(1, dtype=torch.complex64)})
