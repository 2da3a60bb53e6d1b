"""`ftis-node doctor` says what it saw and what to do, whatever is broken, and changes nothing."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from huggingface_hub import constants
from transformers import Lfm2Config

from ftis_node.cli import run as run_files
from ftis_node.cli.flags import Given
from ftis_node.config.run import RunFile, dump_run_file, load_run_file
from ftis_node.errors import UserError
from ftis_node.host import proxy
from ftis_node.node.options import JoinOptions
from ftis_node.policy.availability import Hub, cached, described, offered
from ftis_node.policy.load import load_tokenizer
from ftis_node.policy.names import BUILT_IN_DIR
from ftis_node.preflight import machine, models, place
from ftis_node.preflight.case import Case, Check, Finding, case_of, examine, failed
from ftis_node.preflight.checks import listed
from ftis_node.preflight.net import of_a_running_node
from ftis_node.preflight.smoke import smoke
from ftis_node.store.home import Home
from ftis_node.swarm.identity import Identity
from tests.support.begun import begun
from tests.support.cli import Cli
from tests.support.served import Quiet, served, taken_port
from tests.support.statuses import answered
from tests.support.swarm import RUN


@pytest.fixture
def doctor(cli) -> Cli:
    """The command in this process: exit code, stdout and stderr."""
    return partial(cli, "doctor")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def case_with(tmp_path) -> Callable[..., Case]:
    """What is examined on a home, with these flags."""
    home = Home(tmp_path)
    return lambda **flags: case_of(JoinOptions(home), Given(flags).on(home))


def seen(look, case):
    """By verdict; the last of each."""
    return {finding.verdict: finding for finding in examine(case, [Check("it", look)])}


def told(look, verdict, case):
    """The text of the finding with this verdict."""
    return seen(look, case)[verdict].text


# --- how checks are run -----------------------------------------------------------------------------------------------


def test_a_check_that_breaks_or_hangs_is_a_finding_and_the_others_go_on(case_with):
    forever = threading.Event()

    def breaks(_):
        yield Finding("breaks", "ok", "So far.")
        raise ZeroDivisionError("a mistake of ours")

    def hangs(_):
        forever.wait()
        yield Finding("hangs", "ok", "Too late.")

    def refuses(_):
        raise UserError("It is broken.", "Mend it.")
        yield

    checks = [
        Check("breaks", breaks),
        Check("hangs", hangs, 0.05),
        Check("refuses", refuses, None),
    ]
    found = list(examine(case_with(), checks))
    forever.set()
    assert [one.subject for one in found] == ["breaks", "breaks", "hangs", "refuses"]
    assert [one.verdict for one in found] == ["ok", "fail", "fail", "fail"]
    assert "ZeroDivisionError" in found[1].text
    assert "bugreport" in found[1].advice
    assert "0.05 s" in found[2].text
    assert found[3].text == "It is broken."
    assert found[3].advice == "Mend it."
    assert failed(found)
    assert not failed(found[:1])


def test_the_whole_of_it_on_a_sound_machine_changes_nothing(doctor, tmp_path):
    home = tmp_path / "home"
    code, out, err = doctor("--home", home, "--host", "127.0.0.1", "--device", "cpu")
    assert code == 0, out + err
    verdicts = {line.split()[0] for line in out.splitlines() if not line.startswith(" ")}
    assert verdicts <= {"ok", "warn"}
    subjects = [line.split()[1].rstrip(":") for line in out.splitlines() if not line.startswith(" ")]
    wanted = [check.subject for check in listed("doctor") if check.subject != "peers"]
    assert list(dict.fromkeys(subjects)) == list(dict.fromkeys(wanted))
    assert not home.exists()


def test_with_json_there_is_one_object_and_a_failure_is_exit_code_1(doctor, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, _ = doctor("--home", tmp_path / "file", "--json", "--device", "cpu")
    findings = json.loads(out)["findings"]
    assert code == 1
    assert [one["subject"] for one in findings if one["verdict"] == "fail"] == ["home"]
    assert all(one.keys() == {"subject", "verdict", "text", "advice"} for one in findings)


# --- the machine ------------------------------------------------------------------------------------------------------


def test_libraries_out_of_their_ranges_are_told(case_with, monkeypatch):
    wanted = ["numpy>=1000", "surely-not-there>=1", "typer>=0.1", 'pytest>=1000; extra == "x"']
    monkeypatch.setattr(machine.metadata, "requires", lambda _: wanted)
    found = list(machine.libraries(case_with()))
    assert [one.verdict for one in found] == ["fail", "fail", "warn", "ok"]
    assert "numpy" in found[0].text
    assert found[1].text == "surely-not-there>=1 is not installed."
    assert found[3].text.startswith("1 are within")
    monkeypatch.setattr(machine.metadata, "requires", lambda _: ["surely-not-there>=1"])
    monkeypatch.setattr(machine, "_TOLD", ("surely-not-there", "hivemind"))
    found = list(machine.libraries(case_with()))
    assert [one.verdict for one in found] == ["fail", "ok"], "one that is missing is one finding"
    assert "hivemind" in found[1].text
    assert "surely" not in found[1].text


def test_a_machine_that_p2pd_is_not_made_for(case_with, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.util, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert "p2pd is not there" in told(machine.python, "fail", case_with())


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/user/job", {"user/job/memory.max": "max", "user/memory.max": "1000", "memory.max": "5000"}, 1000),
        ("0::/outside", {"memory.max": "2000"}, 2000),
        ("4:cpu:/\n5:memory:/job", {"memory/job/memory.limit_in_bytes": "3000"}, 3000),
        ("5:memory:/job", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/", {}, None),
    ],
    ids=["of a parent", "seen from within", "version 1", "version 1 without", "none"],
)
def test_the_memory_a_container_may_use(groups, files, limit, tmp_path):
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text + "\n")
    (tmp_path / "groups").write_text(groups + "\n")
    assert machine.memory_limit(tmp_path / "groups", tmp_path / "tree") == limit
    assert machine.memory_limit(tmp_path / "none", tmp_path / "tree") is None


def test_limits_that_are_too_low_are_told(case_with, monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: 3 << 30)
    monkeypatch.setattr(machine, "raise_limit", lambda: 256)
    found = list(machine.limits(case_with()))
    assert [one.verdict for one in found] == ["warn", "warn", "ok"]
    assert "256" in found[0].text
    assert "hard limit" in found[0].advice
    assert "--vram 2.4" in found[1].advice
    monkeypatch.setattr("tempfile.tempdir", "/none")
    assert failed(list(machine.limits(case_with())))


def test_an_untried_kind_of_gpu_is_told(case_with, monkeypatch):
    monkeypatch.setattr("torch.version.hip", "7.1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = seen(machine.torch_, case_with())
    assert found.keys() == {"warn"}
    assert "ROCm is untested" in found["warn"].text
    assert "for ROCm 7.1" in found["warn"].text
    assert seen(machine.torch_, case_with(device="cpu")).keys() == {"ok"}


def test_a_gpu_that_this_homes_daemon_uses_is_not_broken(case_with, monkeypatch):
    subjects = [check.subject for check in listed("doctor")]
    assert subjects.index("home") < subjects.index("gpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(machine, "smoke", lambda _: Finding("gpu", "fail", "Out of memory.", "Look."))
    case = case_with(device="cuda")
    assert list(seen(machine.gpu, case)) == ["fail"]
    case.status = answered()
    assert "a daemon runs on this home" in told(machine.gpu, "warn", case)


def test_a_node_without_peers_may_be_the_first(tmp_path):
    network = {"p2pd_restarts": 0, "p2pd": None, "reachability": "direct"}
    found = list(of_a_running_node(answered(network=network)))
    assert {one.subject: one.verdict for one in found}["peers"] == "warn"
    assert not failed(found)


def test_the_small_computation_agrees_with_itself_here():
    assert smoke("cpu") == {"name": "cpu", "half": "bfloat16", "wrong": []}


@pytest.mark.slow
def test_a_device_that_fails_is_told_and_does_no_harm():
    assert machine.smoke("cpu").verdict == "ok"
    found = machine.smoke("cuda:77")
    assert found.verdict == "fail"
    assert "cuda:77" in found.text


def test_a_driver_that_refuses_growing_segments_gets_the_cure(tmp_path, monkeypatch):
    """A process that fails as under WSL2 (pytorch issue 192330), in place of the interpreter."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$PYTORCH_CUDA_ALLOC_CONF" = expandable_segments:False ] && exec echo {}\n'
        "echo 'torch.AcceleratorError: CUDA driver error: unknown error' >&2; exit 1\n"
    )
    python.chmod(0o700)
    monkeypatch.setattr(machine.sys, "executable", str(python))
    found = machine.smoke("cuda")
    assert found.verdict == "fail"
    assert "unknown error" in found.text
    assert found.advice.startswith("Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the node's environment")
    python.write_text("#!/bin/sh\nexit 3\n")
    assert "nvidia-smi" in machine.smoke("cuda").advice


# --- the hub ---------------------------------------------------------------------------------------------------------


@contextmanager
def hub_that(answers, monkeypatch):
    """A hub on loopback with a status code for each path."""

    class Handler(Quiet):
        def do_HEAD(self):
            self.send_response_only(answers(self.path))
            self.send_header("Content-Length", "0")
            self.end_headers()

    with served(Handler) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield


def test_a_hub_that_hangs_is_not_asked_again(case_with, monkeypatch):
    forever = threading.Event()
    asked = []
    monkeypatch.setattr("ftis_node.policy.availability.ask_hub", lambda: asked.append(1) or forever.wait())
    found = list(examine(case_with(), [Check("hub", models.hub, 0.05), Check("memory", models.memory, 60.0)]))
    assert [(one.subject, one.verdict) for one in found] == [("hub", "fail"), ("memory", "ok")]
    assert asked == [1]
    forever.set()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (404, "has no model"),
        (401, "gated"),
        (503, "answers 503"),
    ],
)
def test_a_hub_without_the_model(case_with, code, says, monkeypatch):
    monkeypatch.setattr("ftis_node.policy.availability.get_token", lambda: "hf_secretsecretsecret")
    with hub_that(lambda path: 200 if path == "/" else code, monkeypatch):
        found = seen(models.hub, case_with(model="someone/unheard-of"))
    assert says in found["fail"].text
    assert "hf_" not in f"{found}"


def test_a_hub_that_gives_it(case_with, monkeypatch):
    with hub_that(lambda _: 200, monkeypatch):
        assert "gives it" in told(models.hub, "ok", case_with(model="someone/unheard-of"))
        assert list(seen(models.hub, case_with())) == ["ok"]


def test_without_a_hub_a_model_must_be_here(case_with, tmp_path, monkeypatch):
    name = "someone/something"
    found = seen(models.hub, case_with(model=name))["fail"]
    assert "not in the local cache" in found.text
    assert "--model FOLDER" in found.advice
    with monkeypatch.context() as patch:
        patch.setenv("ALL_PROXY", "socks5://me:secret@127.0.0.1:1")
        patch.setattr(proxy.importlib.util, "find_spec", lambda name: None)
        found = seen(models.hub, case_with(model=name))["fail"]
        assert "SOCKS proxy" in found.text
        assert "socksio" in found.advice
        assert "secret" not in found.text
        with pytest.raises(UserError, match="all_proxy names a SOCKS proxy"):
            load_tokenizer(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "Unset HF_HUB_OFFLINE" in seen(models.hub, case_with(model=name))["fail"].advice
    snapshot = in_the_cache(tmp_path / "cache", name, monkeypatch)
    assert cached(name) == snapshot
    assert list(seen(models.hub, case_with(model=name))) == ["warn"]
    with described(name, Hub(False), tokenizer=True) as folder:
        assert folder == str(snapshot)
    (snapshot / "model.safetensors").unlink()
    assert cached(name) is None, "half a model is none"
    assert list(seen(models.hub, case_with())) == ["ok"], "a built-in model needs no hub"


def in_the_cache(cache, name, monkeypatch):
    """tiny-a as if it had been downloaded from the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file in (BUILT_IN_DIR / "tiny-a").iterdir():
        (snapshot / file.name).symlink_to(file)
    return snapshot


def test_what_the_hub_would_have_to_give_is_refused_in_words():
    with pytest.raises(UserError, match="cannot be loaded"):
        offered("someone/something", 0.5)
    with pytest.raises(UserError, match="not in the cache"), described("someone/something", Hub(False)):
        pass
    with described("qwen2.5-3b", Hub(False)) as folder:
        assert [file.name for file in Path(folder).iterdir()] == ["config.json"]
    assert not Path(folder).exists()


# --- the model --------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_fails_and_one_that_does_not(case_with):
    case = case_with(model="qwen2.5-3b", vram_gb=2.0, device="cpu")
    found = seen(models.memory, case)["fail"]
    assert "and it may use 2.00 GB" in found.text
    assert found.advice.startswith("Give it more with --vram ")
    assert place.checkpoint_bytes(case.plan, case.shape) > 0
    case = case_with(device="cpu", vram_gb=4.0)
    assert "of 4.00 GB" in told(models.memory, "ok", case)
    case.status = answered(plan={"memory_bytes": 1 << 30, "budget": 2 << 30, "fits": True})
    assert "1.00 GB of 2.00 GB" in told(models.memory, "ok", case)


def test_a_model_that_takes_longer_is_told_with_what_it_costs(case_with, tmp_path):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = Lfm2Config(**sizes, vocab_size=40, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    config.save_pretrained(tmp_path / "lfm2")
    case = case_with(model=str(tmp_path / "lfm2"), device="cpu", vram_gb=4.0)
    found = [one.text for one in examine(case, [Check("it", models.memory)]) if one.verdict == "warn"]
    assert "30 to 50 ms a token" in found[0]
    assert "2.2 to 3.9 times the compute" in found[1]


def test_a_model_whose_tokens_are_not_the_runs_fails(case_with, tmp_path):
    (tmp_path / "run.toml").write_text(dump_run_file(RunFile(run=RUN)))
    case = case_with()
    assert case.task_name == RUN.task
    assert "is not the run's" in told(models.tokenizer, "fail", case)


def test_a_home_whose_run_the_model_fits_is_well(case_with, tmp_path):
    run_files.new(tmp_path / "run.toml")
    found = seen(models.tokenizer, case_with())
    assert list(found) == ["ok"]
    assert load_run_file(tmp_path / "run.toml").run.id.hex() in found["ok"].text


# --- the home, its disk and the port ----------------------------------------------------------------------------------


def test_a_home_says_where_it_goes_on_and_with_what(case_with, tmp_path):
    begun(tmp_path, 7, "tiny-b", "lora")
    assert case_with().settings.model == "tiny-b", "the home's, where none is named"
    assert "from step 7 of tiny-b (lora)" in told(place.checkpoints, "ok", case_with())
    assert "another model" in told(place.checkpoints, "fail", case_with(model="tiny-a"))
    assert "another model" in told(place.checkpoints, "fail", case_with(lora=False))
    (tmp_path / "checkpoints" / "step-00000006.damaged").mkdir()
    assert "damaged" in told(place.checkpoints, "warn", case_with())


def test_a_key_that_others_may_read_or_that_is_damaged_is_told(case_with, tmp_path):
    key = Home(tmp_path).key
    Identity.load_or_create(key)
    key.chmod(0o644)
    assert "chmod 600" in seen(place.home, case_with())["warn"].advice
    key.write_bytes(b"nonsense")
    assert "is damaged" in told(place.home, "fail", case_with())


def test_a_daemon_that_holds_the_home_and_is_silent_is_told(case_with, tmp_path):
    holder = Home(tmp_path)
    holder.open()
    assert "does not answer" in told(place.home, "fail", case_with())
    holder.close()
    assert "fail" not in seen(place.home, case_with())


def test_a_disk_that_is_too_small_or_far_away_is_told(case_with, tmp_path, monkeypatch):
    case = case_with(packet_quota_mb=1 << 40)
    assert "packet_quota_mb" in seen(place.disk, case)["fail"].advice
    there = SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [SimpleNamespace(mountpoint="/", fstype="ext4"), there])
    assert "(nfs4)" in told(place.disk, "warn", case_with())


def test_a_limit_on_disk_is_kept_or_has_no_room(case_with):
    case = case_with(disk_gb=0.2, device="cpu")
    list(models.memory(case))
    text = told(place.disk, "ok", case)
    assert " MB of packets" in text
    assert "a checkpoint of 0.9 MB every 5 min, 250 MB a day" in text
    case = case_with(disk_gb=0.05, packet_quota_mb=16, device="cpu")
    list(models.memory(case))
    assert "may take 51 MB on disk" in told(place.disk, "fail", case)


def test_a_port_of_the_page_that_is_taken_is_told(case_with):
    with taken_port() as number:
        case = case_with(http_port=number)
        found = seen(place.page, case)["fail"]
        assert f"port {number}" in found.text
        assert f"pid {os.getpid()}" in found.advice
        assert "http_port" in found.advice
        case.status = answered(page=f"http://127.0.0.1:{number}/")
        assert "daemon on this home" in told(place.page, "ok", case)
        assert "switched off" in told(place.page, "ok", case_with(http_port=number, page=False))
    assert list(seen(place.page, case)) == ["ok"]


def test_a_port_that_is_taken_says_by_whom(case_with):
    with taken_port() as number:
        case = case_with(host="127.0.0.1", port=number)
        found = seen(place.port, case)["fail"]
        assert "is taken" in found.text
        assert f"pid {os.getpid()}" in found.advice
        case.status = answered(addresses=[f"/ip4/127.0.0.1/tcp/{number}/p2p/x"])
        assert "daemon on this home" in told(place.port, "ok", case)
    case.status = None
    assert "is free" in told(place.port, "ok", case)
    far = case_with(host="192.0.2.77", port=number)
    assert "cannot listen on 192.0.2.77" in seen(place.port, far)["fail"].text
    assert "only dials" in told(place.port, "ok", case_with(listen=False))
