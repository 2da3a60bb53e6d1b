"""Honest peers of other tokenizers are neither struck nor doubted, among real daemons."""

import json
from pathlib import Path

import pytest

from tests.support.daemons import Join, run_cli

MODELS = ("tiny-chars", "tiny-numbers", "tiny-bpe")


@pytest.mark.slow
@pytest.mark.parametrize("cap", [12, None], ids=["cap 12", "the task's cap"])
def test_no_honest_peer_is_refused_or_banned_in_any_run(cap: int | None, join: Join, tmp_path: Path) -> None:
    run_file = str(tmp_path / "run.toml")
    caps = () if cap is None else ("--completion-tokens", str(cap))
    assert run_cli("run", "new", "--any-tokenizer", *caps, "-o", run_file).returncode == 0
    nodes = []
    for model in MODELS:
        peers = ("--peers", nodes[0].address()) if nodes else ()
        nodes.append(join(model, "--model", model, "--run", run_file, *peers))
    for node in nodes:
        node.wait(lambda s: s.get("peers") == 2 and s.get("step", 0) >= 20, "twenty steps among peers")
    accepted = 0
    for node in nodes:
        told = json.loads(run_cli("peers", "--json", "--home", str(node.home.path)).stdout)
        assert len(told["peers"]) == 2 and not told["left_out"]
        for peer in told["peers"]:
            assert not peer["refused"] and not peer["lies"] and peer["weight"] == 1
            assert peer["standing"] in ("established", "newcomer")
            accepted += peer["accepted"]
    assert accepted
