"""Metrics of a node and its peers in Prometheus' text format.

It is made anew of plain values for each scrape, without a registry of the process, so nodes in one process do not meet.
Values that are not known yet are left out. Labels are words of this node's own and peer ids, never a peer's text.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import ftis_node
from ftis_node.errors import UsageError
from ftis_node.observe.answers import at
from ftis_node.policy.names import public_name

PEERS_MAX = 64
STATES = ("LOADING", "JOINING", "ALONE", "ONLINE", "RELAYED", "OUTBOUND-ONLY", "PAUSED", "DEGRADED", "STOPPING")
REACHABILITIES = ("direct", "relayed", "outbound-only")
STANDINGS = ("newcomer", "established", "doubted", "banned")

_INFO = "Always 1; its labels say what runs here."
_STATE = "1 for the state that the node is in, 0 for the others."
_REACHABILITY = "1 for the way in which others reach this node, 0 for the others."
_STANDING = "1 for what this node thinks of the peer, 0 for the other standings."

Families = Iterator[Family]
AsJson = Mapping[str, Any]  # what a node or an observer says, as JSON


@dataclass(frozen=True)
class Metric:
    """A row of a table: one metric, or what one value of its label stands for, and where the number stands in what is
    told.

    name: of a counter, which only grows while the process lives, it ends in ``_total``.
    label, value: its label, if it has one, and that label's value. Without a value a mapping stands at `at`, from the
    label's values to numbers.
    at: a path of keys with dots between. A mapping in place of a number counts as its sum.
    needs: a path; while nothing stands there, the number at `at` says nothing.
    help: where several rows make a metric, only that of the first counts.
    """

    name: str
    label: str
    value: str
    at: str
    needs: str
    help: str

    def values(self, told: AsJson) -> Iterator[tuple[str, float]]:
        """The label's value (empty if it has no label) and the number, of all that is known."""
        if self.needs and at(told, self.needs) is None:
            return
        found = at(told, self.at)
        numbers = {self.value: found}
        if self.label and not self.value:
            numbers = found or {}
        for value, number in numbers.items():
            known = _number(number)
            if known is not None:
                yield str(value), known


# name{label=value} at?needs help
_ROW = re.compile(r"^(\w+)(?:{(\w+)(?:=(\w+))?})? +([\w.]+)(?:\?([\w.]+))? *(.*)", re.MULTILINE)


def _read(table: str) -> list[Metric]:
    return [Metric(*row) for row in _ROW.findall(table)]


METRICS = _read("""
uptime_seconds                    uptime                       Since the process started.
parameters                        parameters                   Parameters of the whole model.
# These count the whole training, which goes on from checkpoints: a crash may lower them a little.
step                              step                         Optimiser steps of the whole training.
checkpoint_step                   checkpoint.step              The step of the newest checkpoint.
checkpoint_age_seconds            checkpoint.age_seconds       Training that a kill would cost now.
checkpoint_due_seconds            checkpoint.due_seconds       Until steps that are not saved are saved.
groups_used{source=own}           own_groups_used              Groups of the whole training's batches.
groups_used{source=foreign}       foreign_groups_used
foreign_weight_share              foreign_weight_share         Foreign samples' part of the loss, from 0 to 1.
pass_at_1                         pass_at_1                    Latest greedy pass@1 on held-out prompts, from 0 to 1.
pass_at_1_before                  pass_at_1_before             Greedy pass@1 before the first step.
pass_at_1_step                    pass_at_1_step?pass_at_1     The step of the latest pass@1.
# These are of the latest step.
reward{source=own}                own_reward                   Mean reward of the latest step's samples.
reward{source=foreign}            foreign_reward
filtered_fraction                 filtered_fraction            Filtered part of others' negatives, latest step.
loss                              last_step.loss               Loss of the latest step.
generator_mismatch_nats           last_step.generator.mismatch RMS of log-probs here less vLLM's.
gradient_norm                     last_step.gradient_norm      Norm of the latest step's gradient, before clipping.
last_step_seconds{phase=generate} last_step.seconds.generate   Where the latest step's time went.
last_step_seconds{phase=wait}     last_step.seconds.wait
last_step_seconds{phase=train}    last_step.seconds.train
step_seconds                      step_seconds?last_step       Mean of the latest steps, up to eight.
idle_share                        idle_share                   Part of the latest steps' time in which the device idled.
# Since the process started.
steps_total                       totals.steps                 Steps of this process.
skipped_steps_total               totals.skipped_steps         Steps that left the weights as they were.
phase_seconds_total{phase}        totals.seconds               Where the time of this process's steps went.
device_seconds_total{work}        totals.device                What the compute device spent its time on.
trained_groups_total{source}      totals.groups                Groups in this process's batches.
trained_samples_total{source}     totals.samples               Completions that a gradient was computed of.
trained_tokens_total{source}      totals.tokens                Tokens that a gradient was computed of.
generated_groups_total            totals.generated_groups      Groups generated here for training.
generated_completions_total       totals.generated_completions Completions of these groups.
generated_tokens_total            totals.generated_tokens      Tokens of the groups generated here.
own_groups_refused_total          own_groups_refused           Groups generated here that others would refuse.
# The pool and the swarm.
pool_groups                       pool.waiting                 Foreign groups that wait to be trained on.
pool_no_signal_total              pool.no_signal               Foreign groups left out as all their rewards were equal.
pool_expired_total                pool.expired                 Foreign groups that grew too old in the pool.
packets_refused_total{reason}     refused_packets              Packets of others that were refused.
announcements_total{outcome}      announcements                Announcements heard, by what became of them.
received_bytes_total              bytes_in                     Payload of calls and answers that came in.
sent_bytes_total                  bytes_out                    Payload of calls and answers that went out.
peers                             peers                        Peers that the node works with.
clock_behind_seconds              network.clock.behind         Of the clock, behind its peers' (median).
# Processes.
worker_restarts_total             worker_restarts              Compute processes that replaced a failed one.
p2pd_restarts_total               network.p2pd_restarts        Times that p2pd was started again.
p2pd_connections                  network.p2pd.connections     Open connections of p2pd.
p2pd_cpu_seconds_total            network.p2pd.cpu_seconds     CPU time of p2pd.
p2pd_open_files                   network.p2pd.open_files      Open files of p2pd.
memory_bytes{process=network}     process.memory_bytes         Resident memory, without that of a GPU.
memory_bytes{process=compute}     worker_memory_bytes
memory_bytes{process=p2pd}        network.p2pd.memory_bytes
gpu_memory_bytes{of=total}        gpu.total_bytes              Of the GPU: in all, used by all, by the node's tensors.
gpu_memory_bytes{of=used}         gpu.used_bytes
gpu_memory_bytes{of=allocated}    gpu.allocated_bytes
gpu_memory_bytes{of=reserved}     gpu.reserved_bytes
gpu_utilization                   gpu.utilization              Part of the time in which the GPU had something to do.
python_blocks                     process.python_blocks        Blocks of the network process's Python allocator.
""")

PEER_METRICS = _read("""
peer_groups_used            used               Groups of the peer in the whole training's batches.
peer_packets_accepted_total accepted           Packets that the peer signed and that were admitted.
peer_packets_refused_total  refused            Packets that the peer signed and that were refused.
peer_received_bytes_total   bytes_in           Payload that came from the peer.
peer_sent_bytes_total       bytes_out          Payload that went to the peer.
peer_weight                 weight             What the peer's samples count in the loss, from 0 to 1.
peer_unseen_seconds         seconds_since_seen Since the peer was last seen.
""")


def exposition(status: AsJson, peers: AsJson) -> bytes:
    """The text exposition, version 0.0.4, of what `Node.status` and `Node.peers` say; at most 64 peers are in it."""
    return generate_latest(_Scrape(_of_node(status, peers)))


SWARM_METRICS = _read("""
heard_seconds          heard               Since the node was last seen.
step                   step                The node's last announced step.
groups                 groups              Groups that the node has announced since this observer looks.
success                success             Part of these groups' completions that are right, as claimed.
pass_at_1_claimed      claims.pass_at_1    Greedy pass@1, as claimed.
foreign_groups_claimed claims.foreign_used Groups of others it trained on, as claimed.
received_bytes_claimed claims.bytes_in     Payload since its start, as claimed.
sent_bytes_claimed     claims.bytes_out    Payload since its start, as claimed.
""")


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
    yield Gauge("ftis_swarm_nodes", "Nodes seen within ten minutes.", len(present))
    yield from _families("ftis_swarm_node_", SWARM_METRICS, {node["id"]: node for node in present}, "peer")


def _of_node(status: AsJson, peers: AsJson) -> Families:
    info = Gauge("ftis_node_info", _INFO, labels=["version", "model", "kind", "run"])
    known = (str(status.get(key) or "") for key in ("kind", "run"))
    info.add_metric([ftis_node.__version__, _model(str(status.get("model") or "")), *known], 1)
    yield info
    yield from _one_of("state", _STATE, "state", STATES, {"": status.get("state")})
    reached = {"": at(status, "network.reachability")}
    yield from _one_of("reachability", _REACHABILITY, "reachability", REACHABILITIES, reached)
    yield from _families("ftis_node_", METRICS, {"": status})
    if "step" in status:  # the swarm has begun
        yield from _of_peers(peers)


def _of_peers(peers: AsJson) -> Families:
    why = "banned, of another run, or at addresses that are not dialled"
    left_out = Gauge("ftis_node_peers_left_out", f"Peers that are left alone: {why}.", labels=[])
    left_out.add_metric([], len(peers["left_out"]))
    yield left_out
    shown = peers["peers"][:PEERS_MAX]
    standings = {peer["id"]: _standing(peer["standing"]) for peer in shown}
    yield from _one_of("peer_standing", _STANDING, "standing", STANDINGS, standings, "peer")
    yield from _families("ftis_node_", PEER_METRICS, {peer["id"]: peer for peer in shown}, "peer")


def _model(name: str) -> str:
    """Without the folders it lies in: anybody on the machine may read this, and paths have names of people in them."""
    try:
        return public_name(name)
    except UsageError:  # a folder that is gone
        return Path(name).name


def _families(prefix: str, metrics: Iterable[Metric], found: Mapping[str, AsJson], of: str = "") -> Families:
    """These metrics of what is told; `found` has it, by values of the label `of`."""
    families: dict[str, Gauge | Counter] = {}
    for metric in metrics:
        labels = list(filter(None, (of, metric.label)))
        made: type[Gauge | Counter] = Gauge
        if metric.name.endswith("_total"):
            made = Counter
        family = families.setdefault(metric.name, made(prefix + metric.name, metric.help, labels=labels))
        for whose, told in found.items():
            for value, number in metric.values(told):
                family.add_metric(list(filter(None, (whose, value))), number)
    yield from (family for family in families.values() if family.samples)


def _one_of(
    name: str, help: str, label: str, words: tuple[str, ...], found: Mapping[str, str | None], of: str = ""
) -> Families:
    """A gauge that is 1 for the word that holds and 0 for the others; `found` has it, by values of the label `of`."""
    family = Gauge(f"ftis_node_{name}", help, labels=list(filter(None, (of, label))))
    for value, word in found.items():
        for known in dict.fromkeys((*words, word)) if word is not None else ():
            family.add_metric(list(filter(None, (value, known))), float(known == word))
    if family.samples:
        yield family


def _standing(words: str) -> str | None:
    """The first word; what follows are reasons."""
    first = words.replace(":", " ").split(maxsplit=1)[0]
    return first if first in STANDINGS else None


def _number(found: Any) -> float | None:
    if isinstance(found, Mapping):
        found = sum(found.values())
    return float(found) if isinstance(found, (int, float)) and math.isfinite(found) else None
