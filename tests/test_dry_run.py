"""`ftis-node join --dry-run` says what would be, and leaves no trace."""

import asyncio
import json
import re
import shutil
import sys
import time
from functools import partial
from pathlib import Path

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
def join(monkeypatch, cli) -> Cli:
    """`join --dry-run` in this process, with no hub to ask: exit code, stdout and stderr."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return partial(cli, "join", "--dry-run", "--device", "cpu")


def report_of(join, *flags, code=0):
    ended, out, err = join("--json", *flags)
    assert ended == code, err
    report = json.loads(out)
    return report


def test_a_first_start_is_told_and_leaves_nothing(join, tmp_path):
    home = tmp_path / "home"
    report = report_of(join, "--home", str(home), "--port", "4567", "--host", "127.0.0.1", "--set", "learning_rate=0.5")
    assert list(tmp_path.iterdir()) == []
    assert report["home"] == {"path": str(home), "new": True, "step": None, "id": None}
    assert report["settings"]["learning_rate"] == {"value": 0.5, "origin": "flags"}
    assert report["settings"]["wait"]["origin"] == "task arithmetic" and "seed" not in report["settings"]
    assert (report["model"]["name"], report["model"]["kind"], report["model"]["fits"]) == ("tiny-a", "full", True)
    assert report["task"]["found"] and report["task"]["rows"] > 1000
    assert len(report["run"]["id"]) == 32 and "would start" in report["run"]["from"]
    assert "/ip4/127.0.0.1/tcp/4567" in report["network"]["listens"]
    assert "log-probs" in report["leaves"] and report["problems"] == []
    assert "self-report a minute (the model's name" in report["leaves"] and report["network"]["dials"] == []
    flags = ("--private", "--set", "lan=true", "--set", "self_report=never")
    told = report_of(join, "--home", str(home), *flags)
    private = told["leaves"]
    assert "self-report" not in private and "local network" not in private
    assert told["run"]["id"] is None and private.startswith("To members of the private run alone: its network address")
    assert "public" not in private and ", private\n" in join("--home", str(home), *flags)[1]
    code, out, _ = join("--home", str(home), "--set", "own_share=0")
    assert code == 0 and report["run"]["id"] in out and "samples nothing of its own" in out and "lora_rank" not in out
    (tmp_path / "few.csv").write_text("prompt,answer\n" + "".join(f"{n}+1=,{n + 1}\n" for n in range(40)))
    assert "questions held out, too few" in join("--home", str(home), "--task", str(tmp_path / "few.csv"))[1]


def test_whatever_says_what_leaves_the_machine_names_what_a_self_report_holds():
    described = ROOT_DIR / "README.md", ROOT_DIR / "docs" / "security.md"
    sections = [path.read_text().split("## What leaves your machine\n")[1].split("\n## ")[0] for path in described]
    for text in (NOTICE, join_command.__doc__ or "", *sections):
        assert {"self-report", "--name", "self_report=never"} <= {*re.findall(r"[-\w]+(?:=never)?", text)}, text
    (option,) = (one for one in root().get_command(None, "join").params if one.name == "name")
    assert "self-report" in str(vars(option)["help"])


def test_the_run_it_would_start_is_what_it_starts(join, tmp_path, capfd):
    new(tmp_path / "run.toml")
    new(tmp_path / "private.toml", private=True, home=tmp_path / "founder")
    capfd.readouterr()
    wanted = load_run_file(tmp_path / "run.toml").run.id.hex()
    assert report_of(join, "--home", str(tmp_path / "home"))["run"]["id"] == wanted
    ours = load_run_file(tmp_path / "private.toml").run.id.hex()
    assert report_of(join, "--home", str(tmp_path / "founder"), "--private")["run"]["id"] == ours
    for flags in ((), ("--task", "arithmetic")):
        report = report_of(join, "--home", str(tmp_path / "home"), "--run", str(tmp_path / "run.toml"), *flags)
        assert report["problems"] == [] and report["run"]["from"] == "file"


def test_a_file_that_a_stranger_names_is_not_opened(join, tmp_path):
    """Not even to say what is wrong with it."""
    (tmp_path / "run.toml").write_text(dump_run_file(RunFile(run=make_run(task="a/../none.jsonl", reward="integer"))))
    flags = ("--home", str(tmp_path / "home"), "--run", str(tmp_path / "run.toml"))
    report = report_of(join, *flags, code=2)
    told = " ".join(one["what"] for one in report["problems"])
    assert "not a run's to say" in told and "Cannot read" not in told and not report["task"]["found"]
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(20)))
    report = report_of(join, *flags, "--data", str(tmp_path / "mine.jsonl"), code=2)
    assert report["task"]["found"] and "not a run's to say" not in str(report["problems"])
    (tmp_path / "home").mkdir()
    (tmp_path / "run.toml").rename(tmp_path / "home" / "run.toml")
    assert "not a run's to say" in str(report_of(join, *flags[:2], code=2)["problems"]), "nobody has agreed to it"
    home = Home(tmp_path / "home")
    run_id = load_run_file(home.run_file).run.id
    home.task_files.write_text(f'{{"run": "{run_id.hex()}"}}')
    told = str(report_of(join, *flags[:2], code=2)["problems"])
    assert "not a run's to say" not in told and "Cannot read" in told, "a home that joined once goes on as it did"
    remember_files(home, JoinOptions(home, data=tmp_path / "mine.jsonl"), "none.jsonl", run_id)
    assert report_of(join, *flags[:2], code=2)["task"]["found"], "with the file that was named then"
    (one,) = report_of(join, *flags[:2], "--task", "arithmetic", code=2)["problems"]
    assert one["what"].startswith("The data of arithmetic is not the run's"), "and nothing that follows from it"


def test_a_begun_home_goes_on_and_what_does_not_fit_it_is_told(join, tmp_path):
    begun(tmp_path, 7, "tiny-a", "lora")
    before = sorted(tmp_path.rglob("*"))
    report = report_of(join, "--home", str(tmp_path))
    assert (report["home"]["step"], report["model"]["kind"]) == (7, "lora")
    code, _, err = join("--home", str(tmp_path), "--model", "tiny-b")
    assert code == 2 and "another model" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_all_that_is_wrong_is_told_at_once(join, tmp_path):
    (tmp_path / "run.toml").write_text(dump_run_file(RunFile(run=RUN)))  # which has another rule, and other data
    with taken_port() as port:
        flags = ("--home", str(tmp_path / "home"), "--run", str(tmp_path / "run.toml"), "--task", "arithmetic")
        flags = (*flags, "--port", str(port), "--host", "127.0.0.1", "--device", "cpu")
        code, out, err = join(*flags, "--json")
    report = json.loads(out)
    told = " ".join(one["what"] for one in report["problems"])
    assert code == 2 and [line[:7] for line in err.splitlines()] == ["error: ", "       "] * 3
    assert all(err.count(one["what"]) == 1 for one in report["problems"]), "each once"
    assert "The data of arithmetic" in told and "reward rule" in told and f"port {port}" in told
    assert report["run"]["id"] == RUN.id.hex() and report["run"]["from"] == "file"


def test_what_takes_seconds_is_told_each_once_too(join, tmp_path):
    flags = ("--model", "tiny-a", "--home", str(tmp_path / "home"), "--vram", "0.1", "--set", "disk_gb=0.05")
    code, out, err = join(*flags)
    assert code == 2 and "102 MB" in err and "on disk" in err and len(err.splitlines()) == 4
    assert not any(line.removeprefix("error: ") in out for line in err.splitlines())
    told = report_of(join, *flags, code=2)["problems"]
    assert [one["what"] for one in told] == [line[7:] for line in err.splitlines()[::2]]


def test_data_that_would_be_downloaded_are_not(join, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = report_of(join, "--home", str(tmp_path / "home"), "--task", "gsm8k")
    assert not report["task"]["found"] and report["task"]["bytes"] > 4_000_000 and report["run"] is None
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
    vocabulary = words["model"]["vocab"]
    added = words["added_tokens"]
    _changed(tmp / "gap" / "tokenizer.json", {"model": words["model"] | {"vocab": vocabulary | {",": 30}}})
    _changed(tmp / "tag" / "tokenizer.json", {"added_tokens": [one | {"special": True} for one in added]})
    picture = added[-1] | {"content": "<pic>", "id": 26}
    _changed(tmp / "pic" / "tokenizer.json", {"added_tokens": [*added, picture]})
    Qwen2ForCausalLM(tiny_config(vocab_size=20)).save_pretrained(tmp / "small")


def _changed(path, changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def compute_refuses(line):
    """What the compute process of `join` ends with."""
    given = parsed(["join", *line])
    flags = {name: value for name, value in given.items() if name in FLAGS and value not in (None, [])}
    flags |= {"model": given["model"]} if given["model"] else {}
    settings, _ = collect(task=given["task"] or "arithmetic", flags={**parse_pairs(given["set_"] or []), **flags})
    files = {name: str(given[name]) if given[name] else None for name in ("eval_data", "own_data")}
    engine = Engine()
    with pytest.raises(UserError) as refused:
        facts = engine.load(settings, given["task"] or "arithmetic", code=True, must_fit=True, **files)
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
def test_dry_run_refuses_as_a_start(mistake, join, mistaken, tmp_path, monkeypatch):
    monkeypatch.chdir(mistaken)
    if "without its library" in mistake:
        for name in ("bitsandbytes", "bitsandbytes.optim"):
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(nf4, "kernels", nf4.kernels.__wrapped__)  # it remembers its answer
    text, words = MISTAKES[mistake]
    line = text.format(tmp=mistaken).split()
    code, _, err = join("--home", str(tmp_path / "home"), *line)
    error = compute_refuses(["--device", "cpu", *line])
    assert code == (2 if isinstance(error, UsageError) else 1) and re.search(words, error.what), error.what
    assert err.endswith(f"error: {error.what}\n       {error.fix}\n"), err


def test_an_invitation_to_a_node_that_is_gone_says_so_in_terms_of_invitations(join, tmp_path):
    inviter = identity(3)
    address = f"/ip4/127.0.0.1/tcp/1025/p2p/{inviter.peer_id}"
    line = invite(inviter, bytes(16), [address], now=time.time(), seconds=3600).text
    code, out, err = join("--task", "arithmetic", line, "--home", str(tmp_path / "home"), "--set", "patience=1")
    assert code == 1 and "the inviter's node runs" in err and "--peers" not in err and "would start it" not in out, err
    assert "listens there (connection refused)" in err and "backoff" not in err, "asked for the second time, too"


async def test_another_runs_data_are_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with member(1, tmp_path) as node, transport(identity(2), tmp_path / "two") as network:
        options = JoinOptions(Home(tmp_path / "home"), peers=(node.address,), task="gsm8k")
        with pytest.raises(UsageError, match="The data of gsm8k is not the run's, which is of arithmetic"):
            await run_to_join(options.home, options, network, [node.address], 5.0)
    assert not (tmp_path / "cache").exists()


def test_what_the_home_knows_is_dialled(join, tmp_path):
    known = [f"/ip4/10.0.0.{number}/tcp/4001/p2p/{identity(number).peer_id}" for number in range(1, 11)]
    KnownAddresses(known[:1], met=known).write(Home(tmp_path).peers)
    assert report_of(join, "--home", str(tmp_path))["network"]["dials"] == known
    assert "and 2 more" in join("--home", str(tmp_path))[1]
    gone = MembersBook(PRIVATE.id, FOUNDER.author, ended={FOUNDER.author: {EVE.author: removal(FOUNDER, EVE)}})
    Home(tmp_path).members.write_bytes(msgspec.msgpack.encode(gone))
    left = [text for text in known if not text.endswith(EVE.peer_id)]
    assert report_of(join, "--home", str(tmp_path))["network"]["dials"] == left and len(left) == 9


async def test_peers_are_asked_for_their_run(tmp_path):
    home = tmp_path / "home"
    async with member(1, tmp_path) as node:
        options = JoinOptions(home=Home(home), peers=(node.address,), task="arithmetic")
        layers = lambda task: collect(task=task, flags={"host": "127.0.0.1", "device": "cpu"})  # noqa: E731
        case = Case(options, layers, starting=True)
        assert refused(case, "join") == ()
        await asyncio.to_thread(refused, case, "dry-run")
        assert node.swarm.membership.active_view == {}
    assert [(origin, found.run.id) for origin, found in case.runs] == [("--peers", RUN.id)]
    assert as_json(case, whole=True)["run"]["from"] == "peers"
    assert not home.exists()
