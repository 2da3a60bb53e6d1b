"""Prints what pyproject.toml asks for, one requirement a line: `python deploy/requirements.py [EXTRA …]`.

The image installs these before the code, so that a change of the code alone installs nothing else anew.
"""

import sys
import tomllib
from pathlib import Path

with (Path(__file__).parent.parent / "pyproject.toml").open("rb") as file:
    settings = tomllib.load(file)
project = settings["project"]
lists = [settings["build-system"]["requires"], project["dependencies"]]
lists += [project["optional-dependencies"][extra] for extra in sys.argv[1:]]
print("\n".join(requirement for one in lists for requirement in one))
