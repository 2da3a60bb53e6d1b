"""The swarm's benchmark measures what it says it does, on swarms of three."""

import pytest

from ftis_node.errors import FtisError
from ftis_node.lab.bench.swarm import Plan, all_gather, steady
from ftis_node.swarm.wire.p2pd import SENT_AHEAD

SMALL = {"nodes": 3, "per_process": 2, "groups": 2, "tokens": 32}


@pytest.mark.slow
async def test_everybody_gets_everything_and_the_bytes_add_up():
    more = {"groups": SENT_AHEAD + 2}  # than a stream takes ahead
    found = await all_gather(Plan(**SMALL | more, repetitions=2))
    assert found["rejections"] == {}
    assert 3000 < found["packet_bytes"] < 3300  # 12 completions of 32 tokens of 8 bytes
    assert 1 < found["amplification"] < 3, "all that came in, over the packets alone"
    assert found["wire_bytes_per_token"] > 8
    assert found["stream_push_wire_bytes_per_token"] > 8
    assert found["seconds_spread"][0] <= found["seconds"] <= found["seconds_spread"][1]
    for rival in ("stream_push", "stored_push"):
        assert found[f"{rival}_seconds"] > 0
        assert found[f"{rival}_ratio"] > 0


@pytest.mark.slow
async def test_an_even_pace_fills_batches():
    found = await steady(Plan(**SMALL), step_seconds=0.5, batch=2, seconds=4)
    assert found["groups_per_step"] == pytest.approx(2, abs=0.6)
    assert found["rejections"] == {}
    assert found["bytes_in_per_s"] == pytest.approx(found["bytes_out_per_s"], rel=0.3)


@pytest.mark.slow
async def test_what_does_not_come_in_time_ends_the_benchmark_and_is_named():
    with pytest.raises(FtisError, match=r"After 0 s a node has [0-3] admitted in place of 4"):
        await all_gather(Plan(**SMALL, repetitions=1, timeout=0.0))
