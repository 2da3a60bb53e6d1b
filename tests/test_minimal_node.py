"""docs/minimal_node.py does what the product does: the same rows, bytes, rewards and loss; and its models learn."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers.utils.logging import enable_progress_bar

from ftis_node.config.settings import Settings
from ftis_node.draw import draw
from ftis_node.learner import Learner, Part, TrainingGroup
from ftis_node.objective import PRESETS
from ftis_node.packet import Packet, decode, encode
from ftis_node.policy.load import load_policy
from ftis_node.tasks import load_task
from ftis_node.tasks.rewards import score

FILE = Path(__file__).parent.parent / "docs" / "minimal_node.py"


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    specification = importlib.util.spec_from_file_location("minimal_node", FILE)
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules["minimal_node"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def packets(minimal) -> dict[str, list[bytes]]:
    torch.manual_seed(1)
    return {name: minimal.Node(name).generate(3) for name in ("tiny-a", "tiny-b")}


def test_its_task_rows_and_rewards_are_the_products(minimal, packets):
    task = load_task("arithmetic")
    for own, rows in (
        (minimal.TRAIN, task.train),
        (minimal.EXAM, task.held_out),
    ):
        ours = [(question, str(answer)) for question, answer in own]
        assert ours == [(row.question, row.answer) for row in rows]

    rewards = []
    for slot, data in enumerate(packets["tiny-a"]):
        row = task.train[draw(minimal.RUN, b"tiny-a", 3, slot, len(task.train))]
        group = minimal.admit(data, b"tiny-a", 3, slot)
        assert group.prompt == minimal.TOKENIZER.encode(row.question).ids
        for ids, given in zip(group.answers, group.rewards, strict=True):
            words = [one for one in ids if one != minimal.END]
            text = minimal.TOKENIZER.decode(words, skip_special_tokens=False)
            deserved = 0.0
            if ids[-1] == minimal.END:
                deserved = score(task.reward, text, row.answer).reward
            assert given == deserved, text
        rewards += group.rewards
    assert {*rewards} == {0.0, 1.0}


def test_its_bytes_are_packets(minimal, packets):
    for slot, data in enumerate(packets["tiny-a"]):
        packet = decode(data)
        assert isinstance(packet, Packet)
        assert encode(packet) == data
        assert packet.round == 3
        assert packet.slot == slot

        group = minimal.admit(data, b"tiny-a", 3, slot)
        completions = list(packet.completions())
        assert [one.token_ids.tolist() for one in completions] == group.answers
        assert [one.logprobs.tolist() for one in completions] == group.claims
        assert len(data) < 8 * sum(map(len, group.answers)) + 120


LIES = {
    "another author": (slice(0, 0), b"", b"tiny-b", 3),
    "another round": (slice(0, 0), b"", b"tiny-a", 2),
    "a token that is none": (slice(-8, -4), b"\x1a\x00\x00\x00", b"tiny-a", 3),
    "a log-prob of 1": (slice(-4, None), b"\x00\x00\x80\x3f", b"tiny-a", 3),
    "a cut": (slice(-1, None), b"", b"tiny-a", 3),
}


@pytest.mark.parametrize("lie", LIES)
def test_it_refuses(minimal, packets, lie):
    place, new, author, round = LIES[lie]
    data = bytearray(packets["tiny-a"][0])
    data[place] = new
    with pytest.raises(ValueError):
        minimal.admit(bytes(data), author, round, 0)


def test_its_loss_and_gradient_are_the_products(minimal, packets):
    """A step of each on the same groups, most of them foreign; the filter drops some of these."""
    settings = Settings(learning_rate=2e-4, warmup_steps=0, betas=(0.9, 0.95))
    objective = PRESETS["ftis"].replace(**settings.objective_parts("arithmetic", filters=True))
    learner = Learner(load_policy(Settings(model="tiny-a")), objective, settings, 1.0)
    node = minimal.Node("tiny-a")
    groups = []
    batch = []
    author = {"tiny-a": "own", "tiny-b": "peer"}
    for name, sent in packets.items():
        for slot, data in enumerate(sent):
            group = minimal.admit(data, name.encode(), 3, slot)
            groups.append(group)
            part = Part(author[name], [*decode(data).completions()], group.rewards)
            batch.append(TrainingGroup(group.prompt, [part]))

    report = learner.step(batch)

    assert report.diagnostics.sources["peer"]["filtered"] > 0
    assert node.step(groups) == pytest.approx(report.loss, abs=1e-6)

    ours = dict(node.model.named_parameters())
    norms = [parameter.grad.norm() for parameter in ours.values()]
    norm = torch.stack(norms).norm()
    assert float(norm) == pytest.approx(min(report.gradient_norm, 1.0), rel=1e-4)

    for name, parameter in learner.policy.model.named_parameters():
        apart = (parameter - ours[name]).detach().abs().max()
        assert float(apart) < 2e-5, "a step is 2e-4"


def test_two_rounds_of_it_run(minimal, capsys):
    nodes = minimal.train(["tiny-a", "tiny-b"], 2, sharing=True)
    assert [node.steps for node in nodes] == [2, 2]
    assert "tiny-a 0.3" in capsys.readouterr().out
    enable_progress_bar()


def test_a_reader_can_read_it_in_one_sitting():
    assert len(FILE.read_text().splitlines()) <= 250


@pytest.mark.slow
def test_it_learns_and_sharing_helps():
    """As a reader starts it."""
    ran = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True, check=True)
    ends = re.findall(r"(tiny-.)   alone (0\.\d+)   sharing (0\.\d+)", ran.stdout)
    assert [name for name, _, _ in ends] == ["tiny-a", "tiny-b"]
    for _, alone, sharing in ends:
        assert float(sharing) > float(alone) > 0.6
