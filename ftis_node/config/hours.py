"""The hours in which a node trains, as its owner writes them: 22-07; 22:30-06:15; mon-fri 19-07, sat-sun."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES = 24 * 60
_DAY = "|".join(DAYS)
_PART = re.compile(rf"(?:({_DAY})(?:-({_DAY}))?)?\s*(?:(\d\d?)(?::(\d\d))?-(\d\d?)(?::(\d\d))?)?")


@dataclass(frozen=True)
class Span:
    """A stretch of each of these days (0: Monday) from a minute to another; one that ends earlier ends the next day."""

    days: frozenset[int]
    start: int
    end: int

    def covers(self, day: int, minute: int) -> bool:
        """Whether it covers a minute of a day."""
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        if minute >= self.start:
            return day in self.days
        return minute < self.end and (day - 1) % 7 in self.days


def read_hours(text: str) -> tuple[Span, ...]:
    """The spans of a text; none: always. Raises ValueError if it is not of this form."""
    return tuple(_span(part.strip().lower()) for part in text.split(",") if part.strip())


def _span(text: str) -> Span:
    """The span that a part of the text names: by default every day, and the whole of it."""
    found = _PART.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time: write 22-07, 22:30-06:15 or mon-fri 19-07")
    first, last, *numbers = found.groups()
    from_hour, from_minute, to_hour, to_minute = (int(number or 0) for number in numbers)
    start = 60 * from_hour + from_minute
    end = 60 * to_hour + to_minute
    if numbers[0] is None:
        start = 0
        end = MINUTES
    if max(from_minute, to_minute) > 59 or start >= MINUTES or end > MINUTES or start == end:
        raise ValueError(f"{text!r} is no time of day: 00:00 to 24:00, with an end other than its beginning")
    if first is None:
        return Span(frozenset(range(7)), start, end)
    begin = DAYS.index(first)
    count = (DAYS.index(last or first) - begin) % 7 + 1
    return Span(frozenset((begin + day) % 7 for day in range(count)), start, end)


def is_open(spans: tuple[Span, ...], now: datetime) -> bool:
    """Whether a local time lies within one of the spans, or there is none."""
    return not spans or any(span.covers(now.weekday(), 60 * now.hour + now.minute) for span in spans)


def next_opening(spans: tuple[Span, ...], now: datetime) -> datetime:
    """The first whole minute from now on that lies within a span, by the clock on the wall."""
    time = now.replace(second=0, microsecond=0, tzinfo=None)
    week = (time + timedelta(minutes=minute) for minute in range(7 * MINUTES + 1))
    return next(later for later in week if is_open(spans, later))
