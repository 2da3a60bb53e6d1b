"""The wire stays as small as it is said to be."""

import pytest

from ftis_node.lab.bench.reading import bench_reading, built_in_tokenizers
from ftis_node.lab.bench.wire import bench_wire


def test_a_token_costs_little_more_than_its_eight_bytes():
    result = bench_wire(repeats=3)
    named = "bytes_per_token header_bytes encode_us decode_us admit_us refuse_us announcement_bytes"
    named += " text_bytes_per_token text_encode_us text_decode_us text_admit_us"
    assert set(result) == {*named.split(), *(f"{work}_us_per_token" for work in ("spell", "align", "read"))}
    assert 7 < result["text_bytes_per_token"] <= 8.06
    assert 0 < result["text_admit_us"] < 5_000
    assert 8 < result["bytes_per_token"] <= 8.06
    assert result["header_bytes"] <= 160
    assert result["announcement_bytes"] <= 150 + 8 * 41
    # Tens of microseconds on an idle machine; the bound only catches a loop over tokens.
    assert 0 < result["admit_us"] < 5_000
    assert result["encode_us"] > 0
    assert result["decode_us"] > 0


def test_a_benchmark_between_two_alike_tokenizers_is_refused():
    words = built_in_tokenizers()["tiny-bpe"]
    with pytest.raises(RuntimeError, match="in chunks"):
        bench_reading(64, 1, {"one": words, "other": words})
