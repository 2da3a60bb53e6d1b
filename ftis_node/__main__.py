"""``ftis-node`` and ``python -m ftis_node``: Ctrl-C ends a command quietly, also while it is still being imported."""

import os
import signal
import sys


def main() -> None:
    """Runs the command line; see `cli.main`."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody has it ignored, as nohup does
    if ours:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing is begun yet, so nothing is left undone
    from ftis_node.cli import main as run

    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
