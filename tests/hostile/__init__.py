"""A peer that speaks the real protocol and means no good, and what honest daemons make of it."""

import os

os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")  # what its own handlers raise is part of an attack
