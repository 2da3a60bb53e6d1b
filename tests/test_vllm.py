"""The engine `vllm`: a server samples with this node's weights while it can, and nothing is lost when it cannot."""

import json
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from ftis_node.errors import FtisError, UsageError
from ftis_node.fit.memory import Workload
from ftis_node.host.interruption import Interrupted
from ftis_node.policy.generate import vllm
from ftis_node.policy.generate.sampling import Sampling
from ftis_node.policy.generate.vllm import KEY, Server
from ftis_node.worker.engine import Engine
from ftis_node.worker.planning import settle
from tests.support.daemons import own_rows
from tests.support.small_models import arithmetic_settings, batch_of, completions_of, opened_engine
from tests.support.vllm_server import VllmServer

ROWS = [0, 1, 2, 3]


@pytest.fixture
def server() -> Iterator[VllmServer]:
    made = VllmServer()
    yield made.start()
    made.stop()


@pytest.fixture
def at_once(monkeypatch):
    """A server that was away is asked again without a pause."""
    monkeypatch.setattr(vllm, "RESTS", (1e-9, 1e-9))


def opened(server, folder, own_data=None, **settings):
    given = {
        "engine": "vllm",
        "vllm_url": server.url,
        "vllm_folder": str(folder),
        "learning_rate": 1e-2,
        "lora": True,
    }
    run = {"temperature": 0.9, "prompt_tokens": 96}
    return opened_engine(load={"own_data": own_data}, run=run, **given | {"warmup_steps": 0} | settings)


@pytest.fixture
def engine(server, tmp_path) -> Engine:
    return opened(server, tmp_path)


def step(engine):
    return engine.step(batch_of(ROWS, engine.generate(ROWS).groups, uneven=True)).generator


# --- a server that is there -------------------------------------------------------------------------------------------


def test_each_steps_weights_sample_the_next_groups(server, engine, tmp_path):
    (tmp_path / "ftis-node").mkdir()  # somebody's checkout
    seen = []
    for _ in range(4):
        told = step(engine)
        assert told.away is None
        assert told.mismatch < 1e-3
        seen.append(completions_of(engine.generate(ROWS).groups[0])[0].logprobs.tolist())
    assert len(set(map(tuple, seen))) == 4, "the weights did change"
    assert len(set(server.loaded)) == len(server.loaded) == 5, "each under a name of its own"
    assert {path.name for path in tmp_path.iterdir()} == {server.loaded[-1], "ftis-node"}, "older ones are gone"
    assert list(server.adapters) == server.loaded[-1:]


def test_what_it_samples_is_as_asked(server, engine):
    groups = [completions_of(group) for group in engine.generate(ROWS).groups]
    assert [len(group) for group in groups] == [8] * 4
    for group in groups:
        for one in group:
            ends = np.isin(one.token_ids, engine.packets.asked.ends)
            assert one.finished == ends[-1]
            assert not ends[:-1].any()
            assert len(one) <= engine.run.completion_tokens
    asked = {
        "prompt": [engine.prompts[row] for row in ROWS],
        "n": 8,
        "temperature": 0.9,
        "stop_token_ids": list(engine.run.eos),
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
    }
    assert server.asked[-1].items() >= asked.items()


def test_an_evaluation_is_this_nodes_own(server, engine):
    asked = len(server.asked)
    assert engine.evaluate().prompts == 40
    assert len(server.asked) == asked


def test_rows_of_the_owners_own_are_never_told_to_it(server, tmp_path):
    engine = opened(server, tmp_path / "weights", own_data=own_rows(tmp_path))
    report = engine.step(batch_of(ROWS, engine.generate(ROWS).groups, uneven=True), own_data=3)
    assert report.own_data_groups == 3
    assert report.generator.away is None
    known = {tuple(prompt) for prompt in engine.prompts}
    assert all(tuple(prompt) in known for asked in server.asked for prompt in asked["prompt"])


def test_a_checkpoint_that_comes_back_is_given_to_it(server, tmp_path):
    engine = opened(server, tmp_path / "weights")
    (tmp_path / "kept").mkdir()
    engine.save(str(tmp_path / "kept"))
    step(engine)
    engine.restore(str(tmp_path / "kept"), 1)
    told = step(engine)
    assert told.away is None
    assert told.mismatch < 1e-3


def test_ids_without_a_token_are_ruled_out_in_few_bytes():
    """Qwen2.5's tokenizer has 151,665 ids, its embedding 151,936 rows."""
    without = range(151_665, 151_936)
    asked, plain = (vllm.body_of("m", [[1, 2]], 8, Sampling(64, 1.0, (1,)), ids) for ids in (without, range(26, 26)))
    assert asked["logit_bias"] == {str(token): -100.0 for token in without}
    assert len(json.dumps(asked)) < 6_000
    assert "logit_bias" not in plain


# --- a server that was started wrongly --------------------------------------------------------------------------------


def doubled(choice):
    """As other weights would have it."""
    return choice | {"logprobs": {"token_logprobs": [2 * one - 1 for one in choice["logprobs"]["token_logprobs"]]}}


@pytest.mark.parametrize(
    ("switch", "value", "words"),
    [
        ("ids", False, "0.32"),
        ("processed", False, "--logprobs-mode processed_logprobs"),
        ("longest", 12, "--max-model-len"),
        ("lora", False, "--enable-lora --max-lora-rank 16"),
        ("tokenizer", lambda *_, **__: SimpleNamespace(input_ids=[1, 2]), "tokenizer is another"),
        ("change", doubled, "off by"),
    ],
)
def test_what_is_missing_is_named(server, tmp_path, switch, value, words):
    setattr(server, switch, value)
    with pytest.raises(UsageError) as refusal:
        opened(server, tmp_path)
    assert words in f"{refusal.value.what} {refusal.value.fix}"


def test_a_key_goes_with_every_question(server, tmp_path, monkeypatch):
    server.key = "secret"
    with pytest.raises(UsageError, match="another key"):
        opened(server, tmp_path)
    monkeypatch.setenv(KEY, "secret")
    engine = opened(server, tmp_path)
    assert step(engine).away is None
    assert "secret" not in engine._settings.model_dump_json()


@pytest.mark.parametrize(
    ("words", "urls"),
    [
        ("no address", ["localhost:8000", "ftp://127.0.0.1", "http://"]),
        ("not on this machine", ["http://10.0.0.7", "http://gpu.example:1", "http://[2001:db8::1]", "http://0.0.0.0"]),
        (None, ["http://127.0.0.1", "http://localhost:8000", "http://[::1]", "http://127.8.8.8"]),
    ],
)
def test_off_this_machine_it_needs_a_key(words, urls):
    for url in urls:
        if words is None:
            assert Server.of(f"{url}/", "folder", None).url == url
            continue
        with pytest.raises(UsageError, match=words):
            Server.of(url, "folder", None)
    assert Server.of("http://10.0.0.7:1", "folder", "key").key == "key"


@pytest.mark.parametrize(
    ("chosen", "home", "words"),
    [
        ({"lora": False}, {}, "all weights"),
        ({}, {"lora": False}, "all weights"),
        ({"quantisation": "nf4"}, {}, "four bits"),
        ({}, {"lora": True, "quantisation": "nf4"}, "four bits"),
    ],
)
def test_what_a_server_cannot_sample_from_is_refused(chosen, home, words):
    with pytest.raises(UsageError, match=words) as refusal:
        settle(arithmetic_settings(engine="vllm", **chosen), Workload(16, 16, 4, 4), home)
    assert "--lora and quantisation=none" in refusal.value.fix


def test_where_nobody_chose_it_has_layers_to_sample_from():
    _, plan = settle(arithmetic_settings(engine="vllm"), Workload(16, 16, 4, 4), {})
    assert plan.lora
    assert plan.quantisation == "none"
    assert not settle(arithmetic_settings(), Workload(16, 16, 4, 4), {})[1].lora


# --- a server that is away --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_a_node_samples_by_itself_until_the_server_is_there(server, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    server.stop()
    engine = opened(server, tmp_path)
    for _ in range(2):
        told = step(engine)
        assert "refused" in told.away
        assert told.mismatch < 1e-3
    assert caplog.text.count("This node generates itself") == 1, "said once"
    server.start()
    assert step(engine).away is None
    assert "is back" in caplog.text
    server.stop()
    assert step(engine).away is not None
    assert len(engine.generate(ROWS).groups) == 4


@pytest.mark.usefixtures("at_once")
def test_one_that_breaks_or_talks_nonsense_is_done_without(server, engine):
    for change in (
        {"token_ids": [1] * 999},
        {"token_ids": [10**6]},
        {"token_ids": []},
        {"logprobs": None},
        {"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [-1.0, -1.0]}},
    ):
        server.change = lambda choice, change=change: choice | change
        made = engine.generate(ROWS)
        assert [len(group.rewards) for group in made.groups] == [8] * 4
        assert engine.policy.server.away is not None
        server.change = lambda choice: choice
        assert step(engine).away is None
    plain = server.answer
    for path in ("/v1/models", "/tokenize", "/v1/completions"):
        for nonsense in ([], {"data": 3}, "a proxy's page", None, {"choices": [3]}):
            server.answer = lambda asked, body, at=path, told=nonsense: told if asked == at else plain(asked, body)
            engine.policy.server.away = "it is asked anew"
            assert step(engine).away is not None
    server.answer = plain
    assert step(engine).away is None
    server.broken = True
    assert "500" in step(engine).away
    server.broken = False
    server.processed = False
    assert "--logprobs-mode" not in str(step(engine).away), "advice is for the start"
    server.processed = True
    assert step(engine).away is None


def test_one_that_dies_in_the_middle_of_an_answer_is_away(server, engine):
    server.cut = True
    assert "Incomplete" in step(engine).away


def test_what_it_samples_can_be_interrupted(server, engine):
    server.slow.set()
    threading.Timer(0.3, engine.interrupt).start()
    with pytest.raises(Interrupted):
        engine.generate(ROWS)
    server.slow.clear()
    assert step(engine).away is None


def test_weights_that_cannot_be_written_are_no_end(engine, tmp_path):
    engine.policy.server.folder = tmp_path / "file"
    (tmp_path / "file").write_text("")
    step(engine)
    assert "cannot be written" in step(engine).away


def test_a_folder_is_told_by_its_whole_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Server.of("http://localhost:1", "weights", None).folder == tmp_path / "weights"


def test_one_that_is_away_is_left_alone_for_a_while(server, tmp_path, clock, monkeypatch):
    monkeypatch.setattr(vllm.time, "monotonic", clock)
    server.stop()
    engine = opened(server, tmp_path)
    server.start()
    assert step(engine).away is not None
    clock.now += 2.1
    assert step(engine).away is None


def test_log_probs_that_are_no_numbers_are_an_error(server, engine):
    server.change = lambda choice: choice | {"logprobs": {"token_logprobs": [float("nan")] * len(choice["token_ids"])}}
    with pytest.raises(FtisError, match="not finite"):
        engine.generate(ROWS)
