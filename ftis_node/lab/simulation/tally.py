"""Counts of a simulation, and the figures that follow from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ftis_node.lab.simulation.directory import directory_figures
from ftis_node.lab.simulation.network import GOSSIP, KINDS, MEMBERSHIP, PACKETS, Meter
from ftis_node.lab.simulation.scenario import Machine, Scenario
from ftis_node.node.demand import OWN_SHARE_FLOOR


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """Of one step: foreign groups wanted and taken (their keys), their ages and the waiting for them in seconds."""

    wanted: int
    taken: list[tuple[bytes, int, int]]
    ages: list[float]
    waited: float


@dataclass(frozen=True, eq=False, slots=True)
class Presence:
    """One node in the time that counts. until: when it left, or the end. entries, new: announcements that came whole,
    and how many of them were new."""

    machine: Machine
    meter: Meter
    until: float
    entries: int
    new: int

    @property
    def seconds(self) -> float:
        return self.until - self.meter.since


@dataclass(eq=False)
class Tally:
    """Steps and departures after the warm-up. `steps`: with their seconds, in the order in which they ended."""

    scenario: Scenario
    steps: list[tuple[Machine, Step, float]] = field(default_factory=list)
    gone: list[Presence] = field(default_factory=list)

    def start(self) -> None:
        """From now on everything counts, and nothing of before."""
        self.steps.clear()
        self.gone.clear()


def figures(tally: Tally, staying: Sequence[Presence], first: Sequence[Machine], now: float) -> dict[str, Any]:
    """All figures of a simulation in plain values; None where nothing happened that would have given one.

    Args:
        staying: the nodes that are there at the end.
        first: the machines that were there at the start, for the training in lock step.
        now: the second at which it ended.
    """
    presences = [*tally.gone, *staying]
    node_seconds = sum(presence.seconds for presence in presences)
    meters = [presence.meter for presence in presences]
    names = ("out", "inwards", "counts")
    out, inwards, counts = (sum((getattr(meter, name) for meter in meters), Counter[str]()) for name in names)
    scenario = tally.scenario
    found = {
        "nodes": scenario.nodes,
        "seconds": scenario.seconds,
        "counted_seconds": now - scenario.warmup,
        "seed": scenario.seed,
        "left": len(tally.gone),
        **{
            f"bytes_{way}_per_node_s": {kind: moved[kind] / node_seconds for kind in KINDS}
            for way, moved in (("out", out), ("in", inwards))
        },
        **{f"{name}_per_node_s": counts[name] / node_seconds for name in ("messages", "handshakes", "exchanges")},
        "connections_per_node_hour": 3600 * counts["connections"] / node_seconds,
        "exchanges_with_strangers": _ratio(counts["strangers"], counts["exchanges"]),
        "exchanges_failed": _ratio(counts["exchanges failed"], counts["exchanges"]),
        "entries_new": _ratio(sum(one.new for one in presences), sum(one.entries for one in presences)),
        "fetches_failed": _ratio(counts["fetches failed"], counts["fetches"]),
        "packets_busy": _ratio(counts["busy"], counts["packets asked"]),
        **_hot_spots(presences),
        **_batches(tally),
        **_pace(tally, first),
        "bytes_in_per_group_used": inwards.total() / max(1, sum(len(step.taken) for _, step, _ in tally.steps)),
        "look_ups_per_node_hour": 3600 * counts["look_ups"] / node_seconds,
        **directory_figures(scenario),
    }
    return {name: None if value != value else value for name, value in found.items()}  # JSON knows no NaN


def _hot_spots(presences: Sequence[Presence]) -> dict[str, float]:
    """Upload of single nodes over the mean, of those who were there for at least half of the longest time."""
    longest = max(presence.seconds for presence in presences)
    staying = [presence for presence in presences if presence.seconds >= longest / 2 > 0]
    rates = np.array([presence.meter.out.total() / presence.seconds for presence in staying])
    packets = np.array([presence.meter.out[PACKETS] / presence.seconds for presence in staying])
    uplinks = np.array([presence.machine.uplink for presence in staying])
    return {
        "upload_p99_over_mean": _ratio(np.percentile(rates, 99), rates.mean()),
        "upload_max_over_mean": _ratio(rates.max(), rates.mean()),
        "packets_max_over_mean": _ratio(packets.max(), packets.mean()),
        "busiest_bytes_out_s": float(rates.max()),
        "uplink_share_mean": float((rates / uplinks).mean()),
        "uplink_share_max": float((rates / uplinks).max()),
    }


def _batches(tally: Tally) -> dict[str, float]:
    """What the steps were made of."""
    steps = [step for _, step, _ in tally.steps]
    ages = np.array([age for step in steps for age in step.ages] or [np.nan])
    waited = np.array([step.waited for step in steps] or [np.nan])
    return {
        "steps": len(steps),
        "foreign_wanted": _mean([step.wanted for step in steps]),
        "fill": _ratio(sum(len(step.taken) for step in steps), sum(step.wanted for step in steps)),
        "authors_per_batch": _mean([len({key[0] for key in step.taken}) for step in steps]),
        "age_p50": float(np.percentile(ages, 50)),
        "age_p95": float(np.percentile(ages, 95)),
        "waiting_mean": float(waited.mean()),
        "waiting_p95": float(np.percentile(waited, 95)),
    }


def _pace(tally: Tally, first: Sequence[Machine]) -> dict[str, float]:
    """Steps beside training alone, and beside lock step with the same machines.

    The speed-up is what the steps that ended would have taken alone over what they took, so it does not hang on how
    many steps of a slow node there is time for.

    In lock step a node generates the same part of its batch as here (a quarter, or 1/N), everybody trains on what all
    made, and a round takes as long as its slowest node; sending takes no time, and nobody leaves.
    """
    batch = tally.scenario.settings.batch_groups
    own = int(np.ceil(max(1 / len(first), OWN_SHARE_FLOOR) * batch))
    round_seconds = max(own * machine.group_seconds + machine.train_seconds for machine in first)
    alone_hour = _mean([3600 / machine.alone_seconds(batch) for machine in first])
    taken = np.array([seconds for _, _, seconds in tally.steps])
    alone = np.array([machine.alone_seconds(batch) for machine, _, _ in tally.steps])
    limits = np.percentile([machine.alone_seconds(batch) for machine in first], [25, 75])
    fast = alone <= limits[0]
    slow = alone >= limits[1]
    return {
        "alone_steps_per_node_hour": alone_hour,
        "lockstep_steps_per_node_hour": 3600 / round_seconds,
        "speedup": _ratio(alone.sum(), taken.sum()),
        "speedup_fast_quarter": _ratio(alone[fast].sum(), taken[fast].sum()),
        "speedup_slow_quarter": _ratio(alone[slow].sum(), taken[slow].sum()),
        "lockstep_speedup": 3600 / round_seconds / alone_hour,
    }


def _ratio(part: Any, whole: Any) -> float:
    if not whole:
        return float("nan")
    return float(part / whole)


def _mean(values: Sequence[float]) -> float:
    if not values:
        return float("nan")
    return float(np.mean(values))


def table(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: a column for each simulation, a row for each of the main figures."""

    def kb(kind: str, way: str) -> list[str]:
        return [f"{result[f'bytes_{way}_per_node_s'][kind] / 1000:.2f}" for result in results]

    def plain(name: str, form: str = ".2f") -> list[str]:
        return ["–" if result[name] is None else format(result[name], form) for result in results]

    def percent(name: str) -> list[str]:
        return ["–" if result[name] is None else f"{100 * result[name]:.1f} %" for result in results]

    rows = [
        ("nodes", plain("nodes", "d")),
        ("seconds, of which counted", [f"{r['seconds']:.0f}, {r['counted_seconds']:.0f}" for r in results]),
        ("gossip, KB/s a node out", kb(GOSSIP, "out")),
        ("gossip, KB/s a node in", kb(GOSSIP, "in")),
        ("membership, KB/s a node out", kb(MEMBERSHIP, "out")),
        ("packets, KB/s a node out", kb(PACKETS, "out")),
        ("packets, KB/s a node in", kb(PACKETS, "in")),
        ("handshakes begun a node and second", plain("handshakes_per_node_s", ".3f")),
        ("look-ups in the DHT a node and hour", plain("look_ups_per_node_hour")),
        ("bytes in a group used", plain("bytes_in_per_group_used")),
        ("busiest node of the DHT, KB/s out", [f"{r['directory_busiest_bytes_out_s'] / 1000:.2f}" for r in results]),
        ("mean node of the DHT, KB/s out", [f"{r['directory_bytes_out_per_node_s'] / 1000:.2f}" for r in results]),
        ("exchanges begun a node and second", plain("exchanges_per_node_s", ".3f")),
        ("entries that were new", percent("entries_new")),
        ("upload, p99 over mean", plain("upload_p99_over_mean")),
        ("upload, maximum over mean", plain("upload_max_over_mean")),
        ("foreign groups wanted a batch", plain("foreign_wanted")),
        ("of these there in time (fill)", percent("fill")),
        ("foreign authors a batch", plain("authors_per_batch")),
        ("age of a foreign sample, p50, s", plain("age_p50", ".1f")),
        ("age of a foreign sample, p95, s", plain("age_p95", ".1f")),
        ("waiting a step, mean, s", plain("waiting_mean")),
        ("packets answered with busy", percent("packets_busy")),
        ("steps counted", plain("steps", "d")),
        ("a step alone over a step here (speed-up)", plain("speedup")),
        ("the same, fastest quarter of nodes", plain("speedup_fast_quarter")),
        ("the same, slowest quarter of nodes", plain("speedup_slow_quarter")),
        ("lock step over alone", plain("lockstep_speedup")),
    ]
    lines = [f"| {name} | {' | '.join(values)} |" for name, values in rows]
    lines.insert(1, "|---" * (len(results) + 1) + "|")
    if any("–" in values for _, values in rows):
        lines += ["", "–: there was nothing to count in the seconds counted."]
    short = [3600 / result["alone_steps_per_node_hour"] for result in results if not result["steps"]]
    if short:
        lines[-1] += f" No step ended in them: alone one takes {max(short):.0f} s, so simulate more --seconds."
    return "\n".join(lines)
