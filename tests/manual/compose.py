"""``make compose-test``: deploy/compose.yaml on a real engine; what was seen is one JSON object on stdout.

Builds the image, brings the swarm up, waits until every node has trained on groups of every other, kills a daemon in
its container and sees it come back and go on from its checkpoint, tries the health check in both directions, has a real
Prometheus scrape the nodes and answer every query of the dashboard, and takes all down. The exit code is 1 if anything
was not so. Grafana is not started: that its dashboard asks for what there is, is all that is looked at.

Without a running engine it starts one in a temporary folder, and installs Debian's first if there is none: as root.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ftis_node.swarm.addresses import free_port

ROOT = Path(__file__).parents[2]
NODES = ("a", "b", "c")
VICTIM = "b"
PROFILES = ("gpu", "monitoring", "alerts")  # of the Compose file; `down` without them leaves containers behind
LOCAL_BASE = "ftis-test-base"
LOCAL_PROMETHEUS = "ftis-test-prometheus"
PATIENCE = 300.0
SELDOM = ("packets_refused", "left_out")  # in a sound swarm there is nothing to show
KILL = "import json, os, signal; os.kill(json.load(open('{home}/runtime.json'))['pid'], signal.SIG{name})"
HOME = "/home/ftis/node"


class Swarm:
    """One Compose project, by whichever Compose there is."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = os.environ | environment
        second = subprocess.run(["docker", "compose", "version"], capture_output=True, env=self.environment)
        self._compose = ("docker-compose",)
        if second.returncode == 0:
            self._compose = ("docker", "compose")
        self.project = f"ftis-test-{os.getpid()}"

    def run(self, *line: str, echo: bool = False) -> str:
        """Runs a command and returns what it printed; with `echo` that goes to stderr instead."""
        printed = sys.stderr if echo else subprocess.PIPE
        done = subprocess.run(
            line,
            env=self.environment,
            text=True,
            stdout=printed,
            stderr=sys.stderr,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}: {done.stdout or ''}")
        return done.stdout or ""

    def compose(self, *arguments: str, echo: bool = True) -> str:
        file = str(ROOT / "deploy" / "compose.yaml")
        return self.run(*self._compose, "--project-name", self.project, "--file", file, *arguments, echo=echo)

    def down(self):
        """Takes everything away: containers, those of every profile too, the network and the volumes."""
        profiles = []
        for name in sorted(PROFILES):
            profiles += ["--profile", name]
        self.compose(*profiles, "down", "--volumes", "--remove-orphans", "--timeout", "60")

    def container(self, service: str) -> str:
        return self.compose("ps", "--quiet", service, echo=False).strip()

    def within(self, service: str, *line: str) -> str:
        return self.run("docker", "exec", self.container(service), *line)

    def status(self, service: str) -> dict[str, Any]:
        """What the node says; {} while it cannot."""
        status = {}
        with contextlib.suppress(RuntimeError, ValueError):
            status = json.loads(self.within(service, "ftis-node", "status", "--json"))
        return status

    def inspect(self, service: str, what: str) -> str:
        return self.run("docker", "inspect", "--format", f"{{{{{what}}}}}", self.container(service)).strip()

    def used(self, service: str) -> set[str]:
        """The authors whose groups it has trained on."""
        return set(self.status(service).get("foreign_groups_used", {}))

    def signal(self, service: str, name: str):
        """Sends a signal to the daemon itself; its process is not the container's first, which is tini."""
        self.within(service, "/opt/ftis-node/bin/python", "-c", KILL.format(home=HOME, name=name))


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.manual.compose", description=__doc__)
    parser.add_argument("--base", default="debian:bookworm-slim", help="base image; `debootstrap`: one made here")
    options = parser.parse_args()
    told = {"base": options.base}
    with contextlib.ExitStack() as stack:
        environment = {"DOCKER_HOST": stack.enter_context(engine())}
        base = options.base
        if base == "debootstrap":
            make_base(environment)
            base = LOCAL_BASE
        port = free_port("127.0.0.1")
        chosen = {
            "BASE": base,
            "PROMETHEUS_IMAGE": LOCAL_PROMETHEUS,
            "PROMETHEUS_PORT": str(port),
        }
        swarm = Swarm(environment | chosen | {"CHECKPOINT_MINUTES": "0"})  # every step is saved: a kill loses none
        began = time.monotonic()
        try:
            swarm.compose("build", "run")
            folder = str(ROOT / "deploy" / "prometheus")
            swarm.run("docker", "build", "-t", LOCAL_PROMETHEUS, "--build-arg", f"BASE={base}", folder, echo=True)
            told["build_seconds"] = round(time.monotonic() - began)
            size = swarm.run("docker", "inspect", "--format", "{{.Size}}", "ftis-node")
            told["image_mb"] = round(int(size) / 1e6)
            play(swarm, told, port)
        except BaseException:
            swarm.compose("logs", "--tail", "40")
            raise
        finally:
            swarm.down()
        print(json.dumps(told, indent=1), flush=True)  # before an engine's folder is removed, which takes minutes


def play(swarm: Swarm, told: dict[str, Any], port: int):
    """Everything from `up` to a clean stop."""
    began = time.monotonic()
    swarm.compose("up", "--detach", "run", "bootstrap", *NODES, "prometheus")

    def since(name: str):
        told[name] = round(time.monotonic() - began)
        print(f"{told[name]} s: {name}", file=sys.stderr, flush=True)

    learn_from_one_another(swarm)
    since("trained_on_one_another_after_seconds")
    told["killed"] = survive_a_kill(swarm)
    since("back_after_a_kill_after_seconds")
    see_a_frozen_daemon(swarm)
    since("healthy_after_seconds")
    told["prometheus"] = scraped(port)
    since("scraped_after_seconds")
    swarm.compose("stop", "--timeout", "60")
    for name in ("bootstrap", *NODES):
        container = swarm.compose("ps", "--all", "--quiet", name, echo=False).strip()
        code = swarm.run("docker", "inspect", "--format", "{{.State.ExitCode}}", container).strip()
        assert code == "0", f"{name} ended with {code}"
    since("stopped_after_seconds")


def learn_from_one_another(swarm: Swarm):
    """Every node trains on groups of every other; the bootstrap trains nothing."""
    ids = {}
    for name in NODES:
        key = eventually(partial(swarm.within, name, "ftis-node", "id", "--json"), f"{name} has a key")
        ids[name] = json.loads(key)["id"]
    for name in NODES:
        others = {id for other, id in ids.items() if other != name}

        def learned(name: str = name, others: set[str] = others) -> bool:
            return swarm.used(name) >= others

        eventually(learned, f"{name} learns from all others")
    bootstrap = swarm.status("bootstrap")
    assert bootstrap["state"] == "PAUSED" and bootstrap["step"] == 0, f"the bootstrap trains nothing: {bootstrap}"
    assert swarm.within("a", "id", "-u").strip() == "10001", "the daemon is not root"


def survive_a_kill(swarm: Swarm) -> dict[str, int]:
    """A daemon that is killed goes on from its checkpoint; returns its steps before, then and after."""
    before = swarm.status(VICTIM)
    swarm.signal(VICTIM, "KILL")
    eventually(lambda: int(swarm.inspect(VICTIM, ".RestartCount")) >= 1, "the engine starts it again")
    eventually(lambda: later(swarm.status(VICTIM), before), "it is back")
    log = swarm.within(VICTIM, "cat", f"{HOME}/metrics.jsonl")
    events = [json.loads(line) for line in log.splitlines()]
    (resumed,) = [event["step"] for event in events if event["event"] == "resumed"]
    assert resumed >= before["step"] - 1, f"it goes on from step {resumed}, and was at {before['step']}"
    after = eventually(partial(step_beyond, swarm, resumed), "it takes steps beyond its checkpoint")
    return {"step_before": before["step"], "resumed_at": resumed, "step_after": after}


def see_a_frozen_daemon(swarm: Swarm):
    """The health check is right of a daemon that answers, and of one that does not."""
    for name in ("bootstrap", *NODES):
        healthy = partial(swarm.inspect, name, ".State.Health.Status")
        eventually(lambda healthy=healthy: healthy() == "healthy", f"{name} is healthy")
    check = ["docker", "exec", swarm.container("a"), "ftis-node", "health"]
    swarm.signal("a", "STOP")
    frozen = subprocess.run(check, env=swarm.environment)
    swarm.signal("a", "CONT")
    assert frozen.returncode == 1, "the health check sees a frozen daemon"
    swarm.run(*check)


def step_beyond(swarm: Swarm, step: int) -> int:
    """The step of the killed node once it is beyond another; 0 before."""
    reached = swarm.status(VICTIM).get("step", 0)
    return reached if reached > step else 0


def later(status: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a node was started anew and has gone beyond an earlier step, with new groups of others."""
    if status.get("step", 0) <= before["step"] or status["uptime"] >= before["uptime"]:
        return False
    used = sum(status["foreign_groups_used"].values())
    return used > sum(before["foreign_groups_used"].values())


def scraped(port: int) -> dict[str, Any]:
    """What Prometheus knows: of the four nodes, and by every query of the dashboard and every rule."""
    address = f"http://127.0.0.1:{port}/api/v1/"

    def ask(path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{address}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def steps() -> bool:
        found = ask("query", query="ftis_node_steps_total > 0")["result"]
        return {one["metric"]["node"] for one in found} == set(NODES)

    eventually(steps, "Prometheus has the steps of all nodes")
    targets = ask("query", query="up")["result"]
    up = {one["metric"]["node"]: one["value"][1] for one in targets}
    assert up == dict.fromkeys(("bootstrap", *NODES), "1"), f"all are scraped, and nothing else: {up}"
    rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
    assert rules and all(rule["health"] in ("ok", "unknown") for rule in rules), f"the rules are sound: {rules}"
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "swarm.json").read_text())
    silent = []
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for query in queries:
        asked = query.replace("$node", ".+").replace("$__rate_interval", "1m")
        if not ask("query", query=asked)["result"]:
            silent.append(query)
    for query in silent:
        assert any(part in query for part in SELDOM), f"the dashboard shows nothing for {query}"
    return {
        "up": up,
        "rules": len(rules),
        "queries": len(queries),
        "queries_without_an_answer": silent,
    }


def eventually(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Polls until the condition is true, and returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, RuntimeError):
            found = condition()
            if found:
                return found
        time.sleep(2)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """The address of an engine: of the running one, or of one that lives as long as this."""
    if shutil.which("docker") and answers("docker"):
        yield os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        return
    install("dockerd", "docker", "docker-compose", packages=("docker.io", "docker-compose"))
    with tempfile.TemporaryDirectory(prefix="ftis-engine-", ignore_cleanup_errors=True) as folder:
        address = f"unix://{folder}/docker.sock"
        places = (f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid")
        with Path(folder, "log").open("wb") as log:
            daemon = subprocess.Popen(["dockerd", "--host", address, *places], stdout=log, stderr=log)
        try:
            eventually(lambda: answers("docker", "--host", address), "the engine is up", 60)
            yield address
        finally:
            daemon.terminate()
            daemon.wait(60)


def answers(*docker: str) -> bool:
    """Whether an engine answers this client."""
    return subprocess.run([*docker, "info"], capture_output=True).returncode == 0


def install(*commands: str, packages: tuple[str, ...]):
    """Debian's packages, if any of the commands is missing."""
    if not all(map(shutil.which, commands)):
        subprocess.run(["apt-get", "update"], check=True, stdout=sys.stderr)
        line = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
        subprocess.run(line, check=True, stdout=sys.stderr)


def make_base(environment: Mapping[str, str]):
    """A minimal Debian as a base image, for where no registry can be reached."""
    known = os.environ | environment
    there = subprocess.run(["docker", "image", "inspect", LOCAL_BASE], env=known, capture_output=True)
    if there.returncode == 0:
        return
    install("debootstrap", packages=("debootstrap",))
    with tempfile.TemporaryDirectory(prefix="ftis-base-") as folder:
        root = f"{folder}/root"
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True, stdout=sys.stderr)
        lists = ("--exclude=./var/cache/apt/*", "--exclude=./var/lib/apt/lists/*")
        tar = subprocess.Popen(["tar", "-C", root, *lists, "-c", "."], stdout=subprocess.PIPE)
        line = ["docker", "import", "-", LOCAL_BASE]
        subprocess.run(
            line,
            env=known,
            stdin=tar.stdout,
            stdout=sys.stderr,
            check=True,
        )
        if tar.wait():
            raise RuntimeError("tar failed")


if __name__ == "__main__":
    main()
