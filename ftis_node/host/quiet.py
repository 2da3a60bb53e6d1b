"""Silence of the libraries under us: what they would tell or ask their makers is switched off in every process of ours.

They read these variables when they are imported, so the package sets them before anything else, whatever the owner's
environment says. Child processes inherit them.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

QUIET: Mapping[str, str] = {
    # huggingface_hub and trl start a thread that reports what is used. Every request to the hub carries a name with
    # torch's version, the kind of file, and a harness that runs the process (asked for at the hub).
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    # transformers: a model without safetensors is named to a service that converts it, with its owner's token.
    "DISABLE_SAFETENSORS_CONVERSION": "1",
    # transformers, where `kernels` is installed: compiled code from the hub in place of its own.
    "USE_HUB_KERNELS": "NO",
}


def be_quiet() -> None:
    """Set `QUIET` for this process and those that it starts; and let tokenizers, which see one text at a time here,
    start no threads unless the owner wants them: they warn of each fork then."""
    os.environ.update(QUIET)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def without(module: str) -> Iterator[None]:
    """Make imports in this context behave as if a library were not installed."""
    modules = cast(dict[str, Any], sys.modules)
    nothing = object()
    before = modules.get(module, nothing)
    modules[module] = None
    try:
        yield
    finally:
        if before is nothing:
            del modules[module]
        else:
            modules[module] = before
