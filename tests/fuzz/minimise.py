"""The few inputs that show every way through the code, chosen from many."""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

Arc = tuple[str, int, int]


def arcs(run: Callable[[bytes], None], data: bytes) -> set[Arc]:
    """The steps from line to line that an input makes the node's own code take."""
    found: set[Arc] = set()

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if "ftis_node" not in file:
            return None
        last = 0

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            if event == "line":
                found.add((file, last, frame.f_lineno))
                last = frame.f_lineno
            elif event == "exception":
                found.add((file, last, 0))
            return step

        return step

    sys.settrace(enter)
    try:
        run(data)
    finally:
        sys.settrace(None)
    return found


def smallest_cover(
    run: Callable[[bytes], None], known: Sequence[bytes], candidates: Sequence[bytes], files: int, size: int
) -> list[bytes]:
    """Of the candidates those that show the most that neither `known` nor the ones before do, the smaller ones first.

    Args:
        files, size: how many at most, and how many bytes in all.
    """
    covered: set[Arc] = set().union(*(arcs(run, data) for data in known))
    shown = {data: arcs(run, data) - covered for data in candidates}
    chosen: list[bytes] = []
    while len(chosen) < files:
        room = size - sum(map(len, chosen))
        fitting = [data for data in shown if len(data) <= room]
        best = max(fitting, key=lambda data: (len(shown[data]), -len(data)), default=b"")
        if not shown.get(best):
            break
        chosen.append(best)
        news = shown[best]
        shown = {data: arcs - news for data, arcs in shown.items()}
    return chosen
