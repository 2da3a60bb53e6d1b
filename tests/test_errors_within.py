"""Errors that no command line reaches in a moment: each is made by what makes it, on its own."""

import errno
import os
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from ftis_node.cli import local
from ftis_node.cli.detach import detach
from ftis_node.cli.task import opened
from ftis_node.config.settings import Settings
from ftis_node.demo import Demo
from ftis_node.errors import FtisError, UsageError, UserError
from ftis_node.export.model import check_target
from ftis_node.lab import crew
from ftis_node.lab.bench.namespaces import namespaces, run_tool
from ftis_node.lab.replaying.stored import StoredPackets
from ftis_node.lab.reporting.index import BEGIN, END, write_index
from ftis_node.lab.spec import _sha256 as sha256_of_named_file
from ftis_node.learner.optimiser import eight_bit
from ftis_node.node import assembly
from ftis_node.node.checkpointing import Saving
from ftis_node.node.compute import FAILURES, ComputeProcess
from ftis_node.node.options import JoinOptions
from ftis_node.observe import plot
from ftis_node.observe.answers import Peers, Status
from ftis_node.observe.metrics import MetricsLog
from ftis_node.policy.load import choose_device, load_policy, make_policy
from ftis_node.policy.ready import ready
from ftis_node.preflight.bugreport import pack
from ftis_node.store.checkpoints import Checkpoints
from ftis_node.store.home import Home
from ftis_node.swarm import addresses
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.transport import Listening
from ftis_node.tasks import load_task
from ftis_node.tokenizer.asking import refuse_rows
from ftis_node.worker.client import WorkerDied
from ftis_node.worker.restore import find_checkpoint, load_trained
from tests.support.cli import refused
from tests.support.mistakes import DEAD
from tests.support.small_models import tiny_policy, tiny_tokenizer
from tests.support.steppers import idle_node


def test_a_full_disk_ends_the_daemon_with_what_to_do(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Home, "make_runtime", full)
    with pytest.raises(UserError, match=r"No space left.*Make room on its disk and start the same command again"):
        uvloop.run(idle_node(tmp_path).run())


def test_a_home_that_was_removed_is_not_called_full(tmp_path):
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert "was removed meanwhile" in Home(tmp_path / "home").failed(gone).what


def test_one_key_is_one_node(tmp_path, monkeypatch):
    async def alive(*_):
        return True

    monkeypatch.setattr(assembly, "somebody_else", alive)
    with pytest.raises(UserError, match=r"Another node with the key of .* is running somewhere"):
        uvloop.run(idle_node(tmp_path, DEAD).run())


async def test_a_compute_process_that_only_fails_is_given_up(tmp_path):
    process = ComputeProcess(JoinOptions(home=Home(tmp_path)))
    process._failures = FAILURES
    with pytest.raises(UserError, match=r"failed 6 times in a row, at last with: It was killed\..*micro_batch_tokens"):
        await process.failed(WorkerDied("It was killed."), 0)


async def test_a_network_daemon_that_does_not_start_says_why(tmp_path):
    (tmp_path / "key").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="p2pd did not start"):
        await Libp2p.start(Listening(tmp_path / "key", tmp_path, "127.0.0.1"))


def episodes_asked():
    opened(replace(load_task("arithmetic"), turns=2), [0], "tiny-a", None, None, None).__enter__()


def asked_for(folder):
    saving = Saving(folder, {"model": "tiny-a (full)"}, MetricsLog(folder / "metrics.jsonl"))
    saving.next_bytes = 1 << 60
    saving.ask(1)


def endless():
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<|stop|>"})
    refuse_rows(tokenizer, len(tokenizer) - 1, "tiny")


ALONE = {
    "a machine without ports": (lambda _: addresses.free_port("127.0.0.1"), UserError, "no free port"),
    "8 bits without their library": (lambda _: eight_bit(), UsageError, "needs bitsandbytes"),
    "packets that cannot be read": (lambda folder: StoredPackets(folder / "file"), UserError, "cannot be read"),
    "a file that an experiment names is missing": (lambda _: sha256_of_named_file("none"), UsageError, "Cannot read"),
    "a tool that is missing": (lambda _: run_tool("surely-not-there", "x"), UserError, "no surely-not-there here"),
    "a tool that fails": (lambda _: run_tool("false"), UserError, "`false` failed"),
    "a device that torch has and a node does not": (lambda _: choose_device("meta"), UsageError, "device 'meta'"),
    "episodes that a model is asked in one answer": (lambda _: episodes_asked(), UsageError, "have several answers"),
    "a checkpoint that an owner asks for and the disk cannot hold": (asked_for, UsageError, "and a checkpoint takes"),
    "a file that is no task": (lambda folder: load_task(str(folder / "file"), code=True), UsageError, "but no task"),
    "an end that a model has no row for": (lambda _: endless(), UsageError, "can never end"),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_one_call_ends_with(case, monkeypatch, tmp_path):
    monkeypatch.setattr(addresses, "_PORT_TRIES", 0)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    (tmp_path / "file").write_text("no database at all, however long one reads in it" * 100)
    call, kind, match = ALONE[case]
    with pytest.raises(kind, match=match):
        call(tmp_path)


def test_a_demo_whose_node_ends_says_its_last_words(tmp_path):
    demo = Demo(tmp_path / "out", listener=False, steps=1, quiet=True)
    member = demo.members[0]
    member.home.path.mkdir(parents=True)
    (member.home.path / "output.log").write_text("error: It is wrong.\n")
    member.process = subprocess.Popen(["true"])
    member.process.wait()
    with pytest.raises(UserError, match=r"ended by itself: error: It is wrong\."):
        demo._check_alive(member)


def test_a_report_replaces_no_file(tmp_path):
    pack({"a": "b"}, tmp_path / "r.tar.gz")
    with pytest.raises(UsageError, match="exists already"):
        pack({"a": "b"}, tmp_path / "r.tar.gz")


# --- models and checkpoints -------------------------------------------------------------------------------------------


def test_a_model_without_checkpointing_and_one_that_is_random_in_training():
    policy = tiny_policy()
    policy.causal_lm.supports_gradient_checkpointing = False
    settings = Settings(device="cpu", gradient_checkpointing=True)
    with pytest.raises(UsageError, match="no gradient checkpointing"):
        make_policy(policy.model, policy.tokenizer, settings)
    embedding = policy.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, _, out: out * (1.5 if module.training else 1.0))
    with pytest.raises(UsageError, match="dropout that cannot be switched off"):
        ready(policy)


def test_a_checkpoint_of_nothing_and_one_that_goes_away(tmp_path):
    from safetensors.torch import save_file

    policy = load_policy(Settings(device="cpu"))
    weights = {name: value.detach().clone() for name, value in policy.model.named_parameters()}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step, label in ((1, "tiny-a (full)"), (2, "a model of mine")):
        directory = checkpoints.begin(step)
        save_file(weights, directory / "trainable.safetensors")
        checkpoints.commit(directory, {"model": label, "progress": {"step": step}})
    with pytest.raises(UserError, match="does not say of which model"):
        find_checkpoint(str(tmp_path / "checkpoints" / "step-00000002"))
    found = find_checkpoint(str(tmp_path / "checkpoints" / "step-00000001"))
    (found.path / "trainable.safetensors").unlink()
    with pytest.raises(UserError, match=r"cannot be read.*Try again"):
        load_trained(Settings(device="cpu", lora=False), found)


# --- the lab ----------------------------------------------------------------------------------------------------------


def test_an_index_needs_a_page_with_a_place(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        write_index(tmp_path)
    (tmp_path / "README.md").write_text("# Evidence\n")
    with pytest.raises(UsageError, match="no place for the claims"):
        write_index(tmp_path)
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    write_index(tmp_path)


def test_what_ends_a_trial_is_told_with_what_to_do(tmp_path):
    for error, match in (
        (OSError(errno.ENOSPC, "No space left on device"), "Make room"),
        (FtisError("It went wrong."), "What there is of it so far"),
        (UsageError("It is wrong.", "Mend it."), "Mend it"),
    ):
        with pytest.raises(UserError, match=match), crew._for_a_person(tmp_path):
            raise error
    job = Future()
    job.set_exception(BrokenProcessPool("killed"))
    with pytest.raises(UserError, match="ended by itself: killed, or out of memory"):
        crew._check(job)


def test_network_namespaces_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="need root"), namespaces(2, None):
        pass


# --- what came with the commands of an owner --------------------------------------------------------------------------


def test_a_daemon_that_does_not_start_says_why_or_where(tmp_path):
    with pytest.raises(UserError, match=r"ended while it was starting \(exit code 2\).*output.log") as ended:
        detach(tmp_path / "home", ["join", "--no-such-flag"], print)
    assert ended.value.exit_code == 2
    told = []
    with pytest.raises(SystemExit, match="2"):
        detach(tmp_path / "home", ["eval", "--checkpoint", "tiny-a", "--task", "nonsense"], told.append)
    assert told[-2].startswith("error: There is no task 'nonsense'")


def test_a_node_without_a_page_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "ask_daemon", lambda *_: Status(state="ONLINE"))
    with pytest.raises(UserError, match="serves no page"):
        local.page(tmp_path, open_=False, json=False)


def test_top_into_a_pipe_is_one_look(monkeypatch, tmp_path, capsys):
    answers = iter([Status(state="ONLINE", reason="It is well."), Peers([])])
    monkeypatch.setattr(local, "ask_daemon", lambda *_: next(answers))
    local.top(tmp_path)
    assert "It is well." in capsys.readouterr().out


def test_pictures_need_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(plot, "can_draw", lambda: False)
    told = refused("lab", "report", tmp_path)
    assert isinstance(told, UsageError)
    assert "[lab]" in told.fix


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    def forbidden(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        check_target(tmp_path, overwrite=False, source=tmp_path.parent / "elsewhere")


def test_a_task_in_python_has_rows_and_a_source_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_tasks.py").write_text(
        "from dataclasses import replace\nfrom ftis_node.tasks import Score, make_task\n"
        "def made(**how):\n    return make_task([(f'{i}?', str(i)) for i in range(20)], **how)\n"
        "def empty():\n    return replace(made(), train=())\n"
        "def hidden():\n    space = {'__name__': 'nowhere'}\n"
        "    exec('def judge(text, answer): return None', space)\n    return made(reward=space['judge'])\n"
    )
    with pytest.raises(UsageError, match="nothing to train on"):
        load_task("odd_tasks:empty", code=True)
    with pytest.raises(UsageError, match="no source file"):
        load_task("odd_tasks:hidden", code=True)


@pytest.mark.parametrize(
    "instead",
    [
        {"state": "ONLINE", "pausing": False},
        {"state": "STOPPING", "pausing": True},
    ],
)
def test_a_wait_for_a_pause_ends(instead, monkeypatch, tmp_path):
    answers = iter([Status(state="ONLINE", pausing=True), Status(**instead)])
    monkeypatch.setattr(local, "ask_daemon", lambda *_, **__: next(answers))
    monkeypatch.setattr(local, "POLL_SECONDS", 0.0)
    with pytest.raises(UserError, match=f"does not pause: it is {instead['state']}"):
        local.pause(tmp_path, wait=True, json=False)
