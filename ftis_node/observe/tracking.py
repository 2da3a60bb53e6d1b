"""Curves for the trackers that people already watch: Trackio, Weights & Biases, TensorBoard.

The tracker's library runs in a child process, which gets numbers through a pipe and nothing else: no settings, no
arguments, no text of completions, and of the environment the tracker's own variables alone; where these send the curves
away, also the proxy and, for Trackio, the hub's token. A child that hangs or dies
costs the node nothing but the curves.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, cast

from ftis_node.errors import UsageError
from ftis_node.host.quiet import QUIET
from ftis_node.installed import to_install
from ftis_node.observe.answers import at, finite

Tracked = Literal["none", "trackio", "wandb", "tensorboard"]

CLOSING_SECONDS = 20.0
_CHILD = Path(__file__).with_name("tracking_child.py")
_ENVIRONMENT = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_HERE = ("", "offline", "dryrun", "disabled")  # where curves stay
# The variable that sends a tracker's curves away, and what it needs then.
_AWAY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "wandb": ("WANDB_MODE", ("SSL_CERT_FILE", "HTTPS_PROXY")),
    "trackio": ("TRACKIO_SPACE_ID", ("SSL_CERT_FILE", "HTTPS_PROXY", "HF_TOKEN")),
}

# Of a step: the name that TRL gives a figure, if it has one, and where the figure is in the event.
STEP: Mapping[str, str] = {
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "reward": "own_reward",
    "step_time": "seconds.total",
    "entropy": "diagnostics.overall.entropy",
    "clip_ratio/region_mean": "diagnostics.overall.clipped",
    "sampling/importance_sampling_ratio/max": "diagnostics.overall.ratio_max",
    "swarm/peers": "peers",
    "swarm/own_groups": "own_groups",
    "swarm/foreign_groups": "foreign_groups",
    "swarm/foreign_reward": "foreign_reward",
    "swarm/foreign_age": "foreign_age",
    "swarm/foreign_loss_share": "diagnostics.foreign.loss_share",
    "swarm/filtered_fraction": "diagnostics.foreign.filtered_fraction",
    "swarm/truncated": "diagnostics.overall.truncated",
    "swarm/ess": "diagnostics.overall.ess",
    "swarm/bytes_in": "bytes_in",
    "swarm/bytes_out": "bytes_out",
    "num_tokens": "tokens",
}
EVALUATION: Mapping[str, str] = {
    "eval/pass_at_1": "pass_at_1",
    "eval/pass_at_1_low": "low",
    "eval/pass_at_1_high": "high",
    "eval/formatted": "formatted",
    "eval/lenient": "lenient",
    "eval/completions/mean_length": "mean_tokens",
}

logger = logging.getLogger(__name__)


def refuse_untracked(kind: Tracked) -> None:
    """Raise UsageError if the tracker's library is not installed."""
    if kind != "none" and importlib.util.find_spec(kind) is None:
        raise UsageError(f"The tracker {kind} is not installed.", f"Run: {to_install(f'ftis-node[{kind}]')}")


def figures(event: str, facts: Mapping[str, Any]) -> dict[str, float]:
    """The finite figures of an event by the names that trackers show; none for events that they do not."""
    found = {}
    for name, path in {"step": STEP, "evaluation": EVALUATION}.get(event, {}).items():
        value = finite(at(facts, path))
        if value is not None:
            found[name] = value
    return found


class Tracker:
    """A child process that draws curves. Writing to it never waits."""

    def __init__(self, kind: Tracked, folder: Path, name: str) -> None:
        """
        Args:
            folder: for what the tracker keeps; name: of the curves.
        """
        self._kind = kind
        self._told = False
        folder.mkdir(parents=True, exist_ok=True)
        switch, needed = _AWAY.get(kind, ("", ()))
        kept = (*_ENVIRONMENT, *(() if os.environ.get(switch, "") in _HERE else needed))
        own = f"{kind.upper()}_"
        environment = {key: value for key, value in os.environ.items() if key in kept or key.startswith(own)}
        with (folder / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), kind, name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=environment | dict(QUIET),
                start_new_session=True,
            )
        self._pipe = cast(IO[bytes], self._process.stdin)
        os.set_blocking(self._pipe.fileno(), False)

    def take(self, event: str, facts: Mapping[str, Any]) -> None:
        """Pass the figures of an event on, or drop them if the child does not read."""
        found = figures(event, facts)
        if not found:
            return
        line = json.dumps({"step": facts["step"], "figures": found}).encode() + b"\n"
        try:
            os.write(self._pipe.fileno(), line)  # shorter than a pipe's unit: whole or not at all
        except OSError as error:
            if not self._told:
                logger.warning("%s takes no figures (%s); see output.log in its folder.", self._kind, error)
            self._told = True

    def close(self) -> None:
        """Let the child write what it has, and end it."""
        with suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
