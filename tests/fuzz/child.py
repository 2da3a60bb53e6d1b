"""One process that fuzzes one target: python -m tests.fuzz.child TARGET FOLDER [libFuzzer's options and folders].

Each input that was slower than all before goes into FOLDER, for the driver to measure once more in peace.
"""

import logging
import random
import sys
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["base58", "ftis_node", "hivemind", "tests", "tomllib"]):
    from tests.fuzz.targets import TARGETS

WARM_UP = 200  # runs until caches are full
STRUCTURED = 0.7  # this part of all changes keeps the structure


def main():
    """Does not return: libFuzzer ends the process."""
    name, folder, *options = sys.argv[1:]
    target = TARGETS[name]
    slowest = 0.0
    runs = 0
    logging.disable()

    def took(data: bytes) -> float:
        began = time.thread_time()
        target.run(data)
        return time.thread_time() - began

    def run(data: bytes):
        nonlocal slowest, runs
        runs += 1
        seconds = took(data)
        if runs > WARM_UP and seconds > slowest:
            seconds = min(seconds, took(data), took(data))  # a busy machine makes any input slow once
            if seconds > slowest:
                slowest = seconds
                Path(folder, f"{1e6 * seconds:010.0f}").write_bytes(data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() > STRUCTURED:
            return bytes(atheris.Mutate(data, most))
        return target.mutate(data, rng)[:most]

    # libFuzzer starts itself again to merge; it passes its own name to a shell.
    myself = f"{sys.executable} -m tests.fuzz.child {name} {folder}"
    atheris.Setup([myself, *options], run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
