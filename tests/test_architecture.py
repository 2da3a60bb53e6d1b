"""What docs/architecture.md and its neighbours say of the code is so: the picture of imports, figures, names."""

import tomllib
from pathlib import Path

from ftis_node.learner.batch import Prompted, TrainingGroup
from ftis_node.objective.loss import Terms
from ftis_node.objective.samples import Samples
from ftis_node.swarm.handshake import PROTOCOL_MAJOR
from ftis_node.swarm.pool import Scored
from ftis_node.swarm.wire.dht_limits import RECORD_LIFETIME
from ftis_node.worker.messages import StepGroup

ROOT = Path(__file__).parent.parent
HEADING = "## Imports run one way"


def test_the_picture_shows_the_layers():
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split(HEADING)[1].split("\n## ")[0]
    picture = []
    for line in section.splitlines():
        row = line.strip()
        if line.startswith("    ") and row != "↓":
            picture.append(set(row.split(" | ")))

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = project["tool"]["importlinter"]["contracts"][0]
    layers = [set(map(str.strip, layer.split("|"))) for layer in contract["layers"]]
    assert picture == layers


def test_figures_that_are_written_by_hand_are_those_of_the_code():
    architecture = (ROOT / "docs/architecture.md").read_text()
    assert f"1 KB, {RECORD_LIFETIME:g} s" in architecture
    assert f"uint32 major = 1;                // {PROTOCOL_MAJOR};" in (ROOT / "proto/ftis.proto").read_text()
    forms = {Scored, StepGroup, TrainingGroup, Prompted, Samples, Terms}
    assert all(f"`{form.__name__}`" in architecture for form in forms)
