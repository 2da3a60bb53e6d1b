"""Changes of plain bytes and numbers, of which structured ones are made."""

import random
from collections.abc import Callable

INTEGERS = (0, 1, 2, 3, 15, 16, 17, 127, 128, 255, 256, 997, 998, 999, 1000, 65535, 65536, 524288, 4194304, 4194305)
POWERS = (1 << 31, 1 << 32, 1 << 63)
EDGES = (*INTEGERS, *(sign * power + more for power in POWERS for sign in (1, -1) for more in (-1, 0)))
LOGPROBS = (0.0, -0.0, 1e-3, 1.1e-3, -24.9, -25.0, -1e-45, float("nan"), float("inf"), -float("inf"), 1.0, -1e30)

Mutator = Callable[[bytes, random.Random], bytes]


def raw(data: bytes, rng: random.Random) -> bytes:
    """Plain bytes: some changed, cut, or repeated many times, which shows what is slower than linear."""
    changed = bytearray(data or b"\0")
    start = rng.randrange(len(changed))
    length = rng.choice((1, 1, 2, 4, 8, 64))
    end = min(len(changed), start + length)
    match rng.randrange(5):
        case 0:
            known = (0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xDD, 0xFF)
            changed[start] = rng.choice((*known, rng.randrange(256)))
        case 1:
            del changed[start:end]
        case 2:
            changed[start:start] = rng.randbytes(end - start)
        case 3:
            times = rng.choice((1, 2, 8, 64, 512, 4096))
            changed[start:start] = changed[start:end] * times
        case _:
            changed[start] ^= 1 << rng.randrange(8)
    return bytes(changed)


def any_integer(rng: random.Random) -> int:
    """One at some edge, or any."""
    if rng.random() < 0.7:
        return rng.choice(EDGES)
    bits = rng.choice((4, 10, 33, 64))
    return rng.getrandbits(bits)
