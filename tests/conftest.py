"""For all tests: how long an example takes says how busy the machine is, and nothing about the code."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from ftis_node.host.loading import loading
from tests.support.clock import Clock
from tests.support.virtual import VirtualLoop

pytest_plugins = [f"tests.support.{name}" for name in ("cli", "daemons", "reached", "talkers", "zygote")]

# The same few examples each time; other ones, and more, in `make test-all`, which sets EXAMPLES=new.
SAME = os.environ.get("EXAMPLES") != "new"
settings.register_profile(
    "shared machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=SAME,
    max_examples=40 if SAME else 100,
)
settings.load_profile("shared machine")
if SAME:  # nor constants of whatever files happen to be loaded
    providers._get_local_constants = lambda: providers._local_constants


# Files that take long, and are late in the alphabet: whoever begins one last keeps the others waiting.
LONG = (
    "page_look",
    "plan",
    "pretend_gpu",
    "private",
    "questions",
    "replay",
    "schedule",
    "silence",
    "simulation",
    "swarm",
    "tokenizer_codec",
    "vllm",
    "watch",
)

# A shell ignores SIGINT in what it starts in the background; the programs under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # the modules of `pytest_plugins` import nearly all, before any hook


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Load torch, transformers and thousands of tests without garbage collection, which never walks them later."""
    with loading():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


@pytest.fixture(scope="module", autouse=True)
def _what_is_left_is_walked_no_more() -> Iterator[None]:
    """What a file has imported lives as long as the process: later collections of garbage would walk it again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the daemon runs in, or one in virtual time."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualLoop}
    return {"uvloop": uvloop.new_event_loop}
