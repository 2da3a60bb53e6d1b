"""A node's answers: `node.status` fills them, and other programs of this package read them.

A newer command may ask an older daemon, and the other way round: unknown fields are left out, missing ones have a
default.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from ftis_node.errors import UserError
from ftis_node.step_report import ClockDifference, Doing, Generator, GpuFigures, Health

Kind = TypeVar("Kind")


class State(StrEnum):
    """The states; docs/operations.md explains each."""

    LOADING = "LOADING"
    JOINING = "JOINING"
    ONLINE = "ONLINE"
    RELAYED = "RELAYED"
    OUTBOUND_ONLY = "OUTBOUND-ONLY"
    ALONE = "ALONE"
    PAUSED = "PAUSED"
    DEGRADED = "DEGRADED"
    STOPPING = "STOPPING"


class CheckpointStatus(msgspec.Struct, frozen=True):
    """The newest checkpoint; every field is None before the first.

    bytes        None: not known yet
    age_seconds  seconds of training since it was taken
    due_seconds  seconds until the next checkpoint; None while every step is saved
    asked        whether the owner's `save` is not done yet
    """

    step: int | None = None
    bytes: int | None = None
    age_seconds: float | None = None
    due_seconds: float | None = None
    asked: bool = False


class PoolStatus(msgspec.Struct, frozen=True):
    """Waiting groups, and groups without a signal or too old since the start."""

    waiting: int = 0
    no_signal: int = 0
    expired: int = 0


class Planned(msgspec.Struct, frozen=True):
    """The plan of the running model, in bytes; a node writes all of `worker.messages.plan_row`."""

    memory_bytes: int
    budget: int
    fits: bool
    dtype: str = ""
    quantisation: str = "none"
    reasons: list[str] = []


class LastStep(msgspec.Struct, frozen=True):
    """The latest step's seconds and results; loss and gradient norm are None if it did not change the weights."""

    seconds: dict[str, float]
    device: dict[str, float] = {}
    loss: float | None = None
    gradient_norm: float | None = None
    tokens: int = 0
    skipped: str | None = None
    generator: Generator | None = None


class Network(msgspec.Struct, frozen=True):
    """Whether peers can dial the node, and what p2pd and their clocks say; None: not known yet."""

    reachability: str
    p2pd_restarts: int = 0
    p2pd: Health | None = None
    clock: ClockDifference | None = None


class Process(msgspec.Struct, frozen=True):
    """The network process: resident bytes, and blocks of Python's allocator, which show leaks."""

    memory_bytes: int = 0
    python_blocks: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A node's status; the answer to an order has its state alone.

    From `step` on, a node that has not joined its run writes nothing: step and network are None.

    curve: step and pass@1 of the latest evaluations. uptime: seconds.
    worker_memory_bytes: resident bytes of the compute process, not on a GPU. doing: what it does now.
    pass_at_1_due: seconds until it is measured again. bytes_in, bytes_out: network traffic.
    """

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
    kind: str | None = None
    plan: Planned | None = None
    parameters: int | None = None
    tokenizer: str | None = None
    objective: str = ""
    worker_restarts: int = 0
    worker_memory_bytes: int | None = None
    gpu: GpuFigures | None = None
    doing: Doing | None = None
    step: int | None = None
    checkpoint: CheckpointStatus = CheckpointStatus()
    pass_at_1_before: float | None = None
    pass_at_1: float | None = None
    pass_at_1_step: int = 0
    pass_at_1_due: float | None = None
    own_groups_used: int | None = None
    foreign_groups_used: dict[str, int] = {}
    foreign_weight_share: float | None = None
    filtered_fraction: float | None = None
    own_reward: float | None = None
    foreign_reward: float | None = None
    step_seconds: float = 0.0
    idle_share: float | None = None
    last_step: LastStep | None = None
    totals: dict[str, Any] = {}
    waiting_for: str | None = None
    pool: PoolStatus = PoolStatus()
    peers: int = 0
    bytes_in: int | None = None
    bytes_out: int | None = None
    network: Network | None = None
    process: Process = Process()
    refused_packets: dict[str, int] = {}
    announcements: dict[str, int] = {}
    own_groups_refused: int = 0


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A peer of the node's view; a node writes all of `Reputation.report`. used: all its groups trained on.

    standing: in words. accepted, refused (by reason), bytes_in, bytes_out: since the start.
    """

    id: str
    agent: str = ""
    addresses: list[str] = []
    seconds_since_seen: float = 0.0
    used: int = 0
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
    """Every peer of the node's view, and the refused peers. observers: ids. names: what nodes call
    themselves, by peer id."""

    peers: list[PeerRow]
    left_out: list[LeftOut] = []
    observers: list[str] = []
    names: dict[str, str] = {}


def at(told: Any, path: str) -> Any:
    """The value at a path of keys with dots between; None if a key is missing."""
    for key in path.split("."):
        told = told.get(key) if isinstance(told, Mapping) else None
    return told


def finite(value: Any) -> float | None:
    """A finite number, or None: a diverged step has none, and JSON has no others."""
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return None


def read(answer: object, kind: type[Kind]) -> Kind:
    """Turn the JSON value of an answer into `kind`. Raises UserError if a field is missing or of another type."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise UserError(
            f"The daemon's answer cannot be read: {error}.",
            "Use the same version of ftis-node for the command and the daemon.",
        ) from error
