"""Counts lines of code, and what a user meets, against the budgets of CONTRIBUTING.md; the exit code is 1 if one is
exceeded.

    python -m tests.budget

A line of code holds a token of the program: blank lines, comments and docstrings do not count, nor does generated code.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import Any

from ftis_node.config.settings import Settings
from ftis_node.methods import METHODS
from tests.support.command_lines import root

ROOT = Path(__file__).parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PROGRAMS = ("fuzz", "hostile", "manual")  # run by hand, or by `make test-all`
METRIC = re.compile(r"`(?!\w+_p\d+`)[^`]+`")
ROW = re.compile(r"^\| ([a-z]+) \|.*\| ([\d,]+) \|$", re.MULTILINE)


def lines_of(source: str) -> int:
    """The number of lines of code in a program's text."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def commands_in(group: Any) -> int:
    """The number of commands that a person can type, those of groups included and the groups not."""
    found = [group.get_command(None, name) for name in getattr(group, "commands", ())]  # the root makes each when asked
    return sum(commands_in(one) for one in found) or 1


def surface() -> dict[str, int]:
    """What a user meets, counted. metrics: names that rows of metrics.md explain, without percentiles; words: of README
    and docs/*.md."""
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    return {
        "settings": len(Settings.model_fields),
        "commands": commands_in(root()),
        "presets": len(METHODS),
        "metrics": sum(
            len(METRIC.findall(row.split(" (")[0])) for row in metrics.splitlines() if row.startswith("* `")
        ),
        "words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


def main() -> int:
    counts = {"product": 0, "lab": 0, "tests": 0, "programs": 0}
    for path in [*ROOT.glob("ftis_node/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        parts = path.relative_to(ROOT).parts
        if not path.name.endswith("_pb2.py"):
            code = "lab" if parts[1] == "lab" else "product"
            test = "programs" if parts[1] in PROGRAMS else "tests"
            counts[test if parts[0] == "tests" else code] += lines_of(path.read_text(encoding="utf-8"))
    budgets = {name: int(limit.replace(",", "")) for name, limit in ROW.findall((ROOT / "CONTRIBUTING.md").read_text())}
    everything = counts | surface()
    for name, count in everything.items():
        print(f"{name}: {count:,} of {budgets[name]:,}{' lines' if name in counts else ''}")
    return any(count > budgets[name] for name, count in everything.items())


if __name__ == "__main__":
    sys.exit(main())
