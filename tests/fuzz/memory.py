"""Whether a target keeps memory: python -m tests.fuzz.memory TARGET SECONDS FOLDER…

The fuzzer's own tables grow with all that it sees, so this runs the inputs of the folders again without it, changed a
little each time, and prints the process's memory as JSON: after a third of the time, and at the end.
"""

import json
import logging
import random
import sys
import time
from pathlib import Path

import psutil

from tests.fuzz.targets import TARGETS

CHANGED_MOST = 4  # bytes of an input


def main():
    name, seconds, *folders = sys.argv[1:]
    logging.disable()
    inputs = [file.read_bytes() for folder in folders for file in sorted(Path(folder).iterdir())]
    rng = random.Random(0)
    process = psutil.Process()
    sizes = []
    began = time.monotonic()
    runs = 0
    while (passed := time.monotonic() - began) < float(seconds):
        data = bytearray(rng.choice(inputs))
        for _ in range(rng.randrange(CHANGED_MOST + 1)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        TARGETS[name].run(bytes(data))
        runs += 1
        if len(sizes) <= passed:
            sizes.append(process.memory_info().rss / 2**20)
    print(json.dumps({"executions": runs, "warm_mb": sizes[len(sizes) // 3], "end_mb": sizes[-1]}))


if __name__ == "__main__":
    main()
