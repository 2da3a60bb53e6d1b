"""`make gpu` without a card: it says so, runs part by part, goes on where it was, and writes its page."""

import json

import pytest
import torch

from ftis_node.lab.step_seconds import Card
from tests.manual import gpu, gpu_learn, gpu_parts
from tests.manual.gpu_page import line, page, predicted
from tests.manual.gpu_place import Place

PLACE = Place("cpu", small=True)


def finds(monkeypatch, **states):
    """Stands in for the processes: what each named part finds, kept as a real one keeps it; returns which ran."""
    ran = []

    def run(name, place, file, limit):
        ran.append(name)
        found = {
            "part": name,
            "state": states[name],
            "seconds": 0.0,
            "small": True,
            "figures": {"lines": [line("x", 1.0)]},
            "why": "so | it is",
        }
        file.write_text(json.dumps(found))
        return found

    monkeypatch.setattr(gpu, "run", run)
    return ran


def test_a_lack_of_card_or_library_is_told(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert gpu.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in gpu_parts.PARTS)
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--parts", "nothing", "--device", "cpu"])
    monkeypatch.setattr(gpu, "LIBRARIES", ("torch", "no_such_library"))
    assert gpu.main([]) == 2
    assert "no_such_library" in capsys.readouterr().err


def test_it_goes_on_where_it_was(tmp_path, monkeypatch):
    asked = ["--device", "cpu", "--parts", "step,two-cards,3b-8gb", "--out", str(tmp_path)]
    ran = finds(monkeypatch, **{"step": "done", "two-cards": "failed", "3b-8gb": "skipped"})
    assert gpu.main(asked) == 1
    assert ran == ["3b-8gb", "step", "two-cards"]
    ran = finds(monkeypatch, **{"two-cards": "unfinished", "3b-8gb": "skipped"})
    assert gpu.main(asked) == 0
    assert ran == ["3b-8gb", "two-cards"]
    ran = finds(monkeypatch, **{"two-cards": "done", "3b-8gb": "skipped"})
    assert gpu.main(asked) == 0
    assert ran == ["3b-8gb", "two-cards"]
    ran = finds(monkeypatch, step="done")
    assert gpu.main([*asked[:2], "--parts", "step", "--again", *asked[4:]]) == 0
    assert ran == ["step"]
    assert [one["part"] for one in json.loads((tmp_path / "gpu.json").read_text())] == ["3b-8gb", "step", "two-cards"]
    assert "| 3b-8gb | skipped | 0 | so / it is |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_a_part_is_measured_in_a_process_that_is_ended_at_its_limit(tmp_path):
    assert gpu.run("machine", PLACE, tmp_path / "a", limit=0.1)["why"] == "it took longer than 0.1 s"
    found = gpu.run("machine", PLACE, tmp_path / "b", limit=300)
    assert found["state"] == "done"
    assert found["figures"]["card"]["tflops"] > 0
    assert json.loads((tmp_path / "b").read_text()) == found


def test_what_a_machine_has_not_is_skipped_and_what_breaks_is_told(monkeypatch):
    small = Place("cuda", small=False, card=Card(vram=8.2))
    monkeypatch.setattr(gpu_parts, "PARTS", {**gpu_parts.PARTS, "b": gpu_parts.Part(1, lambda place: {"x": 1 / 0})})
    told = {"state": "skipped", "why": "this card has 8.2 GB, and 12 are asked for"}
    assert gpu_parts.measured("7b-12gb", small) == told
    assert gpu_parts.measured("b", PLACE) == {"state": "failed", "why": "ZeroDivisionError: division by zero"}


def test_the_page_has_the_card_and_each_measurement_beside_what_was_predicted(tmp_path):
    card = {
        "card": Card(tflops=160.0).__dict__,
        "device": "cuda, X",
        "memory_gb": 25.8,
        "versions": {"torch": "2.13"},
    }
    card |= dict.fromkeys(("driver", "cuda", "capability", "wsl2", "allocator"), "?") | {"commit": "1234abc+"}
    lines = {"machine": [line("copies", 900.0, 1000.0, "GB/s")], "step": [line("tokens", 12000.4, None, "tokens/s")]}
    found = [
        {
            "part": part,
            "state": "done",
            "seconds": 7.0,
            "small": False,
            "figures": (card | {"lines": some}),
        }
        for part, some in lines.items()
    ]
    text = page(
        [*found, {"part": "nf4", "state": "failed", "seconds": 60.0, "small": False, "why": "a\nb"}], "make gpu"
    )
    for row in ("copies | 900 GB/s | 1,000 GB/s | 0.90", "tokens | 12,000 tokens/s |  | ", "nf4 | failed | 60 | a b"):
        assert f"| {row} |" in text
    assert "cuda, X, 25.8 GB" in text
    assert "commit 1234abc+" in text
    assert "torch 2.13" in text
    assert "`make gpu`" in text
    (tmp_path / "machine.json").write_text(json.dumps(found[0]))
    assert gpu_parts.known_card(tmp_path / "machine.json") == Card(tflops=160.0)
    assert gpu_parts.known_card(tmp_path / "none.json") is None


def test_the_predicted_table_stands_in_the_documents():
    table = predicted()
    assert table in (gpu.ROOT / "docs" / "performance.md").read_text()
    assert "| 7B | no |" in table


def test_a_training_of_real_models_needs_a_folder_of_them(monkeypatch, tmp_path):
    monkeypatch.delenv("MODELS", raising=False)
    place = Place("cpu", small=False, out=tmp_path)
    assert gpu_parts.measured("learn", place)["state"] == "skipped"
    monkeypatch.setenv("MODELS", str(tmp_path))
    assert "there is no coder-0.5b in" in gpu_parts.measured("learn", place)["why"]


@pytest.mark.slow
def test_a_training_goes_on_from_piece_to_piece(tmp_path):
    first = gpu_learn.run_piece("cpu", tmp_path, "", small=True, seconds=0.0)
    assert first["ended"] == {"state": "unfinished", "why": "4 of 4 trials are left"}
    found = gpu_learn.run_piece("cpu", tmp_path, "", small=True)
    assert found["ended"] == {"state": "done"}
    assert len(found["lines"]) == len(found["trials"]) == 8
    assert [one["cell"] for one in found["trials"][::2]] == ["alone", "ftis", "gated", "nois"]
    assert all(one["pass_at_1"].keys() == {0, 3} and len(one["own_reward"]) == 3 for one in found["trials"])
    assert len(json.dumps(found)) < 20_000, "what a call brings back is small"


@pytest.mark.slow
def test_every_part_runs_in_its_tiny_form(tmp_path):
    assert gpu.main(["--device", "cpu", "--small", "--out", str(tmp_path)]) == 0
    found = {one["part"]: one["state"] for one in json.loads((tmp_path / "gpu.json").read_text())}
    assert found.keys() == gpu_parts.PARTS.keys()
    assert "failed" not in found.values()
