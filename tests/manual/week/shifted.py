"""Copied as `sitecustomize.py` into a folder in PYTHONPATH: wherever Python tells the time of day, or the time since
the machine started, it is ahead by the seconds (a double) in the file that WEEK_CLOCK names. They may change."""

import mmap
import os
import time

SHIFTED = (time.CLOCK_REALTIME, time.CLOCK_BOOTTIME)


def shift(file: str):
    """Let this process's clocks follow the file."""
    with open(file, "rb") as opened:
        ahead = memoryview(mmap.mmap(opened.fileno(), 8, access=mmap.ACCESS_READ)).cast("d")
    unix = time.time
    unix_ns = time.time_ns
    clock = time.clock_gettime
    time.time = lambda: unix() + ahead[0]
    time.time_ns = lambda: unix_ns() + int(ahead[0] * 1e9)
    time.clock_gettime = lambda which: clock(which) + (ahead[0] if which in SHIFTED else 0.0)


if __name__ == "sitecustomize" and "WEEK_CLOCK" in os.environ:
    shift(os.environ["WEEK_CLOCK"])
