"""Nodes on a terminal: what one does, what it gets from others and gives them, and said last; or several in a table."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ftis_node.observe.answers import CheckpointStatus, PeerRow, Peers, Status
from ftis_node.observe.logs import as_text
from ftis_node.observe.terminal import words
from ftis_node.step_report import GpuFigures
from ftis_node.text import counted, duration, name_of, number, rounded

_COLOURS = {
    **dict.fromkeys(("ONLINE", "RELAYED", "OUTBOUND-ONLY"), "green"),
    **dict.fromkeys(("ALONE", "PAUSED"), "yellow"),
    "DEGRADED": "red",
}
_SPARKS = "▁▂▃▄▅▆▇█"
PEERS_SHOWN = 8
REST = 21  # rows of all but peers and log, at most
AIRY = 41  # rows from which on empty lines part the parts
WITHIN = 69  # bars of a curve that fit beside its name into a frame of 80 columns
NAME = 16  # columns of a peer's name
NOBODY = Peers([])


def node_view(
    status: Status,
    peers: Peers = NOBODY,
    lines: Sequence[str] = (),
    hint: str = "",
    *,
    height: int | None = None,
) -> RenderableType:
    """A node at a glance; fits 80 columns.

    Args:
        status: `/status` of its API. peers: `/peers`.
        lines: of the log, the latest last.
        hint: what the keys do.
        height: of the terminal, from 20 rows on: so many peers and lines of the log are shown as it has room for. None:
            all lines, and the first peers.
    """
    most = PEERS_SHOWN
    gap: list[RenderableType] = [Text()]
    if height is not None:
        most = min(PEERS_SHOWN, max(0, height - REST) // 2)
        lines = lines[max(0, len(lines) - most) :]
        if height < AIRY:
            gap = []
    parts: list[list[RenderableType]] = [[_headline(status), *_doing(status)]]
    if status.advice:
        parts[0].append(words(f"→ {status.advice}", "bold"))
    if status.step is not None:
        parts.append([_figures(status)])
    if status.curve:
        parts.append([words("pass@1 ") + words(sparkline([rate for _, rate in status.curve], WITHIN), "green")])
    if peers.peers and most:
        parts.append([_peers(peers, most)])
    if lines:
        parts.append([words(as_text(line), "dim", whole=False) for line in lines])
    if hint:
        parts.append([words(hint, "dim")])
    shown = parts[0]
    for part in parts[1:]:
        shown = [*shown, *gap, *part]
    return Panel(Group(*shown), title=words(_title(status)), title_align="left", border_style="dim")


def _title(status: Status) -> str:
    """The node's name and model, and how its weights are held."""
    title = " ".join(filter(None, ("ftis-node", status.name, "·", status.model)))
    if status.kind is None:
        return title
    how = [status.kind]
    if status.plan is not None:
        how.append(status.plan.dtype)
        if status.plan.quantisation == "nf4":
            how.append("NF4")
    return f"{title} ({', '.join(filter(None, how))})"


def gpu_line(gpu: GpuFigures) -> str:
    """A GPU's utilization, if it is known, and its memory in use and in all."""
    busy = "" if gpu.utilization is None else f"{gpu.utilization:.0%} busy, "
    return f"{busy}{rounded(gpu.used_bytes)} of {rounded(gpu.total_bytes)}, {rounded(gpu.allocated_bytes)} in tensors"


def saved_line(checkpoint: CheckpointStatus) -> str:
    """The newest checkpoint's step and age, and when the next is due."""
    if checkpoint.age_seconds is None:  # nor a step
        return "nothing yet"
    due = checkpoint.due_seconds
    then = "" if due is None else f", next in {duration(due)}"
    return f"step {checkpoint.step}, {duration(checkpoint.age_seconds)} ago{then}"


def _headline(status: Status) -> Text:
    state = status.state
    text = words(state, f"bold {_COLOURS.get(state, 'cyan')}") + words(f"  {status.reason}")
    if status.pausing and state != "PAUSED":
        when = "once it has loaded" if state == "LOADING" else "after this step"
        text.append(f"  It pauses {when}.")
    if status.finishing:
        text.append("  It ends after this step.")
    return text


def _doing(status: Status) -> list[RenderableType]:
    """The work under way, in a line of its own."""
    return [] if status.doing is None else [words(f"  {status.doing.sentence()}", "dim", whole=False)]


def _figures(status: Status) -> Table:
    before = number(status.pass_at_1_before, ".3f")
    now = number(status.pass_at_1, ".3f")
    own = number(status.own_reward, ".2f")
    others = number(status.foreign_reward, ".2f")
    foreign = sum(status.foreign_groups_used.values())
    seconds = status.last_step.seconds if status.last_step is not None else {}
    told = ""
    if seconds:
        idle = number(status.idle_share, ".0%")
        parts = ", ".join(f"{name} {seconds[name]:.1f}" for name in ("generate", "wait", "train"))
        told = f", {status.step_seconds:.1f} s each, device idle {idle} (last 8 steps); the last: {parts}"
    again = "" if not status.pass_at_1_due else f", again in {duration(status.pass_at_1_due)}"
    share = number(status.foreign_weight_share, ".0%")
    megabytes = _megabytes(status)
    rows = [
        ("step", f"{status.step}{told}"),
        ("pass@1", f"{before} → {now} (step {status.pass_at_1_step}{again})"),
        ("reward", f"own {own}, others' {others} (last step)"),
        ("groups", f"own {status.own_groups_used}, others' {foreign} ({share} of loss)"),
        ("saved", saved_line(status.checkpoint)),
        ("up", duration(status.uptime)),
        ("swarm", f"{counted(status.peers, 'peer')}, {counted(status.pool.waiting, 'group')} waiting"),
        ("traffic", f"in {megabytes[0]} MB, out {megabytes[1]} MB"),
    ]
    rows += [("gpu", gpu_line(status.gpu))] if status.gpu else []
    server = status.last_step.generator if status.last_step is not None else None
    if server is not None:
        by = "vLLM" if server.away is None else "itself, vLLM is away"
        rows.append(("sampler", f"{by}; {number(server.mismatch, '.1g')} nats off"))
    rows += [("", "")] * (len(rows) % 2)
    table = Table.grid(padding=(0, 2))
    for left, right in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(words(left[0], "dim"), words(left[1]), words(right[0], "dim"), words(right[1]))
    return table


def _megabytes(one: Status | PeerRow) -> list[str]:
    """What came in and went out, in MB."""
    return [number(way, ".2f", 1e-6) for way in (one.bytes_in, one.bytes_out)]


def _peers(known: Peers, most: int) -> Table:
    peers = known.peers
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("peer", no_wrap=True, max_width=NAME, overflow="ellipsis")
    for column in ("used", "MB in", "out"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("standing", no_wrap=True, overflow="ellipsis")
    for peer in sorted(peers, key=lambda peer: -peer.used)[:most]:
        table.add_row(
            *map(
                words,
                (name_of(peer.id, known.names) or f"…{peer.id[-8:]}", str(peer.used), *_megabytes(peer), peer.standing),
            )
        )
    if len(peers) > most:
        table.add_row(words(f"and {len(peers) - most} more", "dim"))
    return table


def nodes_view(statuses: Sequence[Status], curves: Sequence[Sequence[float]], headline: str) -> RenderableType:
    """A table with one row a node and its curve below; fits 80 columns.

    Args:
        statuses: what each node's API answered.
        curves: each node's pass@1 so far, drawn as a spark line.
        headline: a line above the table.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in ("node", "model", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("step", "pass@1", "own", "others'", "loss share", "MB in", "out"):
        table.add_column(column, justify="right", no_wrap=True)
    for status in statuses:
        table.add_row(*(words(cell) for cell in _row(status)))
    sparks = [
        words(f"{status.name:5}") + words(sparkline(curve), "green")
        for status, curve in zip(statuses, curves, strict=True)
    ]
    return Group(words(headline), table, *sparks)


def sparkline(values: Sequence[float], width: int = 70) -> str:
    """Values from 0 to 1 as bars, the latest `width` of them."""
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[min(top, max(0, round(value * top)))] for value in values[-width:])


def _row(status: Status) -> list[str]:
    before = number(status.pass_at_1_before, ".2f")
    now = number(status.pass_at_1, ".2f")
    return [
        f"{status.name} {status.kind or ''}",
        status.model,
        status.state.lower(),
        number(status.step, "d"),
        f"{before} → {now}" if status.step is not None else "–",
        number(status.own_groups_used, "d"),
        str(sum(status.foreign_groups_used.values())) if status.step is not None else "–",
        number(status.foreign_weight_share, ".0%"),
        *_megabytes(status),
    ]
