"""The report says what was run, what is missing, and what follows; the same trials give the same bytes."""

import json
import math
import re
import shutil
from dataclasses import astuple
from pathlib import Path

import pytest

from ftis_node.errors import UsageError
from ftis_node.lab.reporting.index import BEGIN, END, write_index
from ftis_node.lab.reporting.page import level
from ftis_node.lab.reporting.report import write_report
from ftis_node.lab.reporting.results import read_results
from ftis_node.lab.reporting.speed import speeds
from ftis_node.lab.reporting.statistics import mean_interval
from tests.support.lab_report import Laboratory

SPREAD = [-0.02, 0.0, 0.02, 0.01, -0.01, 0.005]


def around(mean):
    return [mean + spread for spread in SPREAD]


def laboratory(out):
    lab = Laboratory(out, seeds=6, target=0.5)
    lab.cell(
        "alone",
        {"A": around(0.7), "B": around(0.4)},
        harder=True,
        collaboration="alone",
    )
    lab.cell(
        "unshared",
        {"A": around(0.6), "B": around(0.3)},
        harder=True,
    )
    lab.cell(
        "f-tis",
        {"A": around(0.7), "B": around(0.45)},
        values={"divergence": "k1", "threshold": 1.0},
        absent=[2],
    )
    lab.cell(
        "nois",
        {"A": 0.2, "B": 0.1},
        unfinished=[4],
        absent=[5],
    )
    lab.claim("less", "nois", "alone")
    return lab.claim("same", "f-tis", "alone", node="A", family="two")


def report_and_index(lab, folder):
    """A report's page, and the page of the index that it is in."""
    page = write_report(lab.write(), folder / "index" / "made")
    (folder / "index" / "README.md").write_text(f"{BEGIN}\n{END}\n")
    return page, write_index(folder / "index").read_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(laboratory(tmp_path_factory.mktemp("lab")).write())


def test_the_head_names_what_was_run_and_what_is_missing(report):
    text = report.read_text()
    assert text.startswith("# Made up\n\nOf *no* import.\n")
    assert "**3 trials are missing** (F-TIS: seeds 2 not started; NOIS: seeds 4 unfinished; NOIS: seeds 5 not" in text


def test_it_has_two_pictures_and_one_table(report):
    text = report.read_text()
    folder = report.parent

    pictures = re.findall(r"\]\(([^)]*)\)", text)
    assert len(pictures) == 2
    assert all((folder / name).stat().st_size > 1000 for name in pictures)

    files = {path.name for path in folder.iterdir()}
    assert files == {"report.md", "summary.json", "seeds.csv", *pictures}

    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Claims", "Validation curves", "Final pass@1"]


def test_many_claims_are_counted_by_family_and_the_index_counts_ours_by_report(tmp_path):
    lab = Laboratory(tmp_path / "lab", seeds=6, target=0.5)
    lab.cell("alone", {"A": around(0.7)})
    lab.cell("nois", {"A": around(0.2)})
    for _ in range(16):
        lab.claim("less", "nois", "alone", family="down", source="ours")
        lab.claim("greater", "nois", "alone", family="up", source="ours")

    path, index = report_and_index(lab, tmp_path)

    text = path.read_text()
    assert "| down | 16 | 16 inconclusive |" in text, "six seeds say little of so many"
    assert "| up | 16 |" in text
    assert "| [made](made/report.md) | 32 | " in index


def test_the_committed_index_is_what_the_committed_reports_say(tmp_path):
    committed = Path(__file__).parents[1] / "docs/evidence"
    page = write_index(Path(shutil.copytree(committed, tmp_path / "evidence")))
    assert page.read_text() == (committed / "README.md").read_text(), "run python -m ftis_node.lab.reporting.index"


def test_the_summary_is_json_with_claims_and_means_of_the_tail(report):
    summary = json.loads((report.parent / "summary.json").read_text())
    less, same = summary["claims"]
    assert less["difference"]["n"] == 4
    assert same["verdict"] == "reproduced"
    assert summary["missing"][0] == {"cell": "f-tis", "seed": 2, "why": "not started"}

    asked = ("held-out", "A", "alone")
    (row,) = [r for r in summary["final"] if (r["set"], r["node"], r["cell"]) == asked]
    interval = (row["mean"], row["low"], row["high"])
    expected = astuple(mean_interval(around(0.7)))
    assert interval == pytest.approx(expected[:3], abs=1e-5)
    assert row["start"] == pytest.approx(0.2)
    assert row["n"] == 6
    assert row["collapsed"] == 0


def test_a_seed_that_collapsed_is_counted_apart_and_counts_in_every_test(tmp_path):
    """Starts are 0.2: a seed that ends below 0.1 has collapsed. One in six undoes what five of six bear out."""
    ends = [*around(0.7)[:5], 0.05]
    lab = Laboratory(tmp_path / "lab", seeds=6)
    lab.cell("base", {"A": around(0.7)})
    lab.cell("method", {"A": ends})
    lab.cell("lost", {"A": 0.05})
    lab.claim("not worse", "method", "base", family="a")
    lab.claim("less", "lost", "base")

    path, index = report_and_index(lab, tmp_path)

    text = path.read_text()
    others = level(mean_interval(ends[:5]))
    assert "7 of 18 values are of collapsed seeds; where none of 6 did, up to 46 % may." in text
    assert f"METHOD | 0.200 → {others}; 1 collapsed to 0.050, share [0.004, 0.641] | 6 |" in text
    assert "LOST | 0.200 → –; 6 collapsed to 0.050, share [0.541, 1.000] | 6 |" in text

    summary = json.loads(path.with_name("summary.json").read_text())
    fallen, lost = summary["claims"]
    assert fallen["difference"]["n"] == 5
    assert fallen["collapsed"] == 1
    assert fallen["verdict"] == "inconclusive"
    assert fallen["difference"]["mean"] == pytest.approx(0)
    assert fallen["mean"] == pytest.approx(-0.655 / 6)
    assert lost["difference"]["n"] == 0
    assert lost["verdict"] == "reproduced"
    assert "| –; of all −0.651 | 0, 6 collapsed | 0.031 |" in text
    assert "| every pair has a collapse | 0, 6 collapsed |" in index


def test_the_same_trials_give_the_same_bytes(report, tmp_path):
    again = write_report(report.parent.parent, tmp_path / "again").parent
    first = report.parent
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in again.iterdir())
    for name in files:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name


def test_one_seed_without_peers_makes_a_report_without_intervals(tmp_path):
    lab = Laboratory(tmp_path / "lab", seeds=1)
    lab.cell("only", {"A": 0.5})
    lab.claim("same", "only", "only")
    text = write_report(lab.write()).read_text()
    assert "| ONLY | 0.200 → 0.500 – | 1 |" in text
    assert "nan" not in text


def test_a_directory_without_results_is_an_error_that_says_what_to_do(tmp_path):
    lab = Laboratory(tmp_path, seeds=2)
    lab.cell("only", {"A": 0.5}, unfinished=[0], absent=[1])
    with pytest.raises(UsageError, match=r"No trial .* has finished.*Run"):
        write_report(lab.write())
    assert not (tmp_path / "report").exists()


def test_how_much_sooner_is_told_with_the_seeds_that_never_got_there(tmp_path):
    """Evaluations rise to their end on a straight line of 30 s: 0.5 is reached at 30 · 0.3 / (end − 0.2)."""
    lab = Laboratory(tmp_path, seeds=4, target=0.5)
    lab.cell("alone", {"A": [0.6, 0.6, 0.6, 0.4]}, pace="free")
    lab.cell("two", {"A": [0.8, 0.8, 0.4, 0.8], "B": 0.8, "S": 0.4}, pace="free", slower=["S"])
    found = speeds(read_results(lab.write()))
    assert list(found["alone"].times.values()) == pytest.approx([22.5, 22.5, 22.5, math.inf])
    assert list(found["two"].times.values()) == pytest.approx([15, 15, math.inf, 15]), "S is slower, and not counted"
    assert found["two"].gains == pytest.approx({0: 1.5, 1: 1.5})
    assert found["two"].gain().mean == pytest.approx(1.5)
    page = write_report(tmp_path).read_text()
    assert "| TWO | 3 of 4 |" in page
    assert "1.50 [1.50, 1.50] | 2 |" in page
    assert speeds(read_results(Laboratory(tmp_path / "x", seeds=1).cell("alone", {"A": 0.5}).write())) == {}


@pytest.mark.parametrize(("target", "reached"), [(0.9, "0 of 3"), (0.1, "3 of 3")])
def test_a_target_that_none_or_all_had_from_the_start_has_no_gain(tmp_path, target, reached):
    lab = Laboratory(tmp_path, seeds=3, target=target)
    for cell in ("alone", "two"):
        lab.cell(cell, {"A": 0.6}, pace="free")

    found = speeds(read_results(lab.write()))

    assert [speed.gains for speed in found.values()] == [{}, {}]
    assert f"| TWO | {reached} |" in write_report(tmp_path).read_text()
