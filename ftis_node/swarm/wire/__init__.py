"""Peers over libp2p. No other room imports hivemind; the rest of the swarm knows `transport.Transport` only.

Three of hivemind's packages import all that it has, and so torch and scipy: 200 MB and two seconds for nothing that is
used here. They are entered without their `__init__`, so that the network process has no torch.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path


def _enter_hivemind() -> None:
    """Put bare packages in place of hivemind's three, unless it is imported already or not installed."""
    if "hivemind" in sys.modules:
        return
    found = find_spec("hivemind")
    if found is None:
        return
    for place in found.submodule_search_locations or ():
        for name in ("hivemind", "hivemind.dht", "hivemind.utils"):
            folder = Path(place).parent.joinpath(*name.split("."))
            spec = ModuleSpec(name, None, origin=str(folder / "__init__.py"), is_package=True)
            spec.submodule_search_locations = [str(folder)]
            sys.modules[name] = module_from_spec(spec)
        from hivemind.utils.logging import get_logger
        from hivemind.utils.serializer import MSGPackSerializer
        from hivemind.utils.timed_storage import get_dht_time

        used = {"get_logger": get_logger, "MSGPackSerializer": MSGPackSerializer, "get_dht_time": get_dht_time}
        vars(sys.modules["hivemind.utils"]).update(used)


os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")  # its own handlers log what peers do
_enter_hivemind()
