"""How this installation gets further packages: a clone, a wheel in a virtual environment, or pipx."""

import sys
from pathlib import Path
from shlex import quote

NAME = "ftis-node"
SOURCE = Path(__file__).parent.parent  # a clone's folder; else where packages are installed


def to_install(what: str) -> str:
    """The command that adds a requirement (`NAME[extra]`, `NAME>=1`) to this installation; it may be typed anywhere."""
    pipx = (Path(sys.prefix) / "pipx_metadata.json").exists()
    pip = f"pipx runpip {NAME} install" if pipx else f"{quote(sys.executable)} -m pip install"
    if what.startswith(f"{NAME}[") and (SOURCE / "pyproject.toml").exists():
        return f"{pip} -e {quote(what.replace(NAME, str(SOURCE), 1))}"
    return f"{pip} {quote(what)}"
