"""What the compute device spends its time on between the ends of two steps."""

import pytest
from msgspec.structs import asdict

from ftis_node.worker.usage import Usage


def spend(usage, clock, part, seconds):
    with usage.of(part):
        clock.now += seconds


def test_time_that_no_work_took_was_idle(clock):
    usage = Usage(clock)
    clock.now += 7  # loading is nobody's idleness
    spend(usage, clock, "generate", 3)
    spend(usage, clock, "score", 1)
    clock.now += 0.5
    spend(usage, clock, "train", 2)
    told = {
        "total": 6.5,
        "generate": 3,
        "train": 2,
        "evaluate": 0,
        "score": 1,
        "idle": 1.5,
    }
    assert asdict(usage.step_ended()) == pytest.approx(told), "scoring text is no work of the device"

    clock.now += 4
    spend(usage, clock, "evaluate", 5)
    spend(usage, clock, "generate", 1)
    spend(usage, clock, "train", 2)
    told = {
        "total": 12,
        "generate": 1,
        "train": 2,
        "evaluate": 5,
        "score": 0,
        "idle": 4,
    }
    assert asdict(usage.step_ended()) == pytest.approx(told), "from the end of the step before"


def test_work_that_failed_took_its_time_all_the_same(clock):
    usage = Usage(clock)
    with pytest.raises(ValueError), usage.of("generate"):
        clock.now += 2
        raise ValueError
    spend(usage, clock, "train", 1)
    assert usage.step_ended().idle == 0
