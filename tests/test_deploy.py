"""What lies in deploy/ fits the node: its commands, its metrics, its names, and the tools that read it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ftis_node.config.run import load_run_file
from ftis_node.config.settings import Settings, collect
from ftis_node.policy.generate.vllm import FLAGS, KEY
from tests.manual.compose import PROFILES, Swarm
from tests.support.command_lines import parsed
from tests.support.documented import metrics

DEPLOY = Path(__file__).parent.parent / "deploy"
_DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


def read(name):
    return (DEPLOY / name).read_text(encoding="utf-8")


def compose(part):
    """Of the Compose file, with nothing set from outside."""
    return yaml.safe_load(_DEFAULT.sub(r"\1", read("compose.yaml")))[part]


def services():
    return compose("services")


def nodes():
    """The parameters of every `join` of the Compose file, by service."""
    found = {}
    for name, service in services().items():
        command = service.get("command", [""])
        if command[0] == "join":
            found[name] = parsed(command)
    return found


def test_every_home_is_a_named_volume_that_both_generations_of_compose_know():
    """A name of one letter is a drive of Windows to Compose 2."""
    named = compose("volumes")
    for service in nodes():
        volumes = dict(volume.split(":")[:2][::-1] for volume in services()[service]["volumes"])
        home = volumes["/home/ftis/node"]
        assert home in named, service
        assert len(home) > 1, service


def test_every_node_of_the_swarm_starts_with_options_that_exist_and_is_scraped_by_its_own_name():
    hosts = {name: dict(pair.split("=") for pair in given["set_"]) for name, given in nodes().items()}
    assert set(hosts) == {"bootstrap", "a", "b", "c", "gpu"}
    for name, pairs in hosts.items():
        assert pairs.keys() <= Settings.model_fields.keys()
        assert pairs["http_host"] == name, "a node answers to no other"
    (job,) = yaml.safe_load(read("prometheus/prometheus.yml"))["scrape_configs"]
    (optional,) = job["dns_sd_configs"]
    scraped = [*job["static_configs"][0]["targets"], *(f"{name}:{optional['port']}" for name in optional["names"])]
    assert scraped == [f"{name}:{pairs['http_port']}" for name, pairs in hosts.items()]


def test_the_bootstrap_is_where_the_run_file_says_and_trains_nothing():
    bootstrap = nodes()["bootstrap"]
    assert bootstrap["paused"]
    (script,) = services()["run"]["command"]
    assert f"/dns4/bootstrap/tcp/{bootstrap['port']}/p2p/$$(ftis-node keys new)" in script
    new = re.search(r"ftis-node (run new .*?) &&", script)
    assert parsed(new[1].replace("$$(ftis-node keys new)", "ID").split())["task"] == "arithmetic"


def test_vllm_is_started_as_the_node_wants_it():
    services = yaml.safe_load((DEPLOY / "compose.vllm.yaml").read_text())["services"]
    line = " ".join(services["vllm"]["command"])
    node = services["node"]
    assert FLAGS in line
    assert "--enable-lora" in line
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in services["vllm"]["environment"]
    told = dict(word.split("=", 1) for word in node["command"] if "=" in word)
    settings, _ = collect(task="gsm8k", flags=told, environment={})
    assert settings.engine == "vllm"
    assert KEY in node["environment"]
    assert KEY in services["vllm"]["environment"]
    assert any(volume.startswith(f"weights:{settings.vllm_folder}") for volume in services["vllm"]["volumes"])


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_there_are():
    panels = json.loads(read("grafana/dashboards/swarm.json"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    alerts = yaml.safe_load(read("prometheus/alerts.yml"))["groups"]
    queries += [rule["expr"] for group in alerts for rule in group["rules"]]
    asked = {name for query in queries for name in re.findall(r"ftis_node_\w+", query)}
    assert len(asked) > 15
    assert asked <= metrics().keys()
    for query in queries:
        for name, labels in re.findall(r"(ftis_node_\w+)\{([^}]*)\}", query):
            wanted = set(re.findall(r"(\w+)=", labels)) - {"node"}  # that one comes with the scrape
            assert wanted <= metrics()[name].labels, query


def test_every_panel_of_the_dashboard_has_a_place_of_its_own():
    panels = json.loads(read("grafana/dashboards/swarm.json"))["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (of Prometheus) is not installed")
def test_prometheus_takes_its_configuration():
    line = ["promtool", "check", "config", DEPLOY / "prometheus" / "prometheus.yml"]
    checked = subprocess.run(line, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_service(tmp_path):
    service = read("systemd/ftis-node.service")
    program = "/opt/ftis-node/bin/ftis-node"
    assert f"ExecStart={program} join" in service
    assert "landlock_create_ruleset landlock_restrict_self" in service
    file = tmp_path / "ftis-node.service"
    file.write_text(service.replace(program, "/bin/true"))  # it must be there to be checked
    checked = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
    assert checked.returncode == 0
    assert checked.stderr == ""


def test_the_service_gives_the_node_time_to_save_and_a_watchdog():
    from ftis_node.node.daemon import FINISH_SECONDS, GRACE_SECONDS

    lines = dict(line.split("=", 1) for line in read("systemd/ftis-node.service").splitlines() if "=" in line[1:])
    assert lines["Type"] == "notify"
    assert lines["WatchdogSec"] == "2min"
    assert lines["KillMode"] == "mixed"
    assert int(lines["TimeoutStopSec"]) > GRACE_SECONDS + FINISH_SECONDS
    for name in nodes():
        assert services()[name]["stop_grace_period"] == "45s"
    assert GRACE_SECONDS + FINISH_SECONDS < 45


def test_the_published_run_is_whole():
    run = load_run_file(DEPLOY / "runs" / "gsm8k.toml").run
    assert run.id.hex() == "e68e5b651c7d066d89a9a6d8007909db", "another id is another run, and its peers do not meet"
    assert run.task == "gsm8k"
    assert run.reward == "integer"
    assert run.collaboration == "vertical"


def profiles():
    return {profile for service in services().values() for profile in service.get("profiles", ())}


def test_what_is_documented_takes_down_what_any_profile_started():
    text = (DEPLOY.parent / "docs" / "deploy.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if re.search(r"docker compose .*\bdown\b", line)]
    assert set(re.findall(r"--profile (\w+)", line)) == profiles()


def test_the_swarms_test_leaves_no_container_network_or_volume(tmp_path, monkeypatch):
    told = tmp_path / "told"
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    Swarm({}).down()
    line = told.read_text().splitlines()[-1]
    assert " down --volumes " in line
    before, _, _ = line.partition(" down ")
    assert set(re.findall(r"--profile (\w+)", before)) == profiles() == set(PROFILES)
