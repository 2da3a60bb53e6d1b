"""A command that takes long says what it does."""

import os
import pty
import re
import subprocess
import sys

import pytest

CODE = """
import sys
from ftis_node.observe import terminal
terminal.QUIET_SECONDS = {quiet}
sys.argv[1:] = {arguments}
from ftis_node.__main__ import main
main()
"""
FIT = ["fit", "--model", "tiny-a", "--vram", "24", "--task", "arithmetic"]


def on_a_terminal(arguments, quiet):
    """What it writes to stderr, which is a terminal."""
    ours, its = pty.openpty()
    command = [sys.executable, "-c", CODE.format(quiet=quiet, arguments=arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=its, env=os.environ | {"TERM": "xterm"})
    os.close(its)
    said = b""
    try:
        while block := os.read(ours, 1 << 16):
            said += block
    except OSError:  # EIO: the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, said
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())


@pytest.mark.slow
def test_fit_says_on_a_terminal_what_it_is_at_once_it_takes_long():
    said = on_a_terminal(FIT, 0.0)
    assert said.lstrip().startswith("Reading the configuration of tiny-a.")
    assert "Reading the configuration of tiny-a: " in said


@pytest.mark.slow
def test_fit_that_is_quick_says_one_line():
    said = on_a_terminal(FIT, 600.0)
    assert said.startswith("Reading the configuration of tiny-a.")
    assert "tiny-a: " not in said
