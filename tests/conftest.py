"""For all tests: how long an example takes says how busy the machine is, and nothing about the code."""

import asyncio
import gc

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.support.clock import Clock

pytest_plugins = [f"tests.support.{name}" for name in ("cli", "daemons", "talkers")]

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


def pytest_collection_finish() -> None:
    """Freeze what the collection loaded (torch, transformers, thousands of tests), so that gc never walks it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that the daemon runs in."""
    return uvloop.EventLoopPolicy()
