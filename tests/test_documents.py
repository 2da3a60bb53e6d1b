"""What the documents tell a person to type exists: commands with their options, settings, make's targets, modules; and
their links lead somewhere.
"""

import functools
import re
import shlex
from pathlib import Path

import pytest

from ftis_node.config.settings import HOME_VARIABLE, Settings
from tests.support.command_lines import parsed, root

ROOT = Path(__file__).parent.parent
PLACES = ("*.md", "docs/**/*.md", "proto/*.md", "tests/hostile/*.md")
DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))
OMITTED = "…"  # what a document leaves to the reader; a command with it may lack what it needs
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_COMMAND = re.compile(r"(?:^|\$\(|&& |; |/bin/|exec \w+ )ftis-node ([a-z-].*)")
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


def name_of(path):
    return str(path.relative_to(ROOT))


@functools.cache
def text_of(path):
    return path.read_text(encoding="utf-8")


@functools.cache
def typed(path):
    """Lines of the code blocks without their comments, continued ones joined, and what stands in backquotes."""
    text = text_of(path)
    fenced = [block.split("\n", 1)[1].rsplit("\n", 1)[0] for block in _FENCE.findall(text)]
    indented = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    lines = "\n".join(fenced + indented).replace("\\\n", " ").splitlines()
    code = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    inline = _INLINE.findall(_FENCE.sub("", text))
    return code + inline


def commands(path):
    """Every `ftis-node …`, as words. `ftis-node pause | resume` stands for two commands; a real pipe ends one."""
    for line in typed(path):
        found = _COMMAND.search(line)
        if found is None:
            continue
        first, *others = re.split(r" \| |;|&&|>|\)", found[1])
        yield words(first)
        for other in others:
            if words(other)[:1] and words(other)[0] in root().commands:
                yield words(other)


def words(text):
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def excused(error, arguments):
    """An ellipsis, and capitals, stand for a value that is not written out; an option may be named without one."""
    if (arguments[-1] == OMITTED or arguments[-1].startswith("--")) and "requires an argument" in str(error):
        return True
    capitals = any(word.isupper() for argument in arguments for word in re.split(r"[=:/]", argument))
    return capitals and str(error).startswith("BadParameter")


of_each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)


@of_each_document
def test_every_command_in_the_documents_exists_with_its_options(path):
    for arguments in commands(path):
        try:
            parsed([word for word in arguments if word != OMITTED])
        except LookupError:
            continue  # a mention by name alone, or with an ellipsis
        except ValueError as error:
            if not excused(error, arguments):
                raise AssertionError(f"ftis-node {' '.join(arguments)}: {error}") from None


@of_each_document
def test_every_setting_in_the_documents_exists(path):
    text = text_of(path)
    assert set(re.findall(r"--set ([a-z_0-9]+)=", text)) <= {*Settings.model_fields, "key"}
    variables = {f"FTIS_{field.upper()}" for field in Settings.model_fields} | {HOME_VARIABLE}
    assert set(re.findall(r"\bFTIS_[A-Z_0-9]+\b", text)) <= variables


@of_each_document
def test_every_target_and_module_in_the_documents_exists(path):
    rules = re.findall(r"^([a-z][a-z -]*):(?!=)", text_of(ROOT / "Makefile"), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for line in typed(path):
        if found := re.match(r"make ((?:[a-z-]+\s?)+)", line):
            assert set(found[1].split()) <= targets, line
        for module in re.findall(r"python3? -m ((?:ftis_node|tests)[\w.]*)", line):
            place = ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), line


@functools.cache
def anchors(path):
    """As a code host makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text_of(path)), re.MULTILINE)
    slugs = []
    for heading in headings:
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).strip()
        slug = words.replace(" ", "-")
        slugs.append(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
    return frozenset(slugs)


@of_each_document
def test_every_link_within_the_repository_leads_somewhere(path):
    for target in _LINK.findall(_FENCE.sub("", text_of(path))):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        found = (path.parent / place).resolve() if place else path
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), target


def test_it_finds_what_it_looks_for():
    found = [command for path in DOCUMENTS for command in commands(path)]
    assert ["join", "--help-all"] in found
    assert ["resume"] in found
    assert len(found) > 50
    for line in ("join --modle x", "jion", "join --port many", "status extra"):
        with pytest.raises(ValueError, match=r"NoSuch|BadParameter|UsageError") as caught:
            parsed(line.split())
        assert not excused(caught.value, line.split())
