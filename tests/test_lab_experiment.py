"""Lab files: what they mean, what they refuse, and that all that come with the package can be run."""

from pathlib import Path

import pytest

import ftis_node.lab
from ftis_node.errors import UsageError
from ftis_node.lab.forecast import forecast, forecast_text
from ftis_node.lab.loading import load_experiment, narrowed
from ftis_node.lab.spec import trials
from ftis_node.lab.starts import starts
from ftis_node.lab.step_seconds import Card
from tests.support.lab import A, B, experiment, spec

SHIPPED = Path(ftis_node.lab.__file__).parent / "experiments"
HEAD = 'name = "x"\nseeds = [0]\nsteps = 2\n[[nodes]]\nname = "A"\nmodel = "tiny-a"\n'
SCRIPTED = '[[nodes]]\nname = "S"\nscript = "lying"\n'
OWNER = HEAD + 'own_data = "arithmetic"\n'
FEDERATED = "collaboration = 'federated'\naverage.weights = 'gain'\n"
TEXT = "[run]\nany_tokenizer = true\n"
CELL = '[[cells]]\nname = "c"\n'
CLAIM = "[[claims]]\ntext='t'\ncompare='less'\na='c'\nb='c'\n"


def written(path, text):
    file = path / "lab.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        (HEAD.replace("steps", "step") + CELL, "unknown key 'step'", "Did you mean 'steps'?"),
        (HEAD + CELL + "colaboration = 'alone'\n", "unknown key 'cells.0.colaboration'", "'collaboration'"),
        (HEAD + CELL + "collaboration = 'diagonal'\n", "cells.0.collaboration", "Mend"),
        (HEAD + CELL + "settings = { truncaton = 2.0 }\n", "Unknown setting 'truncaton'", "truncation"),
        (HEAD + CELL + "settings = { batch_groups = 0 }\n", "batch_groups", "valid value"),
        (HEAD + CELL + "nodes = ['Z']\n", "node 'Z'", "Mend"),
        (HEAD + CELL + CELL, "two cells are the same", "Mend"),
        (HEAD.replace("[0]", "[]") + CELL, "seeds", "Mend"),
        (HEAD.replace("[0]", "[0, 0]") + CELL, "two seeds are the same", "Mend"),
        (HEAD.replace('model = "tiny-a"', "") + CELL, "exactly one of", "Mend"),
        (HEAD.replace("model", "warm.long = 0.5\nwarm.recipe") + CELL, "the task is of lab.parity", "Mend"),
        (HEAD + CELL + CLAIM.replace("b='c'", "b='d'"), "cell 'd'", "Mend"),
        (HEAD + "[run]\ngrup = 4\n" + CELL, "a run has no 'grup'", "group"),
        (HEAD + TEXT + "prompt_tokens = 64\n" + CELL, "has no prompt_tokens", "other cells"),
        (HEAD + CELL + "settings = { seed = 3 }\n", "'seed' is not a setting here", "seeds"),
        (HEAD + CELL + "vary = { threshold = [] }\n", "no cell", "Mend"),
        (HEAD.replace('model = "tiny-a"', 'script = "lying"') + CELL, "no node that learns", "model"),
        (HEAD + SCRIPTED + "[clock]\ngenerate = 0\n" + CELL + "pace = 'free'\n", "needs no time", "generate"),
        (HEAD.replace('model = "tiny-a"', 'script = "padding copid"') + CELL, "script 'padding copid'", "Mend"),
        (HEAD + CELL + "methods = ['tis']\n", "names the method 'tis'", "Mend"),
        (HEAD + CELL + "each = 3\n", "unknown key 'cells.0.each'", "It may hold"),
        (HEAD + CELL + "collaboration = 'horizontal'\n", "is horizontal", "same batch_groups"),
        (HEAD + "[[evaluate]]\nname='held-out'\ntask='arithmetic-4'\n" + CELL, "two evaluation sets", "Mend"),
        (HEAD + CELL + CLAIM + "node='Z'\n", "node 'Z'", "Mend"),
        (HEAD + SCRIPTED + CELL + "nodes = ['A']\n" + CLAIM + "node='S'\n", "about c names the node 'S'", "Mend"),
        (HEAD + CELL + CLAIM + "set='z'\n", "set 'z'", "Mend"),
        (HEAD + CELL + FEDERATED, "no `own_data`", "Mend"),
        (OWNER + CELL + FEDERATED + "pace = 'free'\n", "in lock step", "Mend"),
        (OWNER + CELL + "collaboration = 'federated'\n", "`average` belongs", "Mend"),
        (OWNER + "[[evaluate]]\nname='own data'\ntask='arithmetic'\n" + CELL, "has none", "Mend"),
        (OWNER + "[[evaluate]]\nname='other'\n" + CELL, "needs a task", "Mend"),
    ],
)
def test_what_a_lab_file_cannot_mean_is_told_with_its_place(tmp_path, text, what, fix):
    with pytest.raises(UsageError) as caught:
        load_experiment(written(tmp_path, text))
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_lists_that_vary_make_a_cell_for_each_combination():
    cell = {
        "vary": {"threshold": [1.0, 2.5], "objective": ["ftis", "f-vis"]},
        "values": {"kind": "both"},
    }

    cells = experiment(cell).all_cells()

    assert cells[0].name == "cell threshold=1 objective=ftis"
    assert cells[1].name == "cell threshold=1 objective=f-vis"
    assert cells[3].settings == {"threshold": 2.5, "objective": "f-vis"}
    assert cells[3].values == {"kind": "both", "threshold": 2.5, "objective": "f-vis"}


def test_named_methods_make_a_cell_each():
    method = {"label": "F-TIS", "settings": {"objective": "ftis", "threshold": 2.0}}
    cell = {
        "label": "Cell",
        "methods": ["a"],
        "settings": {"threshold": 1.0},
        "attack": "padding",
        "values": {"x": 1},
    }
    [made] = experiment(cell, methods={"a": method}).all_cells()
    assert made.name == "cell a"
    assert made.label == "Cell: F-TIS"
    assert made.settings == {"objective": "ftis", "threshold": 1.0}, "the cell's own come on top"
    assert made.values == {"x": 1, "attack": "padding", "method": "F-TIS"}


def test_what_has_an_each_is_written_out_for_each_combination():
    nodes = [A, {"each": {"who": ["X", "Y"], "i": [1, 2]}, "name": "{who} {i}", "script": "lying"}]
    cells = [
        {
            "each": {"who": ["X", "Y"]},
            "name": "with {who}",
            "nodes": ["A", "{who} 1"],
            "speed": {"{who} 1": 2.0},
        }
    ]
    claim = {
        "each": {"who": ["Y"]},
        "text": "{who} {is} here",
        "compare": "less",
        "a": "with X",
        "b": "with {who}",
    }

    made = experiment(nodes=nodes, cells=cells, claims=[claim])

    assert [node.name for node in made.nodes] == ["A", "X 1", "X 2", "Y 1", "Y 2"]
    assert [(cell.nodes, cell.speed) for cell in made.cells] == [(("A", f"{w} 1"), {f"{w} 1": 2.0}) for w in "XY"]
    assert made.claims[0].text == "Y {is} here"
    assert made.claims[0].b == "with Y"


def test_settings_come_layer_upon_layer():
    made = spec(
        {
            "settings": {"objective": "tis"},
            "node": {"B": {"own_share": 0.0}},
            "speed": {"B": 0.2},
        },
        nodes=[A, {**B, "settings": {"seed": 7, "objective": "vis"}}],
    )
    first, second = (made.settings_of(member) for member in made.members)
    assert first.objective == "tis"
    assert second.objective == "tis"
    assert first.own_share is None
    assert second.own_share == 0.0
    assert second.seed == 7
    assert [member.speed for member in made.members] == [1.0, 0.2]


def test_a_trials_id_is_what_happens_in_it_and_nothing_else():
    cell = {"settings": {"objective": "ftis"}}
    ours = spec(cell)

    renamed = spec({"name": "other", "label": "x", **cell}, title="y", tail=3)
    assert renamed.id == ours.id

    changes = [
        {"steps": 4},
        {"seeds": [4]},
        {"nodes": [A]},
        {"run": {"group": 6}},
    ]
    others = [spec(cell, **change).id for change in changes]
    assert len({ours.id, *others}) == 5


def test_twins_start_from_one_checkpoint_and_strangers_from_their_own():
    warm = {"recipe": "tiny-a", "harder": 0.25}
    nodes = [{"name": name, "warm": warm} for name in "AC"]
    nodes.insert(1, {"name": "L", "warm": {**warm, "like": "A"}, "settings": {"lora": True}})
    found = starts(trials(experiment(nodes=nodes, seeds=[0, 1])))
    assert [start.seed for start in found] == ["0/A", "0/C", "1/A", "1/C"]


def test_some_of_a_file_can_be_run():
    made = experiment(seeds=[0, 1, 2])
    some = narrowed(made, seeds="2,0", steps=1)
    assert [trial.seed for trial in trials(some)] == [2, 0]
    assert narrowed(made, seeds="1,1").seeds == (1,)


@pytest.mark.parametrize("file", sorted(SHIPPED.rglob("*.toml")), ids=lambda file: str(file.relative_to(SHIPPED)))
def test_every_file_that_comes_with_the_package_can_be_loaded(file):
    made = load_experiment(file)
    assert len(trials(made)) == len(made.seeds) * len(made.all_cells())
    assert file.parent.name in ("paper", "real") or file.stem == "quick" or len(made.seeds) >= 8


FAST = ("coder", "lora-1.5b")
PAPERS = [
    pytest.param(file, id=file.stem, marks=[] if file.stem in FAST else pytest.mark.slow)
    for file in sorted((SHIPPED / "paper").glob("*.toml"))
]


@pytest.mark.parametrize("file", PAPERS)
def test_the_papers_own_experiments_plan_their_memory_and_hours_without_weights(file):
    made = narrowed(load_experiment(file), seeds="0")

    report = forecast(made, Card(vram=141))

    assert report["fits_together"]
    assert report["hours"] > 0.5
    for name, node in report["nodes"].items():
        assert node["fits"]
        assert node["memory_gb"] <= node["budget_gb"]
        lora = name.startswith("B") and "lora" in file.stem
        assert (node["kind"] == "lora") == lora
    assert "hours" in forecast_text(report)
    assert not forecast(made, Card(vram=24))["fits_together"]

    for one in trials(made):
        settings = [one.settings_of(member) for member in one.members]
        assert one.steps == 50
        assert one.run["group"] == 12
        assert {s.effective_learning_rate("gsm8k", lora=bool(s.lora)) for s in settings} <= {1e-6, 1e-4}
        assert {(s.eval_every, s.truncation) for s in settings} == {(5, 2.0)}


def test_other_contents_of_a_data_file_make_another_trial(tmp_path):
    ids = []
    file = tmp_path / "own.jsonl"
    for answer in (1, 2):
        file.write_text(f'{{"question": "q", "answer": {answer}}}\n')
        ids.append(spec(task="own.jsonl", data=str(file)).id)
    assert ids[0] != ids[1]
