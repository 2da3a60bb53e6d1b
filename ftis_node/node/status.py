"""The status and the peers that a node shows, and its log of steps."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psutil

import ftis_node
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.node.progress import Totals
from ftis_node.node.stepper import Stepper
from ftis_node.observe.answers import CheckpointStatus, KnownPeer, LeftOut, NodeState, PoolStatus
from ftis_node.observe.api import Answer
from ftis_node.observe.view import number
from ftis_node.policy.names import public_name
from ftis_node.step_report import DeviceSeconds, Generator, StepSeconds, TakenStep
from ftis_node.swarm.identity import author_of, peer_id
from ftis_node.swarm.needs import Needs, RowState
from ftis_node.swarm.peer_clocks import ClockDifference
from ftis_node.swarm.pool import Pool
from ftis_node.swarm.self_report import TEACHERS_MAX, SelfReport
from ftis_node.swarm.standing import PeerStanding
from ftis_node.swarm.swarm import Swarm
from ftis_node.swarm.wire.transport import Health
from ftis_node.worker.messages import GpuFigures, ModelFacts, plan_row

STEP_SECONDS = 10.0  # between two log lines about steps

logger = logging.getLogger(__name__)


class LastStep(msgspec.Struct, frozen=True):
    """The latest step's seconds and results; loss and gradient norm are None if it did not change the weights."""

    seconds: StepSeconds
    device: DeviceSeconds
    loss: float | None
    gradient_norm: float | None
    tokens: int
    skipped: str | None
    generator: Generator | None


class NeedsStatus(msgspec.Struct, frozen=True):
    """The rows on which all own samples of a group failed. tried: all of them. needed: still. found: answers wait.

    learned: trained on another node's group there. done: of the learned ones, those that the node can do now.
    """

    tried: int
    needed: int
    found: int
    learned: int
    done: int


class NetworkStatus(msgspec.Struct, frozen=True):
    """This node's reachability, and the health of its p2pd; None: not known yet."""

    reachability: str
    p2pd_restarts: int
    p2pd: Health | None
    clock: ClockDifference | None


class ProcessStatus(msgspec.Struct, frozen=True):
    """The network process: resident bytes, and blocks of Python's allocator, which show leaks."""

    memory_bytes: int
    python_blocks: int


class ComputeStatus(msgspec.Struct, frozen=True):
    """The compute process; `loaded` is None before the first model. worker_memory_bytes: resident, not on a GPU."""

    loaded: ModelFacts | None
    worker_restarts: int
    worker_memory_bytes: int | None
    gpu: GpuFigures | None

    def row(self) -> dict[str, Any]:
        """Its fields in `status --json`."""
        facts = self.loaded
        return {
            "kind": facts.kind if facts is not None else None,
            "plan": plan_row(facts.plan) if facts is not None else None,
            "parameters": facts.parameters if facts is not None else None,
            "tokenizer": facts.tokenizer if facts is not None else None,
            "worker_restarts": self.worker_restarts,
            "worker_memory_bytes": self.worker_memory_bytes,
            "gpu": msgspec.to_builtins(self.gpu),
        }


class TrainingStatus(msgspec.Struct, frozen=True):
    """Progress, groups used, the newest checkpoint, and network traffic in bytes."""

    step: int
    checkpoint: CheckpointStatus
    pass_at_1_before: float | None
    pass_at_1: float | None
    pass_at_1_step: int
    own_groups_used: int
    foreign_groups_used: dict[str, int]
    foreign_weight_share: float
    filtered_fraction: float | None
    own_reward: float | None
    foreign_reward: float | None
    step_seconds: float
    idle_share: float | None
    last_step: LastStep | None
    totals: Totals
    waiting_for: str | None
    pool: PoolStatus
    needs: NeedsStatus
    peers: int
    bytes_in: int
    bytes_out: int
    network: NetworkStatus
    process: ProcessStatus
    refused_packets: dict[str, int]
    announcements: dict[str, int]
    own_groups_refused: int


class NodeStatus(NodeState, frozen=True, kw_only=True):
    """A node's status. training: None before the node has joined its run."""

    compute: ComputeStatus
    training: TrainingStatus | None

    def row(self) -> dict[str, Any]:
        """The object that `ftis-node status --json` prints."""
        own = msgspec.structs.asdict(self)
        del own["compute"], own["training"]
        return own | self.compute.row() | (msgspec.to_builtins(self.training) or {})


class PeerRow(KnownPeer, frozen=True, kw_only=True):
    """A peer of the view. bytes_in, bytes_out: since the start."""

    standing: PeerStanding
    bytes_in: int
    bytes_out: int


class PeersReport(msgspec.Struct, frozen=True):
    """Every peer of the view, and the refused peers. names: what nodes call themselves, by peer id."""

    peers: list[PeerRow]
    left_out: list[LeftOut]
    names: dict[str, str] = {}

    def row(self) -> dict[str, Any]:
        """The object that `ftis-node peers --json` prints; a peer's standing is among its fields."""
        row = msgspec.to_builtins(self)
        for peer in row["peers"]:
            standing = peer.pop("standing")
            traffic = {way: peer.pop(way) for way in ("bytes_in", "bytes_out")}
            peer |= standing | traffic
        return dict(row)


def rows_of(report: Callable[[], NodeStatus | PeersReport]) -> Answer:
    """The same report as a JSON object."""
    return lambda: report().row()


class StepLog:
    """Logs a line about a step; only some of quick steps."""

    def __init__(self) -> None:
        self._written = -math.inf

    def write(self, last: TakenStep) -> None:
        """Log the latest step, unless the last line is newer than ten seconds."""
        if time.monotonic() < self._written + STEP_SECONDS:
            return
        self._written = time.monotonic()
        batch = last.batch
        logger.info(
            "Step %d: own groups %d (reward %s), foreign %d (%s), %.1f s",
            last.step,
            batch.own_groups,
            number(batch.own_reward, ".2f"),
            batch.foreign_groups,
            number(batch.foreign_reward, ".2f"),
            last.seconds.total,
        )


def training_status(stepper: Stepper, swarm: Swarm, checkpoint: CheckpointStatus) -> TrainingStatus:
    """The status of a node that has joined its run."""
    progress, last, pool = stepper.progress, stepper.last, stepper.pool
    return TrainingStatus(
        step=progress.step,
        checkpoint=checkpoint,
        pass_at_1_before=progress.pass_at_1_before,
        pass_at_1=progress.pass_at_1,
        pass_at_1_step=progress.pass_at_1_step,
        own_groups_used=progress.own_groups_used,
        foreign_groups_used=dict(progress.foreign_groups_used),
        foreign_weight_share=progress.foreign_weight_share,
        filtered_fraction=last.report.diagnostics.overall.get("filtered_fraction") if last else None,
        own_reward=last.batch.own_reward if last else None,
        foreign_reward=last.batch.foreign_reward if last else None,
        step_seconds=stepper.step_seconds(),
        idle_share=stepper.idle_share(),
        last_step=last_step(last) if last else None,
        totals=stepper.totals,
        waiting_for=stepper.waiting_for or None,
        pool=PoolStatus(len(pool), pool.no_signal, pool.expired),
        needs=needs_status(progress.needs, pool),
        peers=len(swarm.membership.view),
        bytes_in=swarm.traffic.bytes_in,
        bytes_out=swarm.traffic.bytes_out,
        network=network_status(swarm),
        process=ProcessStatus(psutil.Process().memory_info().rss, sys.getallocatedblocks()),
        refused_packets=dict(swarm.pulling.rejections),
        announcements=dict(swarm.gossip.counts),
        own_groups_refused=stepper.own_refused,
    )


def needs_status(needs: Needs, pool: Pool) -> NeedsStatus:
    """The row counts of a node's needs."""
    found = sum(row in needs for row in pool.rows())
    needed, done = needs.count(RowState.NEEDED), needs.count(RowState.DONE)
    learned = needs.count(RowState.LEARNED) + done
    return NeedsStatus(needed + learned, needed, found, learned, done)


def last_step(last: TakenStep) -> LastStep:
    """The row of the latest step."""
    report = last.report

    def shown(value: float) -> float | None:
        return None if report.skipped or not math.isfinite(value) else value

    loss, norm = shown(report.loss), shown(report.gradient_norm)
    return LastStep(last.seconds, report.device, loss, norm, report.tokens, report.skipped, report.generator)


def resident_bytes(pid: int | None) -> int | None:
    """Resident bytes of a process; None without a process."""
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid is not None else None
    except psutil.Error:
        return None


def network_status(swarm: Swarm) -> NetworkStatus:
    """The status of the node's network."""
    membership = swarm.membership
    clock = membership.clocks.difference(membership.view)
    return NetworkStatus(str(membership.reachability()), swarm.supervisor.restarts, membership.health, clock)


def self_report(status: NodeStatus, author: bytes, run_id: bytes) -> SelfReport | None:
    """What the node says of itself to observers, not signed yet; None before it trains.

    Args:
        author: its 38-byte peer id.
    """
    training, loaded = status.training, status.compute.loaded
    if training is None or loaded is None:
        return None
    used = sorted(training.foreign_groups_used.items(), key=lambda item: -item[1])
    return SelfReport(
        run_id=run_id,
        author=author,
        at=int(unix_seconds()),
        name=status.name[:64],
        model=public_name(status.model)[:64],
        tokenizer=loaded.tokenizer[:12],
        version=ftis_node.__version__,
        reach=training.network.reachability,
        state=status.state,
        step=training.step,
        pass_at_1=training.pass_at_1,
        pass_at_1_before=training.pass_at_1_before,
        own_used=training.own_groups_used,
        foreign_used=sum(training.foreign_groups_used.values()),
        peers=training.peers,
        bytes_in=training.bytes_in,
        bytes_out=training.bytes_out,
        teachers={author_of(teacher): groups for teacher, groups in used[:TEACHERS_MAX]},
    )


def peers_report(stepper: Stepper, swarm: Swarm, names: dict[str, str]) -> PeersReport:
    """The rows of all peers."""
    used, traffic = stepper.progress.foreign_groups_used, swarm.traffic
    peers = [
        PeerRow(
            id=peer_id(peer.id),
            agent=peer.agent,
            addresses=peer.addresses,
            seconds_since_seen=boot_seconds() - peer.seen,
            used=used[peer_id(peer.id)],
            standing=swarm.standing.report(peer.id),
            bytes_in=traffic.received[peer.id],
            bytes_out=traffic.sent[peer.id],
        )
        for peer in swarm.membership.view.values()
    ]
    left_out = {**swarm.membership.refused, **swarm.standing.left_alone()}
    return PeersReport(peers, [LeftOut(peer_id(peer), reason) for peer, reason in left_out.items()], names)
