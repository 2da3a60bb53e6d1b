"""Runs a text as a program, as ``python -c`` does, but forked from a process that has imported torch.

python -m tests.support.program TEXT
"""

import sys

if __name__ == "__main__":
    exec(sys.argv.pop(1))
