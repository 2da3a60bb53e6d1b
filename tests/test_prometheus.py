"""What Prometheus reads: valid, complete, as documented, and nothing in it that a peer wrote."""

import ast
import asyncio
import math
import tempfile
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import ftis_node
from ftis_node.node.progress import Totals
from ftis_node.node.status import last_step
from ftis_node.observe.prometheus import PEERS_MAX, exposition
from ftis_node.observe.web import TEXT, Api, Route
from ftis_node.step_report import DeviceSeconds, StepFigures
from tests.support.documented import EVENTS, exposed, keys, metrics, scraped
from tests.support.statuses import JOINING, LOADING, NOBODY, PEER, TRAINING, peer
from tests.support.steps import step_report, taken_step

EVIL = 'x"} 1\nftis_node_step 99\n'


def samples(text):
    """Values by the sample's name and its labels' values, in the order of the labels' names."""
    return {
        " ".join([sample.name, *(value for _, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_every_documented_metric_is_exposed_as_documented_and_no_other():
    text = exposition(TRAINING, {"peers": [peer()], "left_out": [{"id": "x", "reason": "other run"}]})
    assert exposed(text) == metrics()
    assert text.count(b"# HELP") == text.count(b"# TYPE") == len(metrics())


def test_values_are_those_of_the_status():
    found = samples(exposition(TRAINING, {"peers": [peer()], "left_out": []}))
    assert found["ftis_node_groups_used own"] == 10
    assert found["ftis_node_groups_used foreign"] == 6
    assert found["ftis_node_packets_refused_total malformed"] == 3
    assert found["ftis_node_memory_bytes compute"] == 3000
    assert found["ftis_node_memory_bytes p2pd"] == 2000
    assert found["ftis_node_idle_share"] == 0.25
    assert found["ftis_node_last_step_seconds wait"] == 0.5
    assert "ftis_node_last_step_seconds total" not in found
    assert found[f"ftis_node_peer_packets_refused_total {PEER}"] == 3
    assert found["ftis_node_filtered_fraction"] == 0, "known, and nothing"
    assert found[f"ftis_node_info full tiny-a {'ab' * 16} {ftis_node.__version__}"] == 1


@pytest.mark.parametrize("state", ["ONLINE", "ALONE", "SOMETHING NEW"])
def test_one_state_holds_and_all_others_do_not(state):
    found = samples(exposition(TRAINING | {"state": state}, NOBODY))
    states = {name: value for name, value in found.items() if name.startswith("ftis_node_state ")}
    assert [name for name, value in states.items() if value] == [f"ftis_node_state {state}"]
    assert len(states) >= 7


def test_what_is_not_known_yet_is_left_out():
    names = {name.split()[0] for name in samples(exposition(LOADING, NOBODY))}
    assert names == {"ftis_node_info", "ftis_node_state", "ftis_node_uptime_seconds", "ftis_node_worker_restarts_total"}
    joining = samples(exposition(JOINING, NOBODY))
    assert joining["ftis_node_steps_total"] == joining["ftis_node_peers_left_out"] == 0
    unknown = "pass_at_1,pass_at_1_step,loss,step_seconds,idle_share,reward own,memory_bytes compute"
    assert not {f"ftis_node_{name}" for name in unknown.split(",")} & joining.keys()
    assert "ftis_node_reward own" in samples(exposition(JOINING | {"own_reward": 0.0}, NOBODY))


@pytest.mark.parametrize("none", [math.nan, math.inf])
def test_a_step_whose_numbers_are_none_shows_none(none):
    last = last_step(taken_step(report=step_report(loss=none, gradient_norm=none)))
    assert last.loss is last.gradient_norm is None
    shown = msgspec.to_builtins(last) | {"loss": none, "gradient_norm": none}
    found = samples(exposition(TRAINING | {"last_step": shown}, NOBODY))
    assert "ftis_node_loss" not in found
    assert "ftis_node_gradient_norm" not in found
    assert last_step(taken_step(report=step_report(skipped="no signal"))).loss is None


def test_no_text_of_a_peer_is_in_it():
    bad = peer(
        agent=EVIL,
        addresses=[EVIL],
        standing=f"banned: it {EVIL}",
        lies={EVIL: 1},
    )
    text = exposition(TRAINING, {"peers": [bad], "left_out": [{"id": PEER, "reason": EVIL}]})
    assert b"99" not in text
    assert samples(text)[f"ftis_node_peer_standing {PEER} banned"] == 1
    odd = exposition(TRAINING, {"peers": [peer(standing=EVIL)], "left_out": []})
    assert b"99" not in odd
    assert b"ftis_node_peer_standing{" not in odd


def model_label(model):
    found = [*text_string_to_metric_families(exposition(TRAINING | {"model": model}, NOBODY).decode())]
    [info] = [sample for family in found for sample in family.samples if sample.name == "ftis_node_info"]
    return str(info.labels["model"])


def test_of_a_models_folder_the_last_name_alone_is_told(tmp_path):
    folder = tmp_path / "somebody" / "my-model"
    folder.mkdir(parents=True)
    assert model_label(str(folder)) == "my-model", "also of one that is no model, or gone"
    (folder / "config.json").write_text("{}")
    assert model_label(str(folder)) == "my-model"
    assert model_label("qwen2.5-3b") == "Qwen/Qwen2.5-3B"
    assert model_label("someone/model") == "someone/model"


def test_a_models_name_of_whatever_characters_stays_a_label():
    assert model_label(EVIL) == EVIL


def test_at_most_64_peers_are_in_it():
    many = [peer(f"peer{number}") for number in range(2 * PEERS_MAX)]
    found = samples(exposition(TRAINING, {"peers": many, "left_out": []}))
    assert sum(name.startswith("ftis_node_peer_weight ") for name in found) == PEERS_MAX == 64


async def test_the_api_serves_it_as_text():
    api = Api([Route("/metrics", lambda: exposition(LOADING, NOBODY), TEXT)])
    with tempfile.TemporaryDirectory(prefix="ftis-") as directory:
        await api.start(Path(directory) / "api.sock")
        try:
            answer = await asyncio.to_thread(scraped, Path(directory) / "api.sock")
        finally:
            await api.close()
    assert answer == exposition(LOADING, NOBODY)


def test_totals_count_what_a_gradient_was_computed_of():
    totals = Totals()
    figures = {"samples": 20.0, "tokens": 200.0}
    diagnostics = StepFigures(sources={"own": figures}, foreign={"samples": 5.0, "tokens": 50.0})
    device = DeviceSeconds(generate=0.75, train=2.0, evaluate=1.0, idle=1.25)
    for skipped in (None, "loss or gradient was not finite"):
        report = step_report(skipped=skipped, diagnostics=diagnostics, device=device)
        totals.add_step(taken_step(report=report, own_groups=3, foreign_groups=2))
    assert totals.steps == 2
    assert totals.skipped_steps == 1
    assert totals.groups == {"own": 6, "foreign": 4}
    assert totals.samples == {"own": 20, "foreign": 5}
    assert totals.tokens == {"own": 200, "foreign": 50}
    assert totals.seconds == {"generate": 1.0, "wait": 0.0, "train": 3.0}
    assert totals.device == {"generate": 1.5, "train": 4.0, "evaluate": 2.0, "idle": 2.5}


def test_every_kind_of_event_that_the_code_writes_is_documented_with_its_keys():
    """Kinds and keys that stand in the code; those that only a running daemon knows are looked at in test_daemons."""
    written = set()
    for path in Path(ftis_node.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("metrics.write"):
                [kind] = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
                named = {word.arg for word in call.keywords if word.arg is not None}
                assert named <= keys(kind).keys(), f"{kind}: {named - keys(kind).keys()} not documented"
                if len(named) == len(call.keywords):
                    assert named == keys(kind).keys()
                written.add(kind)
    assert written == set(EVENTS)
