"""What a node says of its training and of its peers, in plain values."""

from __future__ import annotations

import logging
import math
import sys
import time
from dataclasses import asdict
from typing import Any

import msgspec
import psutil

from ftis_node.host.clocks import boot_seconds
from ftis_node.node.stepper import Stepper
from ftis_node.observe.view import number
from ftis_node.step_report import TakenStep
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.swarm import Swarm

STEP_SECONDS = 10.0  # between two lines of the log about steps

logger = logging.getLogger(__name__)


class StepLog:
    """Says in the log what steps came to: of quick ones only some."""

    def __init__(self) -> None:
        self._told = -math.inf

    def tell(self, last: TakenStep) -> None:
        """Logs the latest step."""
        if time.monotonic() < self._told + STEP_SECONDS:
            return
        self._told = time.monotonic()
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


def training_status(stepper: Stepper, swarm: Swarm, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """How far the training is, what it used, what of it is saved, and what went over the wire."""
    progress, last, pool = stepper.progress, stepper.last, stepper.pool
    return {
        "step": progress.step,
        "checkpoint": checkpoint,
        "pass_at_1_before": progress.pass_at_1_before,
        "pass_at_1": progress.pass_at_1,
        "pass_at_1_step": progress.pass_at_1_step,
        "own_groups_used": progress.own_groups_used,
        "foreign_groups_used": dict(progress.foreign_groups_used),
        "foreign_weight_share": progress.foreign_weight_share,
        "filtered_fraction": last.report.diagnostics.overall.get("filtered_fraction") if last else None,
        "own_reward": last.batch.own_reward if last else None,
        "foreign_reward": last.batch.foreign_reward if last else None,
        "step_seconds": stepper.step_seconds(),
        "idle_share": stepper.idle_share(),
        "last_step": last_step(last) if last else None,
        "totals": asdict(stepper.totals),
        "waiting_for": stepper.waiting_for or None,
        "pool": {"waiting": len(pool), "no_signal": pool.no_signal, "expired": pool.expired},
        "peers": len(swarm.membership.view),
        "bytes_in": swarm.traffic.bytes_in,
        "bytes_out": swarm.traffic.bytes_out,
        "network": network_status(swarm),
        "process": process_status(),
        "refused_packets": dict(swarm.pulling.rejections),
        "announcements": dict(swarm.gossip.counts),
        "own_groups_refused": stepper.own_refused,
    }


def last_step(last: TakenStep) -> dict[str, Any]:
    """The latest step's seconds and what came of it; no loss of one that left the weights alone."""
    report = last.report

    def shown(value: float) -> float | None:
        return None if report.skipped or not math.isfinite(value) else value

    return {
        "seconds": msgspec.to_builtins(last.seconds),
        "device": msgspec.to_builtins(report.device),
        "loss": shown(report.loss),
        "gradient_norm": shown(report.gradient_norm),
        "tokens": report.tokens,
        "skipped": report.skipped,
    }


def worker_memory(pid: int | None) -> int | None:
    """Bytes that the compute process has resident (not on a GPU), None where there is none."""
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid is not None else None
    except psutil.Error:
        return None


def process_status() -> dict[str, int]:
    """What the network process itself holds: memory, and blocks of Python's allocator, which tell a leak from noise."""
    return {"memory_bytes": psutil.Process().memory_info().rss, "python_blocks": sys.getallocatedblocks()}


def network_status(swarm: Swarm) -> dict[str, Any]:
    """How this node is reached, and how its p2pd is."""
    health = swarm.membership.health
    clock = swarm.membership.clocks.difference(swarm.membership.view)
    return {
        "reachability": str(swarm.membership.reachability()),
        "p2pd_restarts": swarm.supervisor.restarts,
        "p2pd": asdict(health) if health is not None else None,
        "clock": asdict(clock) if clock is not None else None,
    }


def peers_report(stepper: Stepper, swarm: Swarm) -> dict[str, Any]:
    """Every peer of the view with what came of it, and who was left out and why."""
    used = stepper.progress.foreign_groups_used
    return {
        "peers": [
            {
                "id": peer_id(peer.id),
                "agent": peer.agent,
                "addresses": peer.addresses,
                "seconds_since_seen": boot_seconds() - peer.seen,
                "used": used[peer_id(peer.id)],
                **swarm.standing.report(peer.id),
                "bytes_in": swarm.traffic.received[peer.id],
                "bytes_out": swarm.traffic.sent[peer.id],
            }
            for peer in swarm.membership.view.values()
        ],
        "left_out": [
            {"id": peer_id(peer), "reason": reason}
            for peer, reason in {**swarm.membership.refused, **swarm.standing.left_alone()}.items()
        ],
    }
