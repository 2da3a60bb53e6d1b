"""A node's answers, as far as other programs of this package read them.

A newer command may ask an older daemon, and the other way round: unknown fields are left out, missing ones have a
default. `node.status` describes every field that a node writes.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ftis_node.errors import UserError
from ftis_node.step_report import Generator

Kind = TypeVar("Kind")


class CheckpointStatus(msgspec.Struct, frozen=True):
    """The newest checkpoint; every field is None before the first.

    bytes        None: not known yet
    age_seconds  seconds of training since it was taken
    due_seconds  seconds until the next checkpoint; None while every step is saved
    """

    step: int | None = None
    bytes: int | None = None
    age_seconds: float | None = None
    due_seconds: float | None = None


class PoolStatus(msgspec.Struct, frozen=True):
    """Waiting groups, and groups without a signal or too old since the start."""

    waiting: int = 0
    no_signal: int = 0
    expired: int = 0


class Rows(msgspec.Struct, frozen=True):
    """Rows on which all own samples failed; those learned from others since, and those of them that it can do now."""

    tried: int = 0
    learned: int = 0
    done: int = 0


class Gpu(msgspec.Struct, frozen=True):
    """A GPU's bytes: in all, used by all processes, in the node's tensors. utilization: 0 to 1."""

    total_bytes: int
    used_bytes: int
    allocated_bytes: int
    utilization: float | None = None


class Planned(msgspec.Struct, frozen=True):
    """The plan of the running model, in bytes."""

    memory_bytes: int
    budget: int
    fits: bool
    dtype: str = ""
    quantisation: str = "none"


class LastStep(msgspec.Struct, frozen=True):
    """The latest step's seconds by part."""

    seconds: dict[str, float]
    generator: Generator | None = None


class Clock(msgspec.Struct, frozen=True):
    """The seconds that the node's clock is behind those of `peers` peers."""

    behind: float
    peers: int


class P2pd(msgspec.Struct, frozen=True):
    """AutoNAT's finding."""

    reachability: str = "unknown"


class Network(msgspec.Struct, frozen=True):
    """Whether peers can dial the node, and what p2pd and their clocks say; None: not known yet."""

    reachability: str
    p2pd_restarts: int = 0
    p2pd: P2pd | None = None
    clock: Clock | None = None


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node's state. curve: step and pass@1 of the latest evaluations. uptime: seconds."""

    name: str = ""
    state: str
    reason: str = ""
    advice: str = ""
    stalled: bool = False
    pausing: bool = False
    finishing: bool = False
    model: str = ""
    addresses: list[str] = []
    run: str | None = None
    curve: list[tuple[int, float]] = []
    page: str | None = None
    uptime: float = 0.0


class Status(NodeState, frozen=True, kw_only=True):
    """A node's status. step, network: None before the node has joined its run."""

    kind: str | None = None
    tokenizer: str | None = None
    plan: Planned | None = None
    gpu: Gpu | None = None
    step: int | None = None
    step_seconds: float = 0.0
    last_step: LastStep | None = None
    idle_share: float | None = None
    pass_at_1_before: float | None = None
    pass_at_1: float | None = None
    pass_at_1_step: int = 0
    own_groups_used: int | None = None
    own_reward: float | None = None
    foreign_groups_used: dict[str, int] = {}
    foreign_weight_share: float | None = None
    foreign_reward: float | None = None
    filtered_fraction: float | None = None
    checkpoint: CheckpointStatus = CheckpointStatus()
    pool: PoolStatus = PoolStatus()
    needs: Rows = Rows()
    peers: int = 0
    bytes_in: int | None = None
    bytes_out: int | None = None
    network: Network | None = None


class KnownPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A peer of the node's view. used: all its groups trained on."""

    id: str
    agent: str = ""
    addresses: list[str] = []
    seconds_since_seen: float = 0.0
    used: int = 0


class Peer(KnownPeer, frozen=True, kw_only=True):
    """A peer with its standing in words. accepted, refused (by reason), bytes_in, bytes_out: since the start."""

    standing: str = ""
    accepted: int = 0
    refused: dict[str, int] = {}
    bytes_in: int = 0
    bytes_out: int = 0


class LeftOut(msgspec.Struct, frozen=True):
    """A peer that the node refuses, with the reason."""

    id: str
    reason: str


class Peers(msgspec.Struct, frozen=True):
    """Every peer of the node's view, and the refused peers. names: what nodes call themselves, by peer id."""

    peers: list[Peer]
    left_out: list[LeftOut] = []
    names: dict[str, str] = {}


def read(answer: object, kind: type[Kind]) -> Kind:
    """Turn the JSON value of an answer into `kind`. Raises UserError if a field is missing or of another type."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        advice = "Use the same version of ftis-node for the command and the daemon."
        raise UserError(f"The daemon's answer cannot be read: {error}.", advice) from error
