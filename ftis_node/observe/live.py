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
    state: list[RenderableType] = [_headline(status)]
    if status.doing is not None:
        state.append(words(f"  {status.doing.sentence()}", "dim", whole=False))
    if status.advice:
        state.append(words(f"→ {status.advice}", "bold"))
    parts = [state]
    if status.step is not None:
        parts.append([_figures(status)])
    if status.curve:
        parts.append([words("pass@1 ") + _curve(status, WITHIN)])
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
    busy = ""
    if gpu.utilization is not None:
        busy = f"{gpu.utilization:.0%} busy, "
    return f"{busy}{rounded(gpu.used_bytes)} of {rounded(gpu.total_bytes)}, {rounded(gpu.allocated_bytes)} in tensors"


def saved_line(checkpoint: CheckpointStatus) -> str:
    """The newest checkpoint's step and age, and when the next is due."""
    if checkpoint.age_seconds is None:  # nor a step
        return "nothing yet"
    line = f"step {checkpoint.step}, {duration(checkpoint.age_seconds)} ago"
    if checkpoint.due_seconds is not None:
        line += f", next in {duration(checkpoint.due_seconds)}"
    return line


def _headline(status: Status) -> Text:
    state = status.state
    text = words(state, f"bold {_COLOURS.get(state, 'cyan')}") + words(f"  {status.reason}")
    if status.pausing and state != "PAUSED":
        when = "after this step"
        if state == "LOADING":
            when = "once it has loaded"
        text.append(f"  It pauses {when}.")
    if status.finishing:
        text.append("  It ends after this step.")
    return text


def _figures(status: Status) -> Table:
    """Names and values of a node that has joined its run, two in a line."""
    last = status.last_step
    step = str(status.step)
    if last is not None:
        idle = number(status.idle_share, ".0%")
        parts = ", ".join(f"{name} {last.seconds[name]:.1f}" for name in ("generate", "wait", "train"))
        step += f", {status.step_seconds:.1f} s each, device idle {idle} (last 8 steps); the last: {parts}"
    before = number(status.pass_at_1_before, ".3f")
    now = number(status.pass_at_1, ".3f")
    measured = f"step {status.pass_at_1_step}"
    if status.pass_at_1_due:
        measured += f", again in {duration(status.pass_at_1_due)}"
    own = number(status.own_reward, ".2f")
    others = number(status.foreign_reward, ".2f")
    foreign = sum(status.foreign_groups_used.values())
    share = number(status.foreign_weight_share, ".0%")
    came, went = _megabytes(status)
    rows = [
        ("step", step),
        ("pass@1", f"{before} → {now} ({measured})"),
        ("reward", f"own {own}, others' {others} (last step)"),
        ("groups", f"own {status.own_groups_used}, others' {foreign} ({share} of loss)"),
        ("saved", saved_line(status.checkpoint)),
        ("up", duration(status.uptime)),
        ("swarm", f"{counted(status.peers, 'peer')}, {counted(status.pool.waiting, 'group')} waiting"),
        ("traffic", f"in {came} MB, out {went} MB"),
    ]
    if status.gpu is not None:
        rows.append(("gpu", gpu_line(status.gpu)))
    if last is not None and last.generator is not None:
        by = "vLLM"
        if last.generator.away is not None:
            by = "itself, vLLM is away"
        rows.append(("sampler", f"{by}; {number(last.generator.mismatch, '.1g')} nats off"))
    if len(rows) % 2:
        rows.append(("", ""))
    table = Table.grid(padding=(0, 2))
    for left, right in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(words(left[0], "dim"), words(left[1]), words(right[0], "dim"), words(right[1]))
    return table


def _megabytes(one: Status | PeerRow) -> list[str]:
    """What came in and went out, in MB."""
    shown = []
    for size in (one.bytes_in, one.bytes_out):
        megabytes = None
        if size is not None:
            megabytes = size / 1e6
        shown.append(number(megabytes, ".2f"))
    return shown


def _peers(known: Peers, most: int) -> Table:
    peers = known.peers
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("peer", no_wrap=True, max_width=NAME, overflow="ellipsis")
    for column in ("used", "MB in", "out"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("standing", no_wrap=True, overflow="ellipsis")
    for peer in sorted(peers, key=lambda peer: -peer.used)[:most]:
        name = name_of(peer.id, known.names) or f"…{peer.id[-8:]}"
        cells = (name, peer.used, *_megabytes(peer), peer.standing)
        table.add_row(*map(words, cells))
    if len(peers) > most:
        table.add_row(words(f"and {len(peers) - most} more", "dim"))
    return table


def nodes_view(statuses: Sequence[Status], headline: str) -> RenderableType:
    """A table with one row a node and its curve below; fits 80 columns.

    Args:
        statuses: what each node's API answered.
        headline: a line above the table.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in ("node", "model", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("step", "pass@1", "own", "others'", "loss share", "MB in", "out"):
        table.add_column(column, justify="right", no_wrap=True)
    for status in statuses:
        table.add_row(*(words(cell) for cell in _row(status)))
    sparks = [words(f"{status.name:5}") + _curve(status, 70) for status in statuses]
    return Group(words(headline), table, *sparks)


def _curve(status: Status, width: int) -> Text:
    """The node's latest evaluations of pass@1, so many at most, as bars."""
    top = len(_SPARKS) - 1
    bars = (_SPARKS[round(rate * top)] for _, rate in status.curve[-width:])
    return words("".join(bars), "green")


def _row(status: Status) -> list[str]:
    """The cells of a node; dashes before it has joined its run."""
    rates = "–"
    foreign = "–"
    if status.step is not None:
        rates = f"{number(status.pass_at_1_before, '.2f')} → {number(status.pass_at_1, '.2f')}"
        foreign = str(sum(status.foreign_groups_used.values()))
    return [
        f"{status.name} {status.kind or ''}",
        status.model,
        status.state.lower(),
        number(status.step, "d"),
        rates,
        number(status.own_groups_used, "d"),
        foreign,
        number(status.foreign_weight_share, ".0%"),
        *_megabytes(status),
    ]
