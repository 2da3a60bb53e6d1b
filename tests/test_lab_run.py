"""`ftis-node lab run` and `lab report`, as a person uses them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ftis_node.errors import UserError
from ftis_node.lab.loading import find_experiment, load_experiment, narrowed
from ftis_node.lab.reporting.report import write_report
from ftis_node.lab.runner import Runner
from ftis_node.lab.spec import trials
from tests.support.daemons import PATIENCE, gone, until
from tests.support.lab import events, kind, run, timeless

FILE = """
name = "small"
title = "A small grid"
seeds = [0, 1]
steps = 2
keep = false
run = { group = 4 }
settings = { device = "cpu", batch_groups = 4, eval_prompts = 8, eval_every = 1 }
nodes = [{ name = "A", model = "tiny-a" }, { name = "L", model = "tiny-a", settings = { lora = true } }]
cells = [{ name = "alone", collaboration = "alone", settings.objective = "grpo" }, { name = "ftis", label = "F-TIS" }]
claims = [{ text = "Sharing is no worse than training alone", compare = "not worse", a = "ftis", b = "alone" }]
"""
COMMAND = (sys.executable, "-m", "ftis_node", "lab")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "small.toml"
    path.write_text(FILE)
    return path


def lab(*words):
    return subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def out(file) -> Path:
    """The grid, run once."""
    place = file.parent / "out"
    done = lab("run", file, "--out", place, "--jobs", "1", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["trials"] == 4
    assert summary["finished_before"] == 0
    return place


def under_way(place):
    """Whether some steps of a trial are on the disk."""
    return any(path.read_text().count('"step"') > 4 for path in place.rglob("events.jsonl"))


def directories(place):
    manifest = json.loads((place / "manifest.json").read_text())
    return {(t["cell"], t["seed"]): place / t["directory"] for t in manifest["trials"]}


def test_every_trial_has_a_line_for_each_step_of_each_node(out):
    found = directories(out)
    assert len(found) == 4
    for directory in found.values():
        lines = events(directory)
        assert all([e["step"] for e in kind(lines, "step", node)] == [1, 2] for node in "AL")
        assert lines[-1]["event"] == "end"


def test_the_manifest_says_what_was_run_and_by_what(out):
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["versions"]["torch"]
    assert manifest["versions"]["ftis-node"]
    assert [node["kind"] for node in manifest["nodes"]] == ["full", "lora"]
    assert [cell["label"] for cell in manifest["cells"]] == ["alone", "F-TIS"]
    assert (out / "experiment.toml").read_text() == FILE


def again(path, place, *, cache=None, **some):
    """The same command in this process."""
    return Runner(narrowed(load_experiment(path), **some), path, place, cache=cache, jobs=1, processes=False).run()


def test_the_same_command_again_has_nothing_left_to_do(file, out):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("events.jsonl")}
    assert again(file, out)["finished_before"] == 4
    assert {path: path.stat().st_mtime_ns for path in out.rglob("events.jsonl")} == before


def test_the_report_judges_the_claims_and_draws_the_curves(out):
    done = lab("report", out, "--json")
    assert done.returncode == 0, done.stderr
    report = Path(json.loads(done.stdout)["report"])
    text = report.read_text()
    assert "Sharing is no worse than training alone" in text
    assert "F-TIS" in text
    assert {".md", ".png", ".csv", ".json"} == {path.suffix for path in report.parent.iterdir()}


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_the_same_command_goes_on(file, tmp_path):
    place = tmp_path / "cut"
    words = ("run", str(file), "--out", str(place), "--jobs", "1", "--steps", "8", "--seeds", "0")
    process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    until(lambda: under_way(place), "some steps are taken", process)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert "Interrupted" in process.stderr.read()
    again(file, place, steps=8, seeds="0")
    for spec in trials(narrowed(load_experiment(file), steps=8, seeds="0")):
        assert timeless(events(place / "trials" / spec.id)) == timeless(run(spec, tmp_path / spec.id))


def test_experiments_that_share_a_cache_share_what_is_equal(file, out, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text(FILE.replace('name = "small"', 'name = "other"').replace('"F-TIS"', '"sharing"'))
    assert again(other, tmp_path / "two", cache=out)["finished_before"] == 4
    assert "sharing" in write_report(tmp_path / "two").read_text()


def test_a_file_of_the_package_is_found_by_its_name():
    assert find_experiment("paper/size").is_file()
    assert find_experiment("quick").stem == "quick"


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_told_and_nothing_hangs(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text(FILE.replace('model = "tiny-a"', 'model = "tiny-z"', 1))
    with pytest.raises(UserError, match="tiny-z"):
        again(broken, tmp_path / "out", seeds="0")


@pytest.mark.slow
def test_twins_share_the_one_warm_up_that_is_made_for_them(tmp_path):
    warm = FILE.replace('model = "tiny-a"', 'warm = { recipe = "tiny-a", steps = 3 }', 1)
    warm = warm.replace('model = "tiny-a"', 'warm = { recipe = "tiny-a", steps = 3, like = "A" }')
    path = tmp_path / "warm.toml"
    path.write_text(warm.replace("seeds = [0, 1]", "seeds = [0]").replace("steps = 3\nkeep", "steps = 1\nkeep"))
    assert again(path, tmp_path / "out")["trials"] == 2
    (model,) = (path for path in (tmp_path / "out" / "models").iterdir() if path.is_dir())
    facts = json.loads((model / "start.json").read_text())
    assert facts["seed"] == "0/A"
    assert 0 <= facts["pass_at_1"] <= 1


@pytest.mark.slow
def test_what_another_run_is_working_on_is_waited_for(file, out, tmp_path):
    """Two runs at the same time on one place: both end, and no trial is written twice."""
    place = tmp_path / "both"
    words = [*COMMAND, "run", str(file), "--out", str(place), "--jobs", "2", "--seeds", "0", "--steps", "4"]
    both = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) for _ in range(2)]
    assert [process.wait(PATIENCE) for process in both] == [0, 0], both[0].communicate()[1]
    for directory in directories(place).values():
        lines = events(directory)
        assert [e["step"] for e in kind(lines, "step", "A")] == [1, 2, 3, 4]
        assert [e["event"] for e in lines].count("end") == 1


@pytest.mark.slow
def test_the_processes_of_a_killed_run_end_with_it(file, tmp_path):
    words = [*COMMAND, "run", str(file), "--out", str(tmp_path), "--jobs", "1", "--steps", "5000", "--seeds", "0"]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    until(lambda: under_way(tmp_path), "some steps are taken", process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert children
    gone(children)
