"""What is built from the source is whole: an empty environment that gets the wheel runs the demo. And the lock is."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
IGNORED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "wheels", "demo-output")
# Of a virtual environment itself, whichever version it has.
NOT_LOCKED = {"ftis-node", "pip"}


def locked():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def needed(extras):
    """Names of all distributions that ftis-node brings with these extras, itself among them."""
    seen = set()
    left = [("ftis-node", extra) for extra in ("", *extras)]
    while left:
        name, extra = left.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        if not extra:
            yield name
        for text in metadata.requires(name) or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                left += [(canonicalize_name(wanted.name), one) for one in ("", *wanted.extras)]


def test_the_lock_names_every_package_that_an_installation_brings_in_the_version_that_is_tested():
    lock = locked()
    for name in set(needed({"lab", "math", "dev"})) - NOT_LOCKED:
        assert name in lock, f"{name} is missing: make lock"
        assert lock[name] == metadata.version(name).partition("+")[0], f"{name}: make lock, or make clean"


def test_the_extras_that_the_documents_name_are_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    page = (ROOT / "docs" / "deploy.md").read_text()
    table = page.partition("| extra |")[2].partition("\n\n")[0]
    first_column = " ".join(re.findall(r"^\| (`[^|]+)", table, re.MULTILINE))
    named = re.findall(r"`([\w-]+)`", first_column)

    assert set(named) == project["optional-dependencies"].keys()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source archive, and the wheel that was made from nothing but that."""
    place = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, place / "source", ignore=IGNORED)
    hook = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
    line = [sys.executable, "-c", hook, "build_sdist", str(place)]
    subprocess.run(line, cwd=place / "source", check=True, capture_output=True)
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(place, filter="data")
    unpacked = place / archive.name.removesuffix(".tar.gz")
    subprocess.run([*line[:3], "build_wheel", str(place)], cwd=unpacked, check=True, capture_output=True)
    return place


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_archives_hold_what_they_must_and_nothing_else(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        source = {name.partition("/")[2] for name in opened.getnames()}
    must = "LICENSE Makefile constraints.txt proto/ftis.proto deploy/Dockerfile tests/test_life.py"
    assert set(must.split()) <= source
    (wheel,) = built.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files", "ftis_node"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        assert {name for name in held if ".dist-info/" not in name} == set(listed.stdout.split())
    assert any(name.endswith("licenses/LICENSE") for name in held)


CLEAN = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
CONSTRAINTS = str(ROOT / "constraints.txt")


def run(*line, **environment):
    """The stdout of a command that ends well, in an environment of this machine's and nothing of this project's."""
    told = subprocess.run(
        [*map(str, line)],
        env=CLEAN | environment,
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pipx_installs_the_wheel_where_there_is_only_python_and_the_demo_runs(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(tmp_path / "venv" / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "pipx")
    (wheel,) = built.glob("*.whl")
    places = {name: str(tmp_path / name) for name in ("PIPX_HOME", "PIPX_BIN_DIR", "PIPX_MAN_DIR")}
    run(tmp_path / "venv" / "bin" / "pipx", "install", f"--pip-args=-c {CONSTRAINTS}", wheel, **places)
    command = tmp_path / "PIPX_BIN_DIR" / "ftis-node"
    summary = json.loads(run(command, "demo", "--steps", "2", "--json", "--output", tmp_path / "out"))
    assert summary["complete"]
    assert all(node["steps"] >= 2 for node in summary["nodes"])
    assert summary["picture"] is None, "matplotlib is of an extra"
    python = next((tmp_path / "PIPX_HOME").glob("venvs/*/bin/python"))
    told = run(python, "-c", "from ftis_node.installed import to_install as one; print(one('ftis-node[math]'))")
    run(tmp_path / "venv" / "bin" / "pipx", *shlex.split(told)[1:], "-c", CONSTRAINTS, **places)
    run(python, "-c", "import math_verify")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_script_installs_upgrades_and_removes_and_says_first_what_it_does(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "environment"
    link = tmp_path / "bin" / "ftis-node"
    script = (ROOT / "deploy" / "install.sh", "--dir", place, "--bin", link.parent)
    told = run("sh", *script, "--from", wheel, "--dry-run")
    assert str(place) in told
    assert str(link) in told
    assert not place.exists()
    asked = subprocess.run(["sh", *script, "--from", wheel], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert asked.returncode == 1
    assert "--yes" in asked.stderr
    assert not place.exists()
    for verb in ("installs", "upgrades"):
        assert f"This {verb} " in run("sh", *script, "--from", wheel, "--extras", "", "--yes")
        assert run(link, "--version").strip() == metadata.version("ftis-node")
    assert '"problems": []' in run(link, "join", "--dry-run", "--json", "--home", tmp_path / "home")
    assert "Homes of nodes stay" in run("sh", *script, "--uninstall", "--yes")
    assert not place.exists()
    assert not link.is_symlink()


def test_the_script_touches_nothing_that_is_not_its_own(tmp_path):
    script = ("sh", str(ROOT / "deploy" / "install.sh"), "--dry-run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ftis-node").touch()
    for options, said in (
        (("--dir", tmp_path / "full"), "not of this script"),
        (("--dir", tmp_path / "full", "--uninstall"), "no environment of this script"),
        (("--dir", tmp_path / "new", "--bin", tmp_path / "bin"), "leads elsewhere"),
        (("--from", "/nowhere.whl"), "nothing at"),
        (("--frm", "x"), "no option"),
        (("--dir",), "needs a value"),
    ):
        told = subprocess.run([*script, *map(str, options)], capture_output=True, text=True)
        assert told.returncode == 1 and said in told.stderr, told


def test_the_script_writes_extras_where_pip_reads_them_and_a_link_that_leads_from_anywhere():
    script = ("sh", str(ROOT / "deploy" / "install.sh"), "--dry-run", "--extras", "gpu", "--dir", "here", "--from")
    for source, wanted in (
        ("git+https://example.org/x.git", "ftis-node[gpu] @ git+https://example.org/x.git"),
        ("ftis-node==0.1", "ftis-node[gpu]==0.1"),
    ):
        told = run(*script, source)
        assert f" {wanted}\n" in told
        assert "  writes       /" in told
        assert Requirement(wanted).extras == {"gpu"}
