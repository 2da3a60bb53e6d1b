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
        {name.strip() for name in layer.split("|")} for layer in contracts[0]["layers"]
    ]
