"""How the two processes talk: length-prefixed msgpack maps over a socket pair, both ends ours.

A request is ``{"id", "op", "args"}``; its answer ``{"id", "result"}`` or ``{"id", "error": {"kind", "what", "fix"}}``.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from ftis_node.packet import Completion

HEADER = struct.Struct("<I")
# A step's groups travel in one message: 4096 groups of 36 KB fit.
MAX_MESSAGE = 1 << 28
# The source name of a node's own groups; other sources are peer ids.
OWN = "own"


def pack(message: dict[str, Any]) -> bytes:
    """A message with its length in front."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    if len(body) > MAX_MESSAGE:
        raise ValueError(f"A message of {len(body)} bytes is over the limit of {MAX_MESSAGE}.")
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """The message in `body` (without its length)."""
    message: dict[str, Any] = msgpack.unpackb(body, raw=False, strict_map_key=False)
    return message


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Reads one message, blocking; None at the end of the stream."""
    header = _exactly(connection, HEADER.size)
    body = _exactly(connection, HEADER.unpack(header)[0]) if header else None
    return unpack(body) if body else None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def pack_completions(completions: Sequence[Completion]) -> dict[str, Any]:
    """Completions as plain bytes: u32 ids, f32 log-probs, lengths, finished flags."""
    return {
        "ids": np.concatenate([c.token_ids for c in completions]).astype("<u4").tobytes(),
        "logprobs": np.concatenate([c.logprobs for c in completions]).astype("<f4").tobytes(),
        "lengths": [len(c.token_ids) for c in completions],
        "finished": [bool(c.finished) for c in completions],
    }


def unpack_completions(packed: dict[str, Any]) -> list[Completion]:
    """What `pack_completions` packed."""
    ids = np.frombuffer(packed["ids"], dtype="<u4")
    logprobs = np.frombuffer(packed["logprobs"], dtype="<f4")
    ends = np.cumsum(packed["lengths"])
    return [
        Completion(ids[end - length : end], logprobs[end - length : end], finished)
        for end, length, finished in zip(ends, packed["lengths"], packed["finished"], strict=True)
    ]
