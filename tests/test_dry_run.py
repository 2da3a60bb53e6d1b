"""`ftis-node join --dry-run` says what would be, and leaves no trace."""

import asyncio
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from ftis_node.cli.common import parse_pairs
from ftis_node.cli.join import NOTICE
from ftis_node.cli.join import join as join_command
from ftis_node.cli.run import new
from ftis_node.config.run import RunFile, dump_run_file, load_run_file, run_for
from ftis_node.config.settings import FLAGS, collect
from ftis_node.errors import UsageError, UserError
from ftis_node.node.options import JoinOptions
from ftis_node.node.run_source import remember_files, run_to_join
from ftis_node.policy import nf4
from ftis_node.policy.names import resolve
from ftis_node.preflight.case import Case
from ftis_node.preflight.checks import refused
from ftis_node.preflight.report import as_json
from ftis_node.store.home import Home
from ftis_node.swarm.certificates import MembersBook
from ftis_node.swarm.invitation import invite
from ftis_node.swarm.known_addresses import KnownAddresses
from ftis_node.tasks.task import place_of
from ftis_node.worker.engine import Engine
from tests.support.begun import begun
from tests.support.cli import Cli
from tests.support.command_lines import parsed, root
from tests.support.members import EVE, FOUNDER, PRIVATE, removal
from tests.support.served import taken_port
from tests.support.small_models import tiny_config
from tests.support.swarm import RUN, identity, make_run, member, transport

ROOT_DIR = Path(__file__).parent.parent


@pytest.fixture
def home(tmp_path) -> Home:
    """Where a node would be; there is nothing yet."""
    return Home(tmp_path / "home")


@pytest.fixture
def join(monkeypatch, cli, home) -> Cli:
    """`join --dry-run` in this process, with no hub to ask: exit code, stdout and stderr."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return partial(cli, "join", "--dry-run", "--device", "cpu", "--home", home.path)


@pytest.fixture
def report(join) -> Callable[..., dict[str, Any]]:
    """The same with `--json`: the object, where the exit code is as it should be."""

    def made(*flags, code=0):
        ended, out, err = join("--json", *flags)
        assert ended == code, err
        return json.loads(out)

    return made


def problems(told):
    """What a report says is wrong, in one text."""
    return " ".join(one["what"] for one in told["problems"])


def write_run(path, **changes):
    """A run file; without changes of a run with another rule and other data than any task's."""
    path.write_text(dump_run_file(RunFile(run=make_run(**changes))))


def test_a_first_start_is_told_and_leaves_nothing(report, home, tmp_path):
    told = report("--port", "4567", "--host", "127.0.0.1", "--set", "learning_rate=0.5")
    assert list(tmp_path.iterdir()) == []
    assert told["home"] == {"path": str(home.path), "new": True, "step": None, "id": None}
    assert told["settings"]["learning_rate"] == {"value": 0.5, "origin": "flags"}
    assert told["settings"]["wait"]["origin"] == "task arithmetic"
    assert "seed" not in told["settings"]
    model = told["model"]
    assert model["name"] == "tiny-a"
    assert model["kind"] == "full"
    assert model["fits"] is True
    assert told["task"]["found"]
    assert told["task"]["rows"] > 1000
    assert len(told["run"]["id"]) == 32
    assert "would start" in told["run"]["from"]
    assert "/ip4/127.0.0.1/tcp/4567" in told["network"]["listens"]
    assert told["network"]["dials"] == []
    assert "log-probs" in told["leaves"]
    assert "self-report a minute (the model's name" in told["leaves"]
    assert told["problems"] == []


def test_a_private_run_tells_members_alone(report, join):
    flags = ("--private", "--set", "lan=true", "--set", "self_report=never")
    told = report(*flags)
    private = told["leaves"]
    assert private.startswith("To members of the private run alone: its network address")
    for word in ("self-report", "local network", "public"):
        assert word not in private
    assert told["run"]["id"] is None
    assert ", private\n" in join(*flags)[1]


def test_people_read_the_run_what_a_listener_does_and_of_too_few_questions(report, join, tmp_path):
    code, out, _ = join("--set", "own_share=0")
    assert code == 0
    assert report()["run"]["id"] in out
    assert "samples nothing of its own" in out
    assert "lora_rank" not in out
    rows = [f"{n}+1=,{n + 1}\n" for n in range(40)]
    (tmp_path / "few.csv").write_text("prompt,answer\n" + "".join(rows))
    assert "questions held out, too few" in join("--task", tmp_path / "few.csv")[1]


def test_whatever_says_what_leaves_the_machine_names_what_a_self_report_holds():
    texts = [NOTICE, join_command.__doc__]
    for page in ("README.md", "docs/security.md"):
        section = (ROOT_DIR / page).read_text().split("## What leaves your machine\n")[1]
        texts.append(section.split("\n## ")[0])
    for text in texts:
        assert {"self-report", "--name", "self_report=never"} <= {*re.findall(r"[-\w]+(?:=never)?", text)}, text
    (option,) = (one for one in root().get_command(None, "join").params if one.name == "name")
    assert "self-report" in option.help


def test_the_run_it_would_start_is_what_it_starts(report, tmp_path, capfd):
    public = tmp_path / "run.toml"
    private = tmp_path / "private.toml"
    new(public)
    new(private, private=True, home=tmp_path / "founder")
    capfd.readouterr()
    assert report()["run"]["id"] == load_run_file(public).run.id.hex()
    ours = report("--home", tmp_path / "founder", "--private")
    assert ours["run"]["id"] == load_run_file(private).run.id.hex()
    for flags in ((), ("--task", "arithmetic")):
        told = report("--run", public, *flags)
        assert told["problems"] == []
        assert told["run"]["from"] == "file"


def test_a_file_that_a_stranger_names_is_not_opened(report, home, tmp_path):
    """Not even to say what is wrong with it."""
    forbidden = "not a run's to say"
    named = tmp_path / "run.toml"
    mine = tmp_path / "mine.jsonl"
    write_run(named, task="a/../none.jsonl", reward="integer")
    told = report("--run", named, code=2)
    assert forbidden in problems(told)
    assert "Cannot read" not in problems(told)
    assert not told["task"]["found"]
    mine.write_text("".join(f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(20)))
    told = report("--run", named, "--data", mine, code=2)
    assert told["task"]["found"]
    assert forbidden not in problems(told)
    home.path.mkdir()
    named.rename(home.run_file)
    assert forbidden in problems(report(code=2)), "nobody has agreed to it"
    run_id = load_run_file(home.run_file).run.id
    home.task_files.write_text(f'{{"run": "{run_id.hex()}"}}')
    text = problems(report(code=2))
    assert forbidden not in text, "a home that joined once goes on as it did"
    assert "Cannot read" in text
    remember_files(JoinOptions(home, data=mine), "none.jsonl", run_id)
    assert report(code=2)["task"]["found"], "with the file that was named then"
    (one,) = report("--task", "arithmetic", code=2)["problems"]
    assert one["what"].startswith("The data of arithmetic is not the run's"), "and nothing that follows from it"


def test_a_begun_home_goes_on(report, home):
    begun(home.path, 7, "tiny-a", "lora")
    before = sorted(home.path.rglob("*"))
    told = report()
    assert told["home"]["step"] == 7
    assert told["model"]["kind"] == "lora"
    assert sorted(home.path.rglob("*")) == before


def test_all_that_is_wrong_is_told_at_once(join, tmp_path):
    write_run(tmp_path / "run.toml")
    with taken_port() as port:
        flags = ("--run", tmp_path / "run.toml", "--task", "arithmetic", "--port", port, "--host", "127.0.0.1")
        code, out, err = join(*flags, "--json")
    told = json.loads(out)
    assert code == 2
    assert [line[:7] for line in err.splitlines()] == ["error: ", "       "] * 3
    for one in told["problems"]:
        assert err.count(one["what"]) == 1
    for word in ("The data of arithmetic", "reward rule", f"port {port}"):
        assert word in problems(told)
    assert told["run"]["id"] == RUN.id.hex()
    assert told["run"]["from"] == "file"


def test_what_takes_seconds_is_told_each_once_too(join, report):
    flags = ("--model", "tiny-a", "--vram", "0.1", "--set", "disk_gb=0.05")
    code, out, err = join(*flags)
    lines = err.splitlines()
    assert code == 2
    assert len(lines) == 4
    assert "102 MB" in err
    assert "on disk" in err
    assert not any(line.removeprefix("error: ") in out for line in lines)
    told = report(*flags, code=2)["problems"]
    assert [one["what"] for one in told] == [line[7:] for line in lines[::2]]


def test_data_that_would_be_downloaded_are_not(report, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = report("--task", "gsm8k")
    assert not told["task"]["found"]
    assert told["task"]["bytes"] > 4_000_000
    assert told["run"] is None
    assert list(tmp_path.iterdir()) == []


PICTURE = '{"prompt": "1<pic>=", "answer": 1}'
LONG = '{"prompt": "1+2+3+4+5+6+7+8+9=", "answer": 45}'
STRANGE = '{"prompt": "ÆØÅ", "answer": 1}'
MISTAKES = {
    "a row of one's own that is too long": ("--own-data {tmp}/long.jsonl", r"Line 31 of long.jsonl .*allows 16\.$"),
    "one that is held out": ("--own-data {tmp}/held.jsonl", "Line 3 of held.jsonl .*own held-out data.*tokens"),
    "a row of one's own without a token": ("--own-data {tmp}/strange.jsonl", "has no token"),
    "a row without a token": ("--task {tmp}/strange.jsonl", "Line 31 of strange.jsonl .*has no token"),
    "one to evaluate on": ("--task {tmp}/rows.jsonl --eval-data {tmp}/strange.jsonl", "Line 31 .*held-out data"),
    "a reward without skill": ("--task own_sums:lucky", "right answers differ, such as '[0-9]+'"),
    "no tokenizer": ("--model {tmp}/no-tokenizer", "has no tokenizer"),
    "no weights": ("--model {tmp}/no-weights", "cannot be loaded"),
    "damaged weights": ("--model {tmp}/damaged", "cannot be loaded"),
    "weights with gaps": ("--model {tmp}/gaps", "would be random there"),
    "fewer embeddings than tokens": ("--model {tmp}/small", "has 20 embedding rows"),
    "a gap in the ids": ("--model {tmp}/gap", "cannot write ',', which has the token id 30: .* has the id 25"),
    "a special tag": ("--model {tmp}/tag", "<think> as a special token"),
    "an id without a row": ("--model {tmp}/pic --task {tmp}/pic.jsonl", r"Line 31 .*'<pic>' \(id 26\), .* no row"),
    "logits that are transformed": ("--model {tmp}/capped", "changes its logits"),
    "LoRA on the head": ("--lora --set lora_targets=lm_head", "output head"),
    "LoRA on nothing, where the plan chooses": ("--set lora_targets=q_proj,vproj", "no linear module vproj"),
    "NF4 without its library": ("--lora --set quantisation=nf4", "NF4 needs bitsandbytes"),
    "an optimiser without its library": ("--set optimiser=adamw8bit", "bitsandbytes|8-bit"),
    "a server for all weights": ("--full --set engine=vllm", "gets LoRA layers .* trains all weights"),
    "a server at no address": ("--set engine=vllm --set vllm_url=ftp://x", "no address of a server"),
    "a model for digits": ("--task {tmp}/words.jsonl", "tiny-a can write no question of the task: .*[a-z]"),
    "no room for a completion": ("--model {tmp}/short", "room for 20"),
}


def _models(tmp):
    """A built-in model, each time with another mistake."""
    for name in ("no-tokenizer", "no-weights", "damaged", "gaps", "small", "capped", "short", "gap", "tag", "pic"):
        shutil.copytree(resolve("tiny-a"), tmp / name)
    (tmp / "no-weights" / "model.safetensors").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp / "no-tokenizer" / name).unlink()
    weights = tmp / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50_000])
    tensors = load_file(tmp / "gaps" / "model.safetensors")
    save_file(dict(list(tensors.items())[1:]), tmp / "gaps" / "model.safetensors", {"format": "pt"})
    _changed(tmp / "capped" / "config.json", {"final_logit_softcapping": 30.0})
    _changed(tmp / "short" / "config.json", {"max_position_embeddings": 20})
    words = json.loads((tmp / "gap" / "tokenizer.json").read_text())
    model = words["model"]
    added = words["added_tokens"]
    _changed(tmp / "gap" / "tokenizer.json", {"model": model | {"vocab": model["vocab"] | {",": 30}}})
    _changed(tmp / "tag" / "tokenizer.json", {"added_tokens": [one | {"special": True} for one in added]})
    picture = added[-1] | {"content": "<pic>", "id": 26}
    _changed(tmp / "pic" / "tokenizer.json", {"added_tokens": [*added, picture]})
    Qwen2ForCausalLM(tiny_config(vocab_size=20)).save_pretrained(tmp / "small")


def _changed(path, changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def compute_refuses(line):
    """What the compute process of `join` ends with."""
    given = {name: value for name, value in parsed(["join", *line]).items() if value not in (None, [])}
    task = given.get("task", "arithmetic")
    flags = parse_pairs(given.get("set_", []))
    flags |= {name: value for name, value in given.items() if name in {*FLAGS, "model"}}
    settings, _ = collect(task=task, flags=flags)
    files = {name: str(given[name]) for name in ("eval_data", "own_data") if name in given}
    engine = Engine()
    with pytest.raises(UserError) as refused:
        facts = engine.load(settings, task, code=True, must_fit=True, **files)
        engine.open(run_for(facts.shared()))
    return refused.value


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory) -> Path:
    """The files and models that mistakes are made with."""
    folder = tmp_path_factory.mktemp("mistaken")
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) for n in range(30)]
    for name, more in {"rows": [], "long": [LONG], "strange": [STRANGE], "pic": [PICTURE]}.items():
        (folder / f"{name}.jsonl").write_text("\n".join([*rows, *more]) + "\n")
    (folder / "words.jsonl").write_text("\n".join(rows).replace("prompt", "question"))
    held = next(q for q in (f"{n}+11111111111111=" for n in range(999)) if place_of(q) < 0.1)
    (folder / "held.jsonl").write_text("\n".join([*rows[:2], json.dumps({"prompt": held, "answer": 1}), *rows[2:]]))
    (folder / "own_sums.py").write_text(
        "from ftis_node.tasks import Score, make_task\ndef sums():\n    pass\ndef lucky():\n"
        "    return make_task([(f'{n}', n) for n in range(40)], template='{question}',\n"
        "        reward=lambda text, gold: Score(1.0, True, True))\n"
    )
    _models(folder)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_dry_run_refuses_as_a_start(mistake, join, mistaken, monkeypatch):
    monkeypatch.chdir(mistaken)
    if "without its library" in mistake:
        for name in ("bitsandbytes", "bitsandbytes.optim"):
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(nf4, "kernels", nf4.kernels.__wrapped__)  # it remembers its answer
    text, words = MISTAKES[mistake]
    line = text.format(tmp=mistaken).split()
    code, _, err = join(*line)
    error = compute_refuses(["--device", "cpu", *line])
    assert code == error.exit_code
    assert re.search(words, error.what), error.what
    assert err.endswith(f"error: {error.what}\n       {error.fix}\n"), err


def test_an_invitation_to_a_node_that_is_gone_says_so_in_terms_of_invitations(join):
    inviter = identity(3)
    address = f"/ip4/127.0.0.1/tcp/1025/p2p/{inviter.peer_id}"
    line = invite(inviter, bytes(16), [address], now=time.time(), seconds=3600).text
    code, out, err = join("--task", "arithmetic", line, "--set", "patience=1")
    assert code == 1
    assert "would start it" not in out
    assert "the inviter's node runs" in err
    assert "--peers" not in err
    assert "listens there (connection refused)" in err, "asked for the second time, too"
    assert "backoff" not in err


async def test_another_runs_data_are_refused_unread(home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with member(1, tmp_path) as node, transport(identity(2), tmp_path / "two") as network:
        options = JoinOptions(home, peers=(node.address,), task="gsm8k")
        with pytest.raises(UsageError, match="The data of gsm8k is not the run's, which is of arithmetic"):
            await run_to_join(options, network, 5.0)
    assert not (tmp_path / "cache").exists()


def test_what_the_home_knows_is_dialled(join, report, home):
    known = [f"/ip4/10.0.0.{number}/tcp/4001/p2p/{identity(number).peer_id}" for number in range(1, 11)]
    home.path.mkdir()
    KnownAddresses(known[:1], met=known).write(home.peers)
    assert report()["network"]["dials"] == known
    assert "and 2 more" in join()[1]
    gone = MembersBook(PRIVATE.id, FOUNDER.author, ended={FOUNDER.author: {EVE.author: removal(FOUNDER, EVE)}})
    home.members.write_bytes(msgspec.msgpack.encode(gone))
    left = [text for text in known if not text.endswith(EVE.peer_id)]
    assert report()["network"]["dials"] == left
    assert len(left) == 9


async def test_peers_are_asked_for_their_run(home, tmp_path):
    def layers(task):
        return collect(task=task, flags={"host": "127.0.0.1", "device": "cpu"})

    async with member(1, tmp_path) as node:
        options = JoinOptions(home, peers=(node.address,), task="arithmetic")
        case = Case(options, layers, starting=True)
        assert refused(case, "join") == ()
        await asyncio.to_thread(refused, case, "dry-run")
        assert node.swarm.membership.active_view == {}
    assert [(origin, found.run.id) for origin, found in case.runs] == [("--peers", RUN.id)]
    assert as_json(case, whole=True)["run"]["from"] == "peers"
    assert not home.path.exists()
