"""Metrics of a node and its peers in Prometheus' text format.

It is made anew of plain values for each scrape, without a registry of the process, so nodes in one process do not meet.
Values that are not known yet are left out. Labels are words of this node's own and peer ids, never a peer's text.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import ftis_node
from ftis_node.errors import UsageError
from ftis_node.observe.answers import State, at, finite
from ftis_node.policy.names import public_name

PEERS_MAX = 64
REACHABILITIES = ("direct", "relayed", "outbound-only")
STANDINGS = ("newcomer", "established", "doubted", "banned")

_INFO = "Always 1; its labels say what runs here."
_STATE = "1 for the state that the node is in, 0 for the others."
_REACHABILITY = "1 for the way in which others reach this node, 0 for the others."
_STANDING = "1 for what this node thinks of the peer, 0 for the other standings."
_LEFT_OUT = "Peers that are left alone: banned, of another run, or at addresses that are not dialled."

_KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
Families = Iterator[Family]
AsJson = Mapping[str, Any]  # what a node or an observer says, as JSON


@dataclass(frozen=True)
class Metric:
    """One metric, and where its values stand in what is told.

    kind: a counter only grows while the process lives; its exposed name ends in ``_total``.
    at: a path of keys with dots between. With a `label` that path leads to a mapping from the label's values to
    numbers, or `at` itself maps each of the label's values to a path. A mapping in place of a number counts as its sum.
    needs: a path; while nothing stands there, the number at `at` says nothing.
    """

    name: str
    kind: Literal["gauge", "counter"]
    at: str | Mapping[str, str]
    help: str
    label: str = ""
    needs: str = ""

    def values(self, told: AsJson) -> Iterator[tuple[tuple[str, ...], float]]:
        """The label's value (none if it has no label) and the number, of all that is known."""
        if self.needs and at(told, self.needs) is None:
            return
        found: Any
        if isinstance(self.at, Mapping):
            found = {value: at(told, path) for value, path in self.at.items()}
        elif self.label:
            found = at(told, self.at)
        else:
            found = {"": at(told, self.at)}
        for value, number in (found or {}).items():
            if isinstance(number, Mapping):
                number = sum(number.values())
            known = finite(number)
            if known is not None:
                labels: tuple[str, ...] = ()
                if self.label:
                    labels = (str(value),)
                yield labels, known


_OWN_AND_FOREIGN = {"own": "own_groups_used", "foreign": "foreign_groups_used"}
_REWARDS = {"own": "own_reward", "foreign": "foreign_reward"}
_MEMORY = {"network": "process.memory_bytes", "compute": "worker_memory_bytes", "p2pd": "network.p2pd.memory_bytes"}
_GPU = {name: f"gpu.{name}_bytes" for name in ("total", "used", "allocated", "reserved")}
_PHASES = {phase: f"last_step.seconds.{phase}" for phase in ("generate", "wait", "train")}

METRICS = (
    Metric("state", "gauge", "states", _STATE, "state"),
    Metric("reachability", "gauge", "reachabilities", _REACHABILITY, "reachability"),
    Metric("uptime_seconds", "gauge", "uptime", "Since the process started."),
    Metric("parameters", "gauge", "parameters", "Parameters of the whole model."),
    # These count the whole training, which goes on from checkpoints: a crash may lower them a little.
    Metric("step", "gauge", "step", "Optimiser steps of the whole training."),
    Metric("checkpoint_step", "gauge", "checkpoint.step", "The step of the newest checkpoint."),
    Metric("checkpoint_age_seconds", "gauge", "checkpoint.age_seconds", "Training that a kill would cost now."),
    Metric("checkpoint_due_seconds", "gauge", "checkpoint.due_seconds", "Until steps that are not saved are saved."),
    Metric("groups_used", "gauge", _OWN_AND_FOREIGN, "Groups of the whole training's batches.", "source"),
    Metric("foreign_weight_share", "gauge", "foreign_weight_share", "Foreign samples' part of the loss, from 0 to 1."),
    Metric("pass_at_1", "gauge", "pass_at_1", "Latest greedy pass@1 on held-out prompts, from 0 to 1."),
    Metric("pass_at_1_before", "gauge", "pass_at_1_before", "Greedy pass@1 before the first step."),
    Metric("pass_at_1_step", "gauge", "pass_at_1_step", "The step of the latest pass@1.", needs="pass_at_1"),
    # These are of the latest step.
    Metric("reward", "gauge", _REWARDS, "Mean reward of the latest step's samples.", "source"),
    Metric("filtered_fraction", "gauge", "filtered_fraction", "Filtered part of others' negatives, latest step."),
    Metric("loss", "gauge", "last_step.loss", "Loss of the latest step."),
    Metric("generator_mismatch_nats", "gauge", "last_step.generator.mismatch", "RMS of log-probs here less vLLM's."),
    Metric("gradient_norm", "gauge", "last_step.gradient_norm", "Norm of the latest step's gradient, before clipping."),
    Metric("last_step_seconds", "gauge", _PHASES, "Where the latest step's time went.", "phase"),
    Metric("step_seconds", "gauge", "step_seconds", "Mean of the latest steps, up to eight.", needs="last_step"),
    Metric("idle_share", "gauge", "idle_share", "Part of the latest steps' time in which the device had no work."),
    # Since the process started.
    Metric("steps", "counter", "totals.steps", "Steps of this process."),
    Metric("skipped_steps", "counter", "totals.skipped_steps", "Steps that left the weights as they were."),
    Metric("phase_seconds", "counter", "totals.seconds", "Where the time of this process's steps went.", "phase"),
    Metric("device_seconds", "counter", "totals.device", "What the compute device spent its time on.", "work"),
    Metric("trained_groups", "counter", "totals.groups", "Groups in this process's batches.", "source"),
    Metric("trained_samples", "counter", "totals.samples", "Completions that a gradient was computed of.", "source"),
    Metric("trained_tokens", "counter", "totals.tokens", "Tokens that a gradient was computed of.", "source"),
    Metric("generated_groups", "counter", "totals.generated_groups", "Groups generated here for training."),
    Metric("generated_completions", "counter", "totals.generated_completions", "Completions of these groups."),
    Metric("generated_tokens", "counter", "totals.generated_tokens", "Tokens of the groups generated here."),
    Metric("own_groups_refused", "counter", "own_groups_refused", "Groups generated here that others would refuse."),
    # The pool and the swarm.
    Metric("pool_groups", "gauge", "pool.waiting", "Foreign groups that wait to be trained on."),
    Metric("pool_no_signal", "counter", "pool.no_signal", "Foreign groups left out as all their rewards were equal."),
    Metric("pool_expired", "counter", "pool.expired", "Foreign groups that grew too old in the pool."),
    Metric("packets_refused", "counter", "refused_packets", "Packets of others that were refused.", "reason"),
    Metric("announcements", "counter", "announcements", "Announcements heard, by what became of them.", "outcome"),
    Metric("received_bytes", "counter", "bytes_in", "Payload of calls and answers that came in."),
    Metric("sent_bytes", "counter", "bytes_out", "Payload of calls and answers that went out."),
    Metric("peers", "gauge", "peers", "Peers that the node works with."),
    Metric("clock_behind_seconds", "gauge", "network.clock.behind", "Of the clock, behind its peers' (median)."),
    # Processes.
    Metric("worker_restarts", "counter", "worker_restarts", "Compute processes that replaced a failed one."),
    Metric("p2pd_restarts", "counter", "network.p2pd_restarts", "Times that p2pd was started again."),
    Metric("p2pd_connections", "gauge", "network.p2pd.connections", "Open connections of p2pd."),
    Metric("p2pd_cpu_seconds", "counter", "network.p2pd.cpu_seconds", "CPU time of p2pd."),
    Metric("p2pd_open_files", "gauge", "network.p2pd.open_files", "Open files of p2pd."),
    Metric("memory_bytes", "gauge", _MEMORY, "Resident memory, without that of a GPU.", "process"),
    Metric("gpu_memory_bytes", "gauge", _GPU, "The GPU's memory: total, used by all, and by the node's tensors.", "of"),
    Metric("gpu_utilization", "gauge", "gpu.utilization", "Part of the time in which the GPU had something to do."),
    Metric("python_blocks", "gauge", "process.python_blocks", "Blocks of the network process's Python allocator."),
)

PEER_METRICS = (
    Metric("peer_standing", "gauge", "standings", _STANDING, "standing"),
    Metric("peer_groups_used", "gauge", "used", "Groups of the peer in the whole training's batches."),
    Metric("peer_packets_accepted", "counter", "accepted", "Packets that the peer signed and that were admitted."),
    Metric("peer_packets_refused", "counter", "refused", "Packets that the peer signed and that were refused."),
    Metric("peer_received_bytes", "counter", "bytes_in", "Payload that came from the peer."),
    Metric("peer_sent_bytes", "counter", "bytes_out", "Payload that went to the peer."),
    Metric("peer_weight", "gauge", "weight", "What the peer's samples count in the loss, from 0 to 1."),
    Metric("peer_unseen_seconds", "gauge", "seconds_since_seen", "Since the peer was last seen."),
)


def exposition(status: AsJson, peers: AsJson) -> bytes:
    """The text exposition, version 0.0.4, of what `Node.status` and `Node.peers` say; at most 64 peers are in it."""
    return generate_latest(_Scrape(_of_node(status, peers)))


SWARM_METRICS = (
    Metric("heard_seconds", "gauge", "heard", "Since the node was last seen."),
    Metric("step", "gauge", "step", "The node's last announced step."),
    Metric("groups", "gauge", "groups", "Groups that the node has announced since this observer looks."),
    Metric("success", "gauge", "success", "Part of these groups' completions that are right, as claimed."),
    Metric("pass_at_1_claimed", "gauge", "claims.pass_at_1", "Greedy pass@1, as claimed."),
    Metric("foreign_groups_claimed", "gauge", "claims.foreign_used", "Groups of others it trained on, as claimed."),
    Metric("received_bytes_claimed", "gauge", "claims.bytes_in", "Payload since its start, as claimed."),
    Metric("sent_bytes_claimed", "gauge", "claims.bytes_out", "Payload since its start, as claimed."),
)


def swarm_exposition(swarm: AsJson) -> bytes:
    """The text exposition of what `swarm.overview.SwarmFacts` says, of present nodes by peer id."""
    return generate_latest(_Scrape(_of_swarm(swarm)))


@dataclass(frozen=True)
class _Scrape(Collector):
    """The families of one scrape."""

    families: Families

    def collect(self) -> Families:
        return self.families


def _of_swarm(swarm: AsJson) -> Families:
    present = [node for node in swarm["nodes"] if node["present"]]
    yield GaugeMetricFamily("ftis_swarm_nodes", "Nodes seen within ten minutes.", len(present))
    yield from _families("ftis_swarm_node_", SWARM_METRICS, {node["id"]: node for node in present}, "peer")


def _of_node(status: AsJson, peers: AsJson) -> Families:
    info = GaugeMetricFamily("ftis_node_info", _INFO, labels=["version", "model", "kind", "run"])
    known = (str(status.get(key) or "") for key in ("kind", "run"))
    info.add_metric([ftis_node.__version__, _model(str(status.get("model") or "")), *known], 1)
    yield info
    choices = {
        "states": _one_of(tuple(State), status.get("state")),
        "reachabilities": _one_of(REACHABILITIES, at(status, "network.reachability")),
    }
    yield from _families("ftis_node_", METRICS, {"": {**status, **choices}})
    if "step" in status:  # the swarm has begun
        yield from _of_peers(peers)


def _of_peers(peers: AsJson) -> Families:
    yield GaugeMetricFamily("ftis_node_peers_left_out", _LEFT_OUT, len(peers["left_out"]))
    shown = {}
    for peer in peers["peers"][:PEERS_MAX]:
        shown[peer["id"]] = {**peer, "standings": _standings(peer["standing"])}
    yield from _families("ftis_node_", PEER_METRICS, shown, "peer")


def _model(name: str) -> str:
    """Without the folders it lies in: anybody on the machine may read this, and paths have names of people in them."""
    try:
        return public_name(name)
    except UsageError:  # a folder that is gone
        return Path(name).name


def _families(prefix: str, metrics: Iterable[Metric], found: Mapping[str, AsJson], of: str = "") -> Families:
    """These metrics of what is told; `found` has it, by values of the label `of`."""
    for metric in metrics:
        names = [name for name in (of, metric.label) if name]
        family = _KINDS[metric.kind](prefix + metric.name, metric.help, labels=names)
        for value, told in found.items():
            for labels, number in metric.values(told):
                if of:
                    labels = (value, *labels)
                family.add_metric(labels, number)
        if family.samples:
            yield family


def _one_of(words: tuple[str, ...], holds: str | None) -> dict[str, float]:
    """1 for the word that holds, also for one that is not listed, and 0 for the others; nothing if none is known."""
    if holds is None:
        return {}
    return {**dict.fromkeys(words, 0.0), holds: 1.0}


def _standings(told: str) -> dict[str, float]:
    """As `_one_of`, of a peer's standing in words. Its first word says which it is; what follows are reasons."""
    first = told.replace(":", " ").split(maxsplit=1)[0]
    if first not in STANDINGS:
        return {}
    return _one_of(STANDINGS, first)
