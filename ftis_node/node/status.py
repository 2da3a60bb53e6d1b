"""The status and the peers that a node shows."""

import shutil
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
import psutil

import ftis_node
from ftis_node.fit.plan import Plan
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.node.assembly import Components
from ftis_node.node.condition import FAULT_SECONDS, Signs
from ftis_node.node.progress import OTHERS
from ftis_node.node.training import Training
from ftis_node.observe import answers
from ftis_node.observe.answers import Status, finite
from ftis_node.policy.names import public_name
from ftis_node.step_report import TakenStep
from ftis_node.swarm.chronicle import names_in
from ftis_node.swarm.identity import author_of, peer_id
from ftis_node.swarm.known import Outcome
from ftis_node.swarm.self_report import TEACHERS_MAX, SelfReport
from ftis_node.text import with_names
from ftis_node.worker.messages import plan_row

_EVALUATED = ("pass_at_1_before", "pass_at_1", "pass_at_1_step")
_OF_PROGRESS = ("step", *_EVALUATED, "own_groups_used", "foreign_weight_share")
_JOINED = Status.__struct_fields__[Status.__struct_fields__.index("step") :]


def status_row(status: Status, plan: Plan | None) -> dict[str, Any]:
    """The object that `ftis-node status --json` prints; docs/metrics.md has its keys. Before the node has joined, those
    that `joined` fills are left out, not null. plan: None before the model is loaded."""
    row: dict[str, Any] = msgspec.to_builtins(status) | {"plan": plan_row(plan) if plan is not None else None}
    if status.step is not None:
        return row
    return {name: row[name] for name in row if name not in _JOINED}


def joined(status: Status, training: Training) -> Status:
    """The status with what a node has that has joined its run: fields from `step` on."""
    parts = training.components
    evaluations = training.evaluations
    stepper = parts.stepper
    means = stepper.means
    progress = means.progress
    pool = stepper.pool
    swarm = parts.swarm
    membership = swarm.membership
    return msgspec.structs.replace(
        status,
        **{name: getattr(progress, name) for name in _OF_PROGRESS},
        **_latest(stepper.last),
        addresses=membership.own_addresses,
        curve=list(evaluations.curve),
        pass_at_1_due=evaluations.due_seconds(means.until_evaluation()),
        checkpoint=parts.saving.status(),
        foreign_groups_used=dict(progress.foreign_groups_used),
        step_seconds=means.pace.step_seconds(),
        idle_share=stepper.idle_share(),
        totals=msgspec.to_builtins(means.totals),
        waiting_for=means.waiting_for or None,
        pool=answers.PoolStatus(len(pool), pool.no_signal, pool.expired),
        peers=len(membership.active_view),
        bytes_in=swarm.traffic.bytes_in,
        bytes_out=swarm.traffic.bytes_out,
        network=answers.Network(
            reachability=str(membership.reachability()),
            p2pd_restarts=swarm.supervisor.restarts,
            p2pd=membership.health,
            clock=membership.sessions.clock_difference(membership.active_view),
        ),
        process=answers.Process(psutil.Process().memory_info().rss, sys.getallocatedblocks()),
        refused_packets=dict(swarm.pulling.rejections),
        announcements=dict(swarm.gossip.counts),
        own_groups_refused=stepper.source.maker.refused,
    )


def _latest(last: TakenStep | None) -> dict[str, Any]:
    """The status's part on the latest step; nothing before the first."""
    if last is None:
        return {}
    return {
        "filtered_fraction": last.report.diagnostics.foreign.get("filtered_fraction"),
        "own_reward": last.batch.own_reward,
        "foreign_reward": last.batch.foreign_reward,
        "last_step": last_step(last),
    }


def signs(training: Training, network_down: float, stalled: float) -> Signs:
    """The signs from which the node's condition follows; for the seconds see `Signs`. It reads all anew at each call,
    the free bytes of the disk among them. While a checkpoint is being written these do not count."""
    parts = training.components
    names = names_in(parts.swarm.chronicle)
    membership = parts.swarm.membership
    stepper = parts.stepper
    maker = stepper.source.maker
    roster = parts.swarm.roster
    skipped: list[str] = []
    if roster.private or not membership.active_view:
        for peer, reason in membership.skipped().items():
            skipped.append(with_names(f"{peer_id(peer)}: {reason}", names))
    bad_steps = 0
    if stepper.last is not None:
        bad_steps = stepper.last.report.bad_steps
    return Signs(
        peers=len(membership.active_view),
        sought=training.sought,
        reachability=membership.reachability(),
        network_down=network_down,
        free_bytes=None if parts.saving.writing else shutil.disk_usage(parts.home.path).free,
        checkpoint_bytes=parts.saving.next_bytes,
        faults=training.compute.faults(FAULT_SECONDS),
        stalled=stalled,
        bad_steps=bad_steps,
        idle_steps=stepper.idle_steps,
        signals=(len(maker.latest), sum(signal for _, signal in maker.latest)),
        pass_at_1=stepper.progress.pass_at_1,
        warning=training.evaluations.warning,
        other_protocol=len(membership.majors),
        own_refused=maker.unsound,
        clock=membership.sessions.clock_difference(membership.active_view),
        replayed=parts.swarm.gossip.counts[Outcome.REPLAYED],
        shut_out=with_names(roster.shut_out, names),
        skipped=skipped,
        home=parts.home.flag,
        copied=parts.swarm.gossip.copied,
    )


def last_step(last: TakenStep) -> answers.LastStep:
    """The row of the latest step. Loss and gradient norm are None if it was skipped or they are not finite: JSON has no
    NaN."""
    row = last.row()
    for name in ("loss", "gradient_norm"):
        row[name] = finite(row[name])
        if last.report.skipped:
            row[name] = None
    return msgspec.convert(row, answers.LastStep)


def resident_bytes(pid: int | None) -> int | None:
    """Resident bytes of a process; None without a process, or if it is gone."""
    if pid is not None:
        with suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
    return None


def self_report(status: Status, author: bytes, run_id: bytes) -> SelfReport | None:
    """Return the node's report to observers, not signed yet; None before it trains. Texts are cut, and only the authors
    with most groups are named, so that a report stays small.

    Args:
        author: its 38-byte peer id.
    """
    if status.step is None or status.network is None or status.tokenizer is None:
        return None
    named = Counter(status.foreign_groups_used)
    del named[OTHERS]
    return SelfReport(
        run_id=run_id,
        author=author,
        at=int(unix_seconds()),
        name=status.name[:64],
        model=public_name(status.model)[:64],
        tokenizer=status.tokenizer[:12],
        version=ftis_node.__version__,
        reach=status.network.reachability,
        **{name: getattr(status, name) for name in ("state", *_EVALUATED[:2], "step", "peers")},
        own_used=status.own_groups_used or 0,
        foreign_used=sum(status.foreign_groups_used.values()),
        bytes_in=status.bytes_in or 0,
        bytes_out=status.bytes_out or 0,
        teachers={author_of(teacher): groups for teacher, groups in named.most_common(TEACHERS_MAX)},
    )


def peers_row(components: Components) -> dict[str, Any]:
    """The object that `ftis-node peers --json` prints; a peer's standing is among its fields."""
    swarm = components.swarm
    used = components.stepper.progress.foreign_groups_used
    traffic = swarm.traffic
    peers = [
        {
            "id": peer_id(peer.id),
            "agent": peer.agent,
            "addresses": peer.addresses,
            "seconds_since_seen": boot_seconds() - peer.seen,
            "used": used[peer_id(peer.id)],
            **swarm.reputation.report(peer.id),
            "bytes_in": traffic.received[peer.id],
            "bytes_out": traffic.sent[peer.id],
        }
        for peer in swarm.membership.active_view.values()
    ]
    left_out = {**swarm.membership.skipped(), **swarm.membership.refused, **swarm.reputation.left_alone()}
    rows = [{"id": peer_id(peer), "reason": reason} for peer, reason in left_out.items()]
    observers = [peer_id(peer) for peer, session in swarm.membership.sessions.items() if session.observer]
    return {"peers": peers, "left_out": rows, "observers": observers, "names": names_in(swarm.chronicle)}
