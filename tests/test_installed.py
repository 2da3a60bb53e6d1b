"""A message about a missing package gives the command for this installation: a clone, a wheel, or pipx."""

import shlex
import sys
from pathlib import Path

import pytest

from ftis_node import installed
from ftis_node.errors import UsageError
from ftis_node.installed import to_install
from ftis_node.observe.tracking import refuse_untracked

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "install"]


def test_a_clone_is_installed_again_with_the_extra():
    assert shlex.split(to_install("ftis-node[data]")) == [*PIP, "-e", f"{ROOT}[data]"]
    assert shlex.split(to_install("numpy>=2.0")) == [*PIP, "numpy>=2.0"]


def test_a_wheel_gets_the_extra_where_it_is_and_pipx_by_pipx(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "SOURCE", tmp_path)
    assert shlex.split(to_install("ftis-node[data]")) == [*PIP, "ftis-node[data]"]
    (tmp_path / "pipx_metadata.json").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert to_install("ftis-node[data]") == "pipx runpip ftis-node install 'ftis-node[data]'"


def test_messages_say_it():
    with pytest.raises(UsageError) as caught:
        refuse_untracked("trackio")
    assert caught.value.fix == f"Run: {to_install('ftis-node[trackio]')}"
