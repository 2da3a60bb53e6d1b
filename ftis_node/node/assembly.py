"""Assembly of a node's parts: from an empty home to a node that can train."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from ftis_node.config.run import RunFile
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.host.loops import forever
from ftis_node.node.checkpointing import Saving
from ftis_node.node.compute import ComputeProcess
from ftis_node.node.demand import announced_age
from ftis_node.node.means import Means
from ftis_node.node.options import JoinOptions
from ftis_node.node.progress import Progress
from ftis_node.node.remembered import facts_of
from ftis_node.node.run_source import roster_of
from ftis_node.node.standing import ReputationFile
from ftis_node.node.stepper import Stepper, source_for
from ftis_node.observe.metrics import MetricsLog
from ftis_node.observe.provenance import versions
from ftis_node.observe.tracking import Tracker
from ftis_node.packet import Group
from ftis_node.policy.names import lasting
from ftis_node.store.checkpoints import CHECKPOINTS_KEPT
from ftis_node.store.home import Home
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.admission import AdmissionContext, admit
from ftis_node.swarm.chronicle import read_chronicle
from ftis_node.swarm.duplicate import TWIN_SECONDS, somebody_else
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.membership import Membership
from ftis_node.swarm.pulling import Trade
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.self_report import SelfReport
from ftis_node.swarm.swarm import Swarm
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.p2pd import listening_of
from ftis_node.text import GB, rounded
from ftis_node.worker.messages import OpenedRun, plan_row

CHECKPOINTS = CHECKPOINTS_KEPT + 1  # most checkpoints on disk at a time, while the last is written
LOG_BYTES = 64 << 20  # node.log and output.log with their older files, the present part of metrics.jsonl and one more
OLDER_METRICS_BYTES = 256 << 20  # compressed; at most an eighth of what `disk_gb` leaves
LEAST_PACKETS = 16 << 20
LAN_SECONDS = 15.0  # until nodes on the local network are compared with members that became known

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Components:
    """A node's parts once it has its run and its model. `reputation_file` and `saving` write files that outlive it."""

    home: Home
    run_file: RunFile
    metrics: MetricsLog
    saving: Saving
    reputation_file: ReputationFile
    stepper: Stepper
    swarm: Swarm

    def go_by(self, settings: Settings) -> None:
        """Go by these settings from now on, as far as a running node can; constants of the objective follow through
        `Training.change`."""
        self.stepper.means.settings = settings
        self.swarm.traffic.limit(settings.upload_mbit * 1e6 / 8)
        self.swarm.reports.telling = settings.tells_of_itself(private=bool(self.run_file.run.founder))
        self.saving.minutes = settings.checkpoint_minutes

    def close(self) -> None:
        """Close the files, and give up a checkpoint in progress. The swarm and the compute process must have ended:
        both use the store."""
        self.saving.abandon()
        self.stepper.means.store.close()
        self.metrics.close()


@dataclass(frozen=True)
class Quotas:
    """Byte limits of the home: packets, older_metrics (compressed parts of metrics.jsonl)."""

    packets: int
    older_metrics: int


def quotas(settings: Settings, checkpoint_bytes: int) -> Quotas:
    """The byte limits of packets and of the step log.

    Args:
        checkpoint_bytes: of one checkpoint, as planned; three are on disk while the third is written.

    Raises:
        UsageError: `disk_gb` has no room for the checkpoints.
    """
    packets = settings.packet_quota_mb << 20
    if settings.disk_gb is None:
        return Quotas(packets, OLDER_METRICS_BYTES)
    room = round(settings.disk_gb * GB) - CHECKPOINTS * checkpoint_bytes - LOG_BYTES
    older = min(OLDER_METRICS_BYTES, room // 8)
    if room - older < LEAST_PACKETS:
        need = CHECKPOINTS * checkpoint_bytes + LOG_BYTES + LEAST_PACKETS * 8 // 7  # an eighth is for older metrics
        raise UsageError(
            f"The home may take {rounded(settings.disk_gb * GB)} on disk, but checkpoints, packets and logs need "
            f"{rounded(need)} at least.",
            "Give it more with --set disk_gb=…, or train LoRA layers, whose checkpoints are small.",
        )
    return Quotas(min(packets, room - older), older)


def build_components(
    compute: ComputeProcess,
    settings: Settings,
    run_file: RunFile,
    opened: OpenedRun,
    *,
    identity: Identity,
    transport: Libp2p,
    flush: asyncio.Event,
    describe: Callable[[], SelfReport | None],
) -> Components:
    """Create all parts of a node beside its compute process, which has the model. The swarm is not started yet.

    It opens the store of packets, leaves out a round, as after a crash the last may have been announced, and starts the
    tracker's process where there is one. The caller closes them with the components. After an error the process ends.

    Args:
        flush: see `Means`. describe: see `Swarm`.

    Raises:
        UsageError: `disk_gb` has no room for what a node keeps.
        UserError: this key is no member of the private run, or a file of the home cannot be read.
    """
    home = compute.options.home
    facts = compute.facts
    run = run_file.run
    quota = quotas(settings, facts.checkpoint_bytes)
    store = PacketStore(home.store, run.id, quota.packets)
    store.skip_round()
    name = f"{Path(settings.model).name}-{run.id.hex()[:8]}"
    tracker = Tracker(settings.track, home.track / settings.track, name) if settings.track != "none" else None
    metrics = MetricsLog(home.metrics, quota.older_metrics, tracker=tracker)
    reputation = Reputation(boot_seconds, settings.defences)
    context = AdmissionContext(run=run, prompt_digests=opened.prompt_digests)
    stepper: Stepper  # made below: the swarm hands it groups, but not before it has started
    swarm = Swarm(
        transport=transport,
        identity=identity,
        run_file=run_file,
        reputation=reputation,
        max_age=announced_age(run, settings.max_age),
        trade=Trade(context, store, lambda: stepper.want(), lambda arrived: stepper.source.inbox.on_groups(arrived)),
        peer_cache=home.peers,
        roster=roster_of(compute.options, run, identity),
        describe=describe,
        chronicle=read_chronicle(home.swarm_history, run),
    )
    means = Means(
        context=context,
        reputation=reputation,
        own_only=opened.own_only,
        author=identity.author,
        settings=settings,
        store=store,
        worker=compute.worker,
        swarm=swarm,
        flush=flush,
        own_data=facts.own_rows > 0,
        welcomes=swarm.roster.admits,
    )
    stepper = Stepper(means, source_for(means))
    components = Components(
        home=home,
        run_file=run_file,
        metrics=metrics,
        saving=Saving(home.checkpoints, facts_of(facts, lasting(settings.model)), metrics),
        reputation_file=ReputationFile(home.standing, reputation),
        stepper=stepper,
        swarm=swarm,
    )
    components.go_by(settings)
    return components


def go_on_from(components: Components, restored: Progress | None, compute: ComputeProcess) -> None:
    """Continue from a checkpoint's progress, and log everything that `lab replay` needs about this start.

    Args:
        restored: None: start with the model's own weights.
    """
    facts = compute.facts
    components.stepper.means.progress = restored or Progress()
    components.metrics.write(
        "started",
        step=components.stepper.progress.step,
        fresh=restored is None,
        branch=components.saving.branch,
        directory=str(Path.cwd()),  # the base of relative paths in the settings
        task=compute.options.task_of(components.run_file),
        **compute.options.files(),
        run=components.run_file.run.id.hex(),
        kind=facts.kind,
        settings=facts.settings.model_dump(mode="json"),
        plan=plan_row(facts.plan),
        device=facts.device,
        threads=facts.threads,
        versions=versions(),
    )


def refill_pool(stepper: Stepper) -> None:
    """Score the admitted groups that were neither scored nor trained on before the compute process ended, and may be.

    Call it when a compute process has its run and its checkpoint; the scoring then goes on by itself. Groups that are
    too old for the pool are left out. When a part of a horizontal run was issued by its author's clock is not known any
    more; that clock may be an epoch off.
    """
    source = stepper.source
    context = stepper.means.context
    epoch = context.run.epoch
    for author, body, age in stepper.means.store.waiting(source.pool.max_age()):
        made = unix_seconds() - age
        born = boot_seconds() - age
        for late in (0, epoch, -epoch):  # the first that admission takes; in other runs all are alike
            group = admit(context, author, body, issued_at=int(made - late))
            if isinstance(group, Group):
                if not source.pool.knows(group.key):
                    source.inbox.score_later(group, born)
                break


async def open_network(options: JoinOptions, settings: Settings, sockets: Path, identity: Identity) -> Libp2p:
    """Start p2pd, on the previous port if that is free. The caller closes what it returns. With bootstraps it first
    asks them for some seconds whether another node has this key.

    Args:
        options: the home and the bootstraps; `peers` are those of them that the owner named.
        sockets: a private directory for p2pd's sockets.

    Raises:
        UserError: another node has this key, the port is taken, or p2pd does not start.
    """
    home = options.home
    known = options.bootstraps
    listening = listening_of(settings, home.key, sockets)
    if known and await somebody_else(listening, identity.author, known, TWIN_SECONDS, options.peers):
        raise UserError(
            f"Another node with the key of {home.path} is running somewhere: {identity.peer_id}.",
            "Stop that one first, or give this one a --home of its own.",
        )
    return await Libp2p.start(listening, home.last_port())


async def open_lan(stack: AsyncExitStack, swarm: Swarm, transport: Libp2p, about: dict[str, str]) -> None:
    """Meet nodes of the same local network by mDNS, until the stack ends; a failure is logged, and the node goes on
    without. A node that only dials tells nothing.

    Args:
        about: what an open run's node tells of itself; a private one's keeps it to itself.
    """
    from ftis_node.swarm.lan import Lan, LanNode, MembersOnLan

    roster = swarm.roster
    run = swarm.membership.run_file.run

    def heard(node: LanNode) -> None:
        if node.run == run.id:
            swarm.hear_on_lan(node.addresses)

    members = MembersOnLan(run.id, roster.admits, swarm.hear_member_on_lan)

    async def look() -> None:
        while True:
            await asyncio.sleep(LAN_SECONDS)
            members.look()

    lan = Lan(transport.listening.host, heard, members.hear)
    stack.push_async_callback(lan.close)
    try:
        await lan.start()
        if transport.listening.listen:
            await lan.tell(run, swarm.membership.identity.author, transport.port, **about)
        if roster.private:
            stack.callback(asyncio.create_task(forever(look)).cancel)
    except Exception as error:  # zeroconf raises anything from a socket error to a conflict of names
        logger.warning("The local network cannot be told of this node: %r", error)


def check_peers(membership: Membership, bootstraps: Sequence[str], home: Path) -> None:
    """Refuse to go on with peers of which none works with this node. Call it when they have been greeted; those that
    did not answer count as good, and so does an empty list.

    Raises:
        UsageError: all belong to another run than the home's, or all speak another protocol.
        UserError: none of them takes this node into the private run.
    """
    named = [parse_address(text) for text in bootstraps]
    if not named or not all(peer in membership.refused for peer in named):
        return
    run = membership.run_file.run
    why = membership.refused[named[0]]
    if all(peer in membership.majors for peer in named):
        raise UsageError(
            f"None of the --peers can work with this node: {why}.",
            "Upgrade ftis-node there or here, so that both speak one protocol.",
        )
    if run.founder:
        raise UserError(
            f"None of the peers takes this node into the private run: {why}.",
            f"Ask a member for an invitation; this node is {membership.identity.peer_id}.",
        )
    raise UsageError(
        f"The --peers are all in another run than the home {home}, which belongs to run {run.id.hex()}.",
        "Name a fresh --home to join their run, or leave out --peers.",
    )
