"""The picture of the imports in docs/architecture.md is what import-linter holds the code to."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADING = "## Imports run one way"


def test_the_picture_shows_the_layers() -> None:
    section = (ROOT / "docs/architecture.md").read_text().split(HEADING)[1].split("\n## ")[0]
    picture = [line.strip() for line in section.splitlines() if line.startswith("    ") and line.strip() != "↓"]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [set(row.split(" | ")) for row in picture] == [
        {name.strip().removeprefix("ftis_node.") for name in layer.split("|")} for layer in contracts[0]["layers"]
    ]


def test_every_room_has_its_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {name.strip() for layer in contracts[0]["layers"] for name in layer.split("|")}
    rooms = {
        f"ftis_node.{path.stem}"
        for path in (ROOT / "ftis_node").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - named == {"ftis_node.__init__", "ftis_node.__main__"}
