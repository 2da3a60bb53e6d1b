"""Time in hand."""


class Clock:
    """A clock that stands still until a test moves it: `clock.now += 60`."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now
