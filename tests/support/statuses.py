"""A node's status and peers, as its API serves them."""

from dataclasses import asdict
from typing import Any

from ftis_node.node.progress import Totals
from ftis_node.observe.answers import Status, read

PEER = "12D3KooWKAFkdZjAMAKaNHMycURaoRJDkJLfz2N7GFb4fDUZPfWV"
SECONDS = {"generate": 1.0, "wait": 0.5, "train": 2.0, "total": 3.5}
DEVICE = {
    "total": 5.0,
    "generate": 0.75,
    "train": 2.0,
    "evaluate": 1.0,
    "idle": 1.25,
    "score": 0.25,
}


LOADING: dict[str, Any] = {
    "name": "A",
    "state": "LOADING",
    "reason": "Loading tiny-a.",
    "model": "tiny-a",
    "addresses": [],
    "uptime": 1.5,
    **dict.fromkeys(("kind", "plan", "parameters", "run", "worker_memory_bytes", "gpu")),
    "worker_restarts": 0,
}


JOINING: dict[str, Any] = LOADING | {
    "state": "JOINING",
    "kind": "full",
    "parameters": 75968,
    "run": "ab" * 16,
    "totals": asdict(Totals()),
    **dict.fromkeys(("pass_at_1_before", "pass_at_1", "filtered_fraction", "own_reward", "foreign_reward")),
    **dict.fromkeys(("idle_share", "last_step", "waiting_for")),
    **dict.fromkeys(("step", "pass_at_1_step", "own_groups_used", "peers", "bytes_in", "bytes_out"), 0),
    "foreign_groups_used": {},
    "foreign_weight_share": 0.0,
    "step_seconds": 0.0,
    "pool": {"waiting": 0, "no_signal": 0, "expired": 0},
    "network": {"reachability": "direct", "p2pd_restarts": 0, "p2pd": None, "clock": None},
    "process": {"memory_bytes": 1000, "python_blocks": 10},
    "checkpoint": {"step": None, "bytes": None, "age_seconds": None, "due_seconds": None},
    "refused_packets": {},
    "announcements": {},
    "own_groups_refused": 0,
}


CARD = {
    "name": "a GPU",
    "total_bytes": 24 << 30,
    "used_bytes": 12 << 30,
    "allocated_bytes": 9 << 30,
}
P2PD = {
    "reachability": "private",
    "connections": 3,
    "memory_bytes": 2000,
    "cpu_seconds": 0.5,
    "open_files": 9,
}
TRAINING: dict[str, Any] = JOINING | {
    "state": "ONLINE",
    "worker_memory_bytes": 3000,
    "gpu": CARD | {"reserved_bytes": 10 << 30, "utilization": 0.75, "graphs": False},
    "step": 7,
    "checkpoint": {"step": 6, "bytes": 1 << 20, "age_seconds": 30.0, "due_seconds": 270.0, "asked": False},
    "pass_at_1_before": 0.25,
    "pass_at_1": 0.5,
    "own_groups_used": 10,
    "foreign_groups_used": {PEER: 4, "others": 2},
    "foreign_weight_share": 0.25,
    "filtered_fraction": 0.0,
    "own_reward": 0.5,
    "foreign_reward": 0.75,
    "step_seconds": 3.0,
    "idle_share": 0.25,
    "last_step": {
        "generator": {"away": None, "mismatch": 0.001},
        "seconds": SECONDS,
        "device": DEVICE,
        "loss": -0.5,
        "gradient_norm": 0.25,
        "tokens": 100,
        "skipped": None,
    },
    "network": {"clock": {"behind": 3.0, "peers": 2}, "reachability": "relayed", "p2pd_restarts": 1, "p2pd": P2PD},
    "refused_packets": {"malformed": 3, "holder": 1},
    "announcements": {"new": 5},
}


def answered(**told: Any) -> Status:
    """A status as another program reads it."""
    return read({"state": "ONLINE", **told}, Status)


NOBODY: dict[str, Any] = {"peers": [], "left_out": []}


def peer(id: str = PEER, **other: Any) -> dict[str, Any]:
    return {
        "id": id,
        "agent": "ftis-node/0.1.0",
        "seconds_since_seen": 0.5,
        "used": 4,
        "standing": "established",
        "accepted": 5,
        "refused": {"malformed": 2, "too long": 1},
        "weight": 1.0,
        "bytes_in": 100,
        "bytes_out": 200,
        **other,
    }
