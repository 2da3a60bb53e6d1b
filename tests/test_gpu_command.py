"""`make gpu` without a card: it says so, runs part by part, goes on where it was, and draws its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.manual import gpu

PLACE = gpu.Place("cpu", small=True)


def finds(monkeypatch: pytest.MonkeyPatch, **states: str) -> list[str]:
    """Stands in for the processes: what each named part finds, kept as a real one keeps it; returns which ran."""
    ran: list[str] = []

    def run(name: str, place: gpu.Place, file: Path, limit: float) -> dict[str, Any]:
        ran.append(name)
        found = {"part": name, "state": states[name], "seconds": 0.0, "figures": {"x": 1.0}, "why": "so | it is"}
        file.write_text(json.dumps(found))
        return found

    monkeypatch.setattr(gpu, "run", run)
    return ran


def test_a_lack_of_card_or_library_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2 and "no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(gpu, "LIBRARIES", ("torch", "no_such_library"))
    assert gpu.main([]) == 2 and "no_such_library" in capsys.readouterr().err
    assert gpu.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in gpu.PARTS)
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--parts", "nothing"])


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["--device", "cpu", "--parts", "step,two-nodes,3b-nf4", "--out", str(tmp_path)]
    ran = finds(monkeypatch, **{"step": "done", "two-nodes": "failed", "3b-nf4": "skipped"})
    assert gpu.main(line) == 1 and ran == ["3b-nf4", "step", "two-nodes"]
    ran = finds(monkeypatch, **{"two-nodes": "done", "3b-nf4": "skipped"})
    assert gpu.main(line) == 0 and ran == ["3b-nf4", "two-nodes"]
    ran = finds(monkeypatch, step="done")
    assert gpu.main([*line[:2], "--parts", "step", "--again", *line[4:]]) == 0 and ran == ["step"]
    assert [one["part"] for one in json.loads((tmp_path / "gpu.json").read_text())] == ["3b-nf4", "step", "two-nodes"]
    assert "| 3b-nf4 | skipped: so / it is |  |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_a_part_is_measured_in_a_process_that_is_ended_at_its_limit(tmp_path: Path) -> None:
    assert gpu.run("machine", PLACE, tmp_path / "a", limit=0.1)["why"] == "it took longer than 0.1 s"
    found = gpu.run("machine", PLACE, tmp_path / "b", limit=300)
    assert found["state"] == "done" and found["figures"]["matrix_flops"] > 0
    assert json.loads((tmp_path / "b").read_text()) == found


def test_what_a_checkout_has_no_setting_for_is_left_out_and_what_breaks_told(monkeypatch: pytest.MonkeyPatch) -> None:
    part = gpu.Part(1, lambda place: place.settings("tiny-a", no_such_setting=1))
    monkeypatch.setattr(gpu, "PARTS", {"a": part, "b": gpu.Part(1, lambda place: {"x": 1 / 0})})
    assert gpu.measured("a", PLACE) == {"state": "skipped", "why": "there is no setting no_such_setting"}
    assert gpu.measured("b", PLACE) == {"state": "failed", "why": "ZeroDivisionError: division by zero"}


def test_the_table_says_what_the_aims_are_about() -> None:
    trained = {"kind": "lora", "dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": 16_384}
    trained |= {"operations_per_s": 3e14, "train_tokens_per_s": 25_000.0}
    trained |= {"peak_memory_mb": 9_500.0, "predicted_memory_mb": 10_000.0}
    speed = {"native_tokens_per_s": 12_000.0, "hf_tokens_per_s": 2_000.0, "ratio_hf": 6.0, "over_floor": 1.75}
    card = {"device": "cuda, X", "matrix_flops": 6e14, "copy_bytes_per_s": 4.2e12}
    found = {"machine": card, "generate": speed, "3b-lora": trained}
    text = gpu.table([{"part": name, "state": "done", "figures": one} for name, one in found.items()])
    assert "bf16 matrices 600 TFLOP/s, copies 4,200 GB/s" in text
    assert "12,000 tokens/s, `hf` 2,000: 6.00 ×; 1.75 × the bandwidth's time" in text
    assert "lora, bfloat16, checkpointing, micro-batches of 16,384: 25,000 tokens/s, 50% of the matrix rate" in text
    assert "9.50 GB of 10.00 predicted" in text


@pytest.mark.slow
def test_every_part_runs_in_its_tiny_form(tmp_path: Path) -> None:
    assert gpu.main(["--device", "cpu", "--small", "--out", str(tmp_path)]) == 0
    found = {one["part"]: one["state"] for one in json.loads((tmp_path / "gpu.json").read_text())}
    assert found.keys() == gpu.PARTS.keys() and "failed" not in found.values()
