"""An input of several messages: each with what it is and who sends it."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

FRAMES_MAX = 24
BODY_MAX = 0xFFFF
_HEAD = struct.Struct(">BBH")


@dataclass(frozen=True)
class Frame:
    """kind, peer: any byte; a target takes them modulo what it has. body: the message, at most 65,535 bytes."""

    kind: int
    peer: int
    body: bytes


def split(data: bytes) -> list[Frame]:
    """The messages in an input; of whatever bytes. A body that is cut short ends where the input does."""
    frames = []
    start = 0
    while start + _HEAD.size <= len(data) and len(frames) < FRAMES_MAX:
        kind, peer, size = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        frames.append(Frame(kind, peer, data[start : start + size]))
        start += size
    return frames


def join(frames: Sequence[Frame]) -> bytes:
    """The input that reads back as these messages."""
    bodies = [frame.body[:BODY_MAX] for frame in frames]
    return b"".join(
        _HEAD.pack(frame.kind, frame.peer, len(body)) + body for frame, body in zip(frames, bodies, strict=True)
    )
