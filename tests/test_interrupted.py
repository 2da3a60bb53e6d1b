"""Ctrl-C ends a command with exit code 130 and without a traceback, however early it comes."""

import os
import signal
import subprocess
import sys

import pytest

SCRIPT = "import sys; from ftis_node.__main__ import main; sys.exit(main())"  # as pip writes it


@pytest.mark.parametrize(
    ("begun", "imported", "command"),
    [
        (("-m", "ftis_node"), "ftis_node.errors", ("status",)),
        (("-m", "ftis_node"), "typer.main", ("status",)),
        (("-c", SCRIPT), "ftis_node.errors", ("--help",)),
        (("-c", SCRIPT), "annotated_types", ("config", "show")),
        (("-m", "ftis_node"), "numpy", ("fit", "--model", "tiny-a", "--vram", "24", "--task", "arithmetic")),
    ],
)
def test_ctrl_c_ends_an_import_quietly(begun, imported, command):
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *begun, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith(f" {imported}"):
            break
    process.send_signal(signal.SIGINT)
    said = [line for line in process.stderr.read().splitlines() if not line.startswith("import time:")]
    assert process.wait() in (130, -signal.SIGINT), said  # the latter: on a busy machine it may be at its very end
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in said), said


def test_a_command_that_nohup_started_goes_on_through_ctrl_c():
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.argv[1:] = ['--version']\n"
    code += "from ftis_node.__main__ import main\nimport os; os.kill(os.getpid(), signal.SIGINT); main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.strip()
