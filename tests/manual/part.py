"""A part of `make gpu` or `make real` in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from ftis_node.host.allocator import expand_segments

ROOT = Path(__file__).parents[2]


def run_part(module: str, *words: str, limit: float) -> str | None:
    """Run a module with these words, and end it after `limit` seconds with all that it started.

    Returns:
        why it did not end well; None if it did.
    """
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    chosen = {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment = os.environ | chosen
    expand_segments(environment)  # before torch is imported, as in the compute process
    command = [sys.executable, "-m", module, *words]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        child.wait(limit)
    except subprocess.TimeoutExpired:
        return f"it took longer than {limit:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode:
        return f"its process ended with code {child.returncode}"
    return None
