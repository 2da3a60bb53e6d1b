"""Nothing is told to anybody but peers and the hub, by any process of a node or by the libraries in it."""

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ftis_node.host.quiet import QUIET
from ftis_node.policy.names import BUILT_IN_DIR
from ftis_node.store.home import Home
from tests.support.daemons import PATIENCE, STILL, command, own_rows
from tests.support.hub import Hub, running
from tests.support.silence import listening_in, tried

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ftis_node"
MODEL = {path.name: path.read_bytes() for path in (BUILT_IN_DIR / "tiny-a").iterdir()}
LOAD = textwrap.dedent(
    """
    from ftis_node.worker.engine import Engine
    from tests.support.small_models import arithmetic_settings

    Engine().load(arithmetic_settings(model="someone/tiny"), "arithmetic")
    """
)


def environment(folder, hub):
    """This process's, without what keeps tests from the hub or the libraries under us from talking."""
    listening = listening_in(folder / "listening")
    known = {name: text for name, text in os.environ.items() if name not in {"HF_HUB_OFFLINE", "CI", *QUIET}}
    path = os.pathsep.join((listening["PYTHONPATH"], *sys.path))
    asked = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(folder / "hf"),
        "OMP_NUM_THREADS": "1",
        "TESTS_START_PLAIN": "1",
    }
    return known | asked | listening | {"PYTHONPATH": path}


def strangers(folder):
    """What was tried beyond loopback, where hub and peers are."""
    near = re.compile(r"\('127\.0\.0\.1', \d+\)|'127\.0\.0\.1'|'localhost'|b?'[/\x00].*'")
    return [one for one in tried(folder / "listening") if not near.fullmatch(one[1])]


def ran(line, known):
    return subprocess.run(
        line, env=known, capture_output=True, text=True, timeout=10 * PATIENCE, stdin=subprocess.DEVNULL
    )


def test_the_list_of_what_is_tried_is_complete(tmp_path):
    """Whatever asks for a name or dials, in a process or one that it starts, is heard of."""
    code = "import socket, subprocess, sys; subprocess.run([sys.executable, '-P', '-c', sys.argv[1]])"
    inner = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.9', 9))"
    with running(Hub()) as hub:
        assert ran([sys.executable, "-c", code, inner], environment(tmp_path, hub)).returncode == 0
    assert [one[:2] for one in strangers(tmp_path)] == [("socket.connect", "('127.0.0.9', 9)")]


# bitsandbytes asks it for some on CPUs with bf16 instructions, and would run it
FROM_THE_HUB = "def get_kernel(*_, **__): raise SystemExit('compiled code from the hub')"


def test_a_node_dials_nobody_but_hub_and_peers_from_the_first_second_to_the_last(tmp_path):
    """A daemon, its compute process and what they start, with a model from the hub and rows of the owner's; libraries
    send no reports and run no compiled code from the hub. Nor is an owner who decided about progress bars warned.
    """
    home = Home(tmp_path / "home")
    line = command("join", "--home", home.path, "--model", "someone/tiny", "--host", "127.0.0.1")
    hub = Hub()
    hub.model = MODEL
    with running(hub):
        own = ("--own-data", own_rows(tmp_path), "--set", "lora=true", "--set", "optimiser=adamw8bit")
        known = environment(tmp_path, hub) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        (tmp_path / "listening" / "kernels.py").write_text(FROM_THE_HUB)
        ended = ran([*line, *own, "--device", "cpu", "--steps", "2", *STILL], known)
    assert ended.returncode == 0, ended.stderr
    assert not re.search("kernels|progress bars", ended.stderr + home.log.read_text())
    heard = {process for *_, process in tried(tmp_path / "listening")}
    assert any("ftis_node.worker" in process for process in heard), "the compute process asks the hub"
    assert strangers(tmp_path) == []
    assert hub.sent > len(MODEL["model.safetensors"])
    assert not [path for path in hub.asked if "telemetry" in path or "agent" in path]
    assert not [agent for agent in hub.agents if "file_type" in agent]


LINKS = {"arxiv.org"}  # of a page that a person may read


def test_security_md_names_every_host_that_the_program_does():
    """What else a node dials is named by its owner, by peers, or by the local network."""
    hosts = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                hosts |= set(re.findall(r"https?://([a-z0-9.-]+[a-z])", node.value))
    told = (ROOT / "docs" / "security.md").read_text().partition("## What a stranger can do")[0]
    assert "raw.githubusercontent.com" in hosts
    assert [host for host in hosts - LINKS if host not in told] == []


@pytest.mark.slow
def test_a_model_of_pickles_is_named_to_no_service_that_would_convert_it(tmp_path):
    pickled = io.BytesIO()
    torch.save(load_file(BUILT_IN_DIR / "tiny-a" / "model.safetensors"), pickled)
    files = {name: data for name, data in MODEL.items() if name != "model.safetensors"}
    hub = Hub()
    hub.model = files | {"pytorch_model.bin": pickled.getvalue()}
    with running(hub):
        ended = ran([sys.executable, "-c", LOAD], environment(tmp_path, hub))
    assert ended.returncode == 1
    assert "cannot be loaded" in ended.stderr
    assert strangers(tmp_path) == []


TRAIN = textwrap.dedent(
    """
    from ftis_node.config.settings import Settings
    from ftis_node.host.loading import loading

    with loading():
        from ftis_node.learner.optimiser import Optimiser
        from ftis_node.policy.load import load_policy

    settings = Settings(device="cpu", lora=True)
    policy = load_policy(settings)
    Optimiser({name: p for name, p in policy.model.named_parameters() if p.requires_grad}, settings, 1e-3)
    """
)


@pytest.mark.slow
def test_training_does_without_a_broken_library(tmp_path):
    with running(Hub()) as hub:
        known = environment(tmp_path, hub)
        (tmp_path / "listening" / "bitsandbytes.py").write_text("raise RuntimeError('no CUDA library fits')")
        ended = ran([sys.executable, "-c", TRAIN], known)
    assert ended.returncode == 0, ended.stderr


def test_what_an_owner_sets_or_a_process_starts_makes_no_difference():
    code = "import ftis_node, huggingface_hub.constants as c, os; print(c.HF_HUB_DISABLE_TELEMETRY, os.environ)"
    for told in ("0", "1", None):
        known = {name: text for name, text in os.environ.items() if name not in QUIET}
        known |= {} if told is None else dict.fromkeys(QUIET, told)
        printed = ran([sys.executable, "-c", code], known).stdout
        assert printed.startswith("True")
        assert all(f"'{name}': '{text}'" in printed for name, text in QUIET.items())


# A network of its own with a gateway that never answers, and a list of whatever any process dials, p2pd's too.
ALONE = """
set -e
ip link set lo up
ip link add d0 type veth peer name d1
ip link set d1 up
ip addr add 45.33.7.2/24 dev d0
ip link set d0 up
ip route add default via 45.33.7.1
ip neigh add 45.33.7.1 lladdr 02:00:00:00:00:01 dev d0
exec strace -f --seccomp-bpf -qq -e signal=none -e trace=connect,sendto,sendmsg,sendmmsg -o "$0" "$@"
"""
TRIAL = "unshare -n sh -c 'ip link add d0 type veth peer name d1 && strace -f --seccomp-bpf -qq -e trace=connect true'"
NETWORKS = shutil.which("strace") and not subprocess.run(TRIAL, shell=True, capture_output=True).returncode
RELAY = "/ip4/45.33.7.9/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.mark.skipif(not NETWORKS, reason="needs root, ip and strace")
@pytest.mark.parametrize(
    "relays",
    [
        (),
        pytest.param((RELAY,), marks=pytest.mark.slow),
    ],
    ids=["alone", "with-a-relay"],
)
def test_the_network_daemon_dials_its_router_and_peers_and_nobody_else(relays, tmp_path):
    """With a public address, the default host and no peers, or one that never answers; loopback is its own metrics."""
    line = command("join", "--home", str(tmp_path / "home"), "--device", "cpu", "--steps", "3", *STILL)
    line += [part for relay in relays for part in ("--relay", relay)]
    trace = tmp_path / "trace"
    ended = ran(["unshare", "-n", "sh", "-c", ALONE, str(trace), *line], dict(os.environ) | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    told = [line for line in trace.read_text(errors="replace").splitlines() if "AF_INET" in line]
    dialled = [re.search(r"htons\((\d+)\).*?(?:inet_addr|inet_pton)\((?:AF_INET6, )?\"([^\"]+)", line) for line in told]
    assert told
    assert all(dialled)
    abroad = {found.group(2, 1) for found in dialled if found and found.group(2) not in ("127.0.0.1", "::1")}
    router = {("239.255.255.250", "1900"), ("45.33.7.1", "5351")}
    assert abroad <= router | ({("45.33.7.9", "4001")} if relays else set())
