"""What happens if something else does not happen in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `over` once when it has not been put off in time; nothing runs before the first `put_off`."""

    def __init__(self, over: Callable[[], object]) -> None:
        self._over = over
        self._timer: asyncio.TimerHandle | None = None

    def put_off(self, seconds: float) -> None:
        """It is so many seconds from now."""
        self.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._over)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
