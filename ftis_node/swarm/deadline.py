"""A timer that calls a function unless it is postponed."""

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `over` in the event loop when the time is up. The first `put_off` starts the timer; each further one
    postpones it, or starts it again if the time was up."""

    def __init__(self, over: Callable[[], object]) -> None:
        self._over = over
        self._timer: asyncio.TimerHandle | None = None

    def put_off(self, seconds: float) -> None:
        """Set the deadline to so many seconds from now. Call it within the event loop."""
        self.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._over)

    def cancel(self) -> None:
        """Stop the timer, if it runs; `over` is not called any more."""
        if self._timer is not None:
            self._timer.cancel()
